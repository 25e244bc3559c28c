"""Cluster files and the image, offline: Ray's own rules, ours, and that jobs find the nodes they ask for."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters import (
    CLOUDS,
    CLUSTER,
    DATA_TASK,
    INDEX_ACTOR,
    RAY,
    ROOT,
    TRAINER,
    cloud,
    launched,
    node_types,
)

from xmcray.cluster_files import PLACEHOLDER, check_cluster_file
from xmcray.errors import ConfigError
from xmcray.training.placement import Nodes, place
from xmcray.training.run_config import ClusterConfig


@pytest.mark.parametrize("name", CLOUDS)
def test_ray_takes_the_cluster_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cloud(name)))
    check_cluster_file(path)
    with pytest.raises(ConfigError, match=f"still holds {PLACEHOLDER}"):
        check_cluster_file(CLUSTER / f"{name}.yaml")
    values = cloud(name)
    commands = json.dumps(values)
    assert "0.0.0.0" not in commands
    assert commands.count("RAY_AUTH_MODE=token;") == 2
    assert "--dashboard-host=127.0.0.1" in commands
    assert f"ray[data,serve,train,tune]=={RAY}" in commands
    assert values["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert "chmod 600 ~/.ray/auth_token" in values["setup_commands"]
    (mount,) = [command for command in values["setup_commands"] if "mount -t nfs" in command]
    assert ",acdirmin=1,acdirmax=1 " in mount, "nodes see each other's files at once"
    assert [
        local
        for local in values["file_mounts"].values()
        if "~" not in local and not (ROOT / local).exists()
    ] == []


@pytest.mark.parametrize("name", CLOUDS)
def test_nodes_get_all_that_the_package_is_built_of(name: str) -> None:
    mounts = cloud(name)["file_mounts"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    links = (ROOT / "xmcray" / "files").iterdir()
    needed = {link.resolve().relative_to(ROOT).parts[0] for link in links}
    needed |= {"pyproject.toml", "constraints.txt", "xmcray"}
    needed |= {project["readme"], *project["license-files"]}
    assert {path for path in needed if mounts.get(f"~/xmcray/{path}") != path} == set()


Change = Callable[[dict[str, Any]], Any]


def replaced(section: str, old: str, new: str) -> Change:
    def change(values: dict[str, Any]) -> None:
        before = list(values[section])
        values[section] = [command.replace(old, new) for command in before]
        assert values[section] != before

    return change


def gpu_nodes(values: dict[str, Any]) -> dict[str, Any]:
    """The node type with GPUs of an autoscaler's file."""
    return values["available_node_types"]["gpu"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("provider"), "the file: 'provider' is a required property"),
        (lambda v: v.pop("cluster_name"), "'cluster_name' is a required property"),
        (lambda v: v.pop("available_node_types"), "has no available_node_types"),
        (lambda v: v.pop("head_node_type"), "has no head_node_type"),
        (
            lambda v: gpu_nodes(v).pop("node_config"),
            "available_node_types.gpu: 'node_config' is a required property",
        ),
        (
            lambda v: gpu_nodes(v).update(max_worker=1),
            r"available_node_types.gpu: .*'max_worker' was unexpected",
        ),
        (lambda v: gpu_nodes(v)["resources"].update(GPU=0.5), "0.5 is not of type 'integer'"),
        (lambda v: v.update(head_node_type="boss"), "`head_node_type` must be one of"),
        (lambda v: gpu_nodes(v).update(min_workers=99), "smaller than the sum of `min_workers`"),
        (
            lambda v: v["provider"].update(type="awss"),
            "unknown provider.type 'awss'; did you mean 'aws'",
        ),
        (
            lambda v: v.update(provider={"type": "local", "head_ip": "10.0.0.1"}),
            "provider.type is local, expected one of aws, gcp, azure",
        ),
        (
            lambda v: gpu_nodes(v)["node_config"].update(InstanceType="g6e.12xlrge"),
            "'g6e.12xlrge', which is no machine type",
        ),
        (
            lambda v: gpu_nodes(v)["node_config"].pop("InstanceType"),
            "gpu.node_config.InstanceType is missing",
        ),
        (
            replaced("head_start_ray_commands", "=127.0.0.1", "=0.0.0.0"),
            "--dashboard-host is 0.0.0.0",
        ),
        (
            replaced("head_start_ray_commands", "RAY_AUTH_MODE=token", "A=b"),
            "head_start_ray_commands does not export",
        ),
        (
            replaced("worker_start_ray_commands", "RAY_AUTH_MODE=token", "A=b"),
            "worker_start_ray_commands does not",
        ),
        (
            replaced(
                "head_start_ray_commands", "export RAY_AUTH_MODE=token;", "# RAY_AUTH_MODE=token\n"
            ),
            "head_start_ray_commands does not export",
        ),
        (
            replaced("head_start_ray_commands", "RAY_AUTH_MODE=token", "RAY_AUTH_MODE=tokens"),
            "head_start_ray_commands does not export",
        ),
        (
            replaced(
                "head_start_ray_commands", "=127.0.0.1", "=127.0.0.1 --dashboard-host=0.0.0.0"
            ),
            "--dashboard-host is 0.0.0.0",
        ),
        (lambda v: v.pop("head_start_ray_commands"), "head_start_ray_commands starts no Ray"),
        (
            lambda v: v["file_mounts"].pop("~/.ray/auth_token"),
            "file_mounts has no ~/.ray/auth_token",
        ),
        (
            replaced("setup_commands", f"=={RAY}", "==2.9.0"),
            f"setup_commands install Ray 2.9.0, here is {RAY}",
        ),
        (
            lambda v: v.update(worker_setup_commands=["pip install 'ray[default]==2.9.0'"]),
            f"worker_setup_commands install Ray 2.9.0, here is {RAY}",
        ),
    ],
)
def test_a_mistake_in_a_cluster_file_is_one_line(
    change: Change, message: str, tmp_path: Path
) -> None:
    values = copy.deepcopy(cloud("aws"))
    change(values)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=message) as raised:
        check_cluster_file(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        replaced("head_start_ray_commands", "RAY_AUTH_MODE=token", 'RAY_AUTH_MODE="token"'),
        replaced("head_start_ray_commands", "=127.0.0.1", "='127.0.0.1'"),
        replaced("head_start_ray_commands", "=127.0.0.1", "=127.0.0.1; true"),
    ],
)
def test_quotes_of_the_shell_are_no_mistake(change: Change, tmp_path: Path) -> None:
    values = copy.deepcopy(cloud("aws"))
    change(values)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(values))
    check_cluster_file(path)


