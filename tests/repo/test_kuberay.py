"""Kubernetes manifests, offline: schemas of KubeRay and Kubernetes, what pods may do, what a service serves."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from clusters import CLUSTER, RAY, ROOT, cluster_of, launched, manifests, ray_manifests
from jsonschema import Draft202012Validator
from ray.serve.schema import ServeDeploySchema
from referencing import Registry, Resource

from xmcray import config
from xmcray.cluster_files import PLACEHOLDER, check_cluster_file
from xmcray.errors import ConfigError
from xmcray.serving.application import NUM_CPUS
from xmcray.serving.settings import ServeConfig
from xmcray.training.run_config import RunConfig

KUBERNETES = "1.34"


def pods(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = cluster_of(manifest)
    yield from (
        group["template"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    )
    if "submitterPodTemplate" in manifest["spec"]:
        yield manifest["spec"]["submitterPodTemplate"]


def test_serving_finds_its_nodes() -> None:
    service = ray_manifests()["rayservice"]
    served = yaml.safe_load(service["spec"]["serveConfigV2"])
    options = served["applications"][0]["args"]["options"]
    for deployment in ("Gateway", *options):
        asked = options.get(deployment, {}).get("ray_actor_options", {}).get("num_cpus", NUM_CPUS)
        assert set(launched("rayservice", {"CPU": asked}, 1)) == {"serve"}


def test_the_service_serves_our_application() -> None:
    text = ray_manifests()["rayservice"]["spec"]["serveConfigV2"]
    example = yaml.safe_load((ROOT / "serve" / "config.yaml").read_text())
    # A wheel has no package `serve` at the top.
    assert example["applications"][0]["import_path"].startswith("xmcray.files.")
    for values in (yaml.safe_load(text), example):
        application = ServeDeploySchema.model_validate(values).applications[0]
        module, builder = application.import_path.split(":")
        assert f"def {builder}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
        settings = config.build(ServeConfig, application.args)
        assert settings.token_file
        assert settings.admin_token_file


@pytest.fixture(scope="module")
def kuberay() -> Callable[[dict[str, Any]], list[str]]:
    """Validates a manifest of KubeRay; its pods by the schema of Kubernetes, which knows every field too."""
    folder = (
        Path(kubernetes_validate.__file__).parent
        / "kubernetes-json-schema"
        / f"v{KUBERNETES}.0-local-strict"
    )
    pod = Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    schema = json.loads((ROOT / "tests" / "repo" / "kuberay.schema.json").read_text())
    registry: Registry[Any] = pod @ Registry()

    def errors(manifest: dict[str, Any]) -> list[str]:
        kind = {"$ref": f"#/$defs/{manifest['kind']}", "$defs": schema["$defs"]}
        return [
            e.message for e in Draft202012Validator(kind, registry=registry).iter_errors(manifest)
        ]

    return errors


@pytest.mark.parametrize("name", ["raycluster", "rayjob", "rayservice"])
def test_kuberay_takes_the_manifests(
    name: str, kuberay: Callable[[dict[str, Any]], list[str]]
) -> None:
    manifest = ray_manifests()[name]
    assert kuberay(manifest) == []
    for misspell in (
        lambda cluster: cluster.update(rayVersoin="2"),
        lambda cluster: cluster["autoscalerOptions"].update(idleTimeoutSecond=1),
        lambda cluster: cluster["authOptions"].update(mode="tokens"),
        lambda cluster: cluster["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda cluster: cluster["workerGroupSpecs"][0].pop("maxReplicas"),
        lambda cluster: cluster["workerGroupSpecs"][0]["template"]["spec"].update(
            restartsPolicy="Never"
        ),
        lambda cluster: cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0].update(
            livenesProbe={}
        ),
    ):
        wrong = copy.deepcopy(manifest)
        misspell(cluster_of(wrong))
        assert len(kuberay(wrong)) == 1


@pytest.mark.parametrize("name", ["raycluster", "rayjob", "rayservice", "shared"])
def test_manifests_of_several_documents_are_checked(name: str, tmp_path: Path) -> None:
    manifest = CLUSTER / "kuberay" / f"{name}.yaml"
    with pytest.raises(ConfigError, match=f"still holds {PLACEHOLDER}"):
        check_cluster_file(manifest)
    path = tmp_path / "manifests.yaml"
    text = manifest.read_text().replace(PLACEHOLDER, "mine")
    path.write_text(text)
    check_cluster_file(path)
    # A mistake in a later document is found too.
    cluster = (CLUSTER / "kuberay" / "raycluster.yaml").read_text()
    path.write_text(f"{text}\n---\n{cluster}")
    with pytest.raises(ConfigError, match=f"still holds {PLACEHOLDER}"):
        check_cluster_file(path)


def test_a_file_for_ray_up_has_one_document(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("cluster_name: a\n---\ncluster_name: b\n")
    with pytest.raises(ConfigError, match=r"has 2 documents, expected one for `ray up`"):
        check_cluster_file(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cluster: cluster.pop("headGroupSpec"), "has no headGroupSpec"),
        (lambda cluster: cluster["workerGroupSpecs"][0].pop("maxReplicas"), "has no maxReplicas"),
        (lambda cluster: cluster.pop("authOptions"), "authOptions.mode is not token"),
        (lambda cluster: cluster.update(rayVersion="2.9.0"), f"rayVersion is 2.9.0, here is {RAY}"),
        (
            lambda cluster: cluster.update(headGroupSpec=PLACEHOLDER),
            f"spec.headGroupSpec still holds {PLACEHOLDER}",
        ),
    ],
)
def test_a_mistake_in_a_manifest_is_one_line(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "manifest.yaml"
    text = (CLUSTER / "kuberay" / "raycluster.yaml").read_text().replace(PLACEHOLDER, "registry")
    path.write_text(text)
    check_cluster_file(path)
    manifest = yaml.safe_load(text)
    change(cluster_of(manifest))
    path.write_text(yaml.safe_dump(manifest))
    with pytest.raises(ConfigError, match=message) as raised:
        check_cluster_file(path)
    assert "\n" not in str(raised.value)


def test_kubernetes_takes_what_they_share() -> None:
    shared = manifests("shared")
    assert [m["kind"] for m in shared].count("PodDisruptionBudget") == 2
    for manifest in shared:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    labels = [pod["metadata"]["labels"] for m in ray_manifests().values() for pod in pods(m)]
    part_of = {"app.kubernetes.io/part-of": "xmcray"}
    (policy,) = (m["spec"] for m in shared if m["kind"] == "NetworkPolicy")
    assert policy["podSelector"] == {"matchLabels": part_of}, "the policy guards all of our pods"
    assert all(part_of.items() <= given.items() for given in labels)
    claims = {m["metadata"]["name"] for m in shared if m["kind"] == "PersistentVolumeClaim"}
    text = "".join((CLUSTER / "kuberay" / f"{name}.yaml").read_text() for name in ray_manifests())
    assert set(re.findall(r"claimName: (\w+)", text)) == claims


@pytest.mark.parametrize("name", ["raycluster", "rayjob", "rayservice"])
def test_pods_can_do_no_more_than_they_must(name: str) -> None:
    manifest = ray_manifests()[name]
    cluster = cluster_of(manifest)
    assert cluster["rayVersion"] == RAY
    assert cluster["authOptions"] == {"mode": "token", "secretName": "xmcray-ray-token"}
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for pod in pods(manifest):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["restartPolicy"] == "Never"
        assert "hostNetwork" not in spec
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert {"cpu", "memory"} <= set(container["resources"]["limits"])
            assert "env" not in container, "a secret in an environment is one that others can list"
            probes = {"startupProbe", "readinessProbe", "livenessProbe"}
            assert (
                not container["name"].startswith("ray-")
                or container["name"].endswith("submitter")
                or (probes <= set(container))
            )


def test_the_job_runs_on_the_cluster_that_is_explained() -> None:
    cluster, job = (cluster_of(ray_manifests()[name]) for name in ("raycluster", "rayjob"))
    starts = [
        spec["headGroupSpec"]["rayStartParams"].pop("dashboard-host") for spec in (cluster, job)
    ]
    assert starts == ["127.0.0.1", "0.0.0.0"]  # see the comment in rayjob.yaml
    assert cluster == job
    words = ray_manifests()["rayjob"]["spec"]["entrypoint"].split()
    assert words[:2] == ["python", "/home/ray/xmcray/jobs/train_astra.py"]
    assert (ROOT / "jobs" / "train_astra.py").exists()
    settings = [value for option, value in itertools.pairwise(words) if option == "--set"]
    workers = int(words[words.index("--workers") + 1])
    run = RunConfig.resolve("astra", {}, [*settings, f"cluster.workers={workers}"])
    asked = {"GPU": 1, "CPU": run.cluster.cpus_per_worker}
    assert launched("rayjob", asked, workers) == {"gpu": workers}