def test_a_missing_cluster_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster file nowhere.yaml does not exist, expected"):
        check_cluster_file("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"is not a file, expected .* `xmcray files cluster/aws"):
        check_cluster_file(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(spec="x"), "spec is 'x', expected a section; compare with"),
        (lambda v: v["spec"].update(authOptions="x"), "authOptions.mode is not token.*set it"),
    ],
)
def test_a_mistake_in_a_manifest_is_one_line(change: Change, message: str, tmp_path: Path) -> None:
    manifest = CLUSTER / "kuberay" / "raycluster.yaml"
    values = yaml.safe_load(manifest.read_text().replace(PLACEHOLDER, "mine"))
    change(values)
    path = tmp_path / "raycluster.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=message):
        check_cluster_file(path)


@pytest.mark.parametrize("name", [*CLOUDS, "raycluster", "rayjob"])
def test_training_finds_its_nodes(name: str) -> None:
    """Every resource that a training job asks for is that of some node type, and of the right one."""
    assert {kind.split("-")[0] for kind in launched(name, TRAINER, 4)} == {"gpu"}
    assert {kind.split("-")[0] for kind in launched(name, INDEX_ACTOR, 4)} == {"index"}
    assert {kind.split("-")[0] for kind in launched(name, DATA_TASK, 4)} == {"index"}, (
        "a GPU node for a task without"
    )
    types = node_types(name)
    possible = [
        (kind["resources"], kind["max_workers"])
        for kind in types.values()
        if kind.get("max_workers")
    ]
    where = place(
        ClusterConfig(workers=4, device="gpu", cpus_per_worker=8),
        Nodes({"h": {}}, possible, True),
        4,
    )
    assert where.use_gpu
    assert where.index_options == {"resources": {"index": 1.0}, "scheduling_strategy": "SPREAD"}


@pytest.mark.parametrize("name", CLOUDS)
def test_spot_first_then_on_demand(name: str) -> None:
    gpus = node_types(name)["gpu"]["resources"]["GPU"]
    assert launched(name, {"GPU": gpus}, 6) == {"gpu-spot": 4, "gpu": 2}, (
        "beyond spot's max_workers: on demand"
    )
    assert launched(name, {"GPU": gpus}, 2, ("market", "on-demand")) == {"gpu": 2}, (
        "as cluster/on_demand.py asks"
    )
    assert launched(name, INDEX_ACTOR, 4) == {"index-spot": 1}


def test_a_request_of_fewer_than_no_nodes_is_refused() -> None:
    words = [sys.executable, CLUSTER / "on_demand.py", "--gpus", "-1"]
    asked = subprocess.run(words, capture_output=True, text=True)
    assert asked.returncode == 2
    assert asked.stderr.endswith("error: --gpus is -1, expected at least 0\n")


def test_each_documented_build_of_the_cpu_image_names_an_index_of_its_wheels() -> None:
    # The lock pins CPU wheels of torch, which the default index does not have.
    assert re.search(r"^torch==\S+\+cpu\b", (ROOT / "requirements.lock").read_text(), flags=re.M)
    pages = [ROOT / "README.md", CLUSTER / "Dockerfile", CLUSTER / "README.md"]
    builds = []
    for page in [*pages, *(ROOT / "docs").glob("*.md")]:
        lines = page.read_text(encoding="utf-8").splitlines()
        builds += [line for line in lines if "docker build" in line and "--target cpu" in line]
    assert len(builds) >= 2
    assert [line for line in builds if "--build-arg PIP_EXTRA_INDEX_URL " not in line] == []


def test_the_image_is_pinned_and_runs_as_nobody() -> None:
    text = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
    code = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", code, flags=re.M)
    names = {name for _, name in stages}
    assert re.search(
        r"^ARG PYTHON=python:3\.1[12]\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", code, flags=re.M
    )
    assert {"cpu", "cuda"} <= names
    assert {base for base, _ in stages if base not in names} == {"${PYTHON}"}, (
        "one base for all stages"
    )
    runtime = code.split("AS runtime")[1].split("FROM ")[0]
    assert re.findall(r"^USER (\S+)$", runtime, flags=re.M) == ["1000:1000"]
    assert re.findall(r"^USER ", code.split("AS runtime")[1], flags=re.M) == ["USER "], (
        "no stage takes it back"
    )
    locked, package, cuda = re.findall(r"pip install (--prefix=/install [^&\n]*)", code)
    assert "--require-hashes -r requirements.lock" in locked
    assert "--no-deps ." in package
    assert "-c constraints.txt" in cuda
    assert f"ray[data,serve,train,tune]=={RAY}" in cuda
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", code, flags=re.M)
        for word in line.split()
    }
    sent = (CLUSTER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in sent if line.startswith("!")} == copied
    assert all((ROOT / path).exists() for path in copied)
    assert "*" in sent, "what is not named is not sent"
