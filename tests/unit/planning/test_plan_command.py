"""The verb that plans: what it prints, the rates it measures, and the one line a mistake gets."""

from __future__ import annotations

import dataclasses
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from plan_rates import A100, ON_CPU
from shell import Shell

from xmcray.errors import ConfigError, StorageError
from xmcray.planning import tables
from xmcray.planning.devices import SPECS
from xmcray.planning.estimate import FIRST_REFRESH, REFRESH, STEPS
from xmcray.planning.rates import Rates, load_rates
from xmcray.training.placement import Nodes, place
from xmcray.training.run_config import ClusterConfig


def test_rates_are_kept_and_read(tmp_path: Path) -> None:
    A100.save(tmp_path / "rates.json")
    assert load_rates(tmp_path / "rates.json") == A100
    (tmp_path / "other.json").write_text('{"version": 0}')
    with pytest.raises(ConfigError, match="not measured by this release"):
        load_rates(tmp_path / "other.json")
    with pytest.raises(StorageError, match="cannot be read"):
        load_rates(tmp_path / "missing.json")
    assert {"a100-80gb", "h100-80gb", "h200-141gb", "l4-24gb"} <= SPECS.keys()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("call_s", None, "call_s is None, expected a number"),
        ("call_s", "x", "call_s is 'x', expected a number"),
        ("pass_bytes_s", 0, "pass_bytes_s is 0, expected more than 0"),
        ("sort_s", -1, "sort_s is -1.0, expected at least 0"),
        ("process_bytes", [1, 0], "process_bytes is 0, expected more than 0"),
        ("threads", 0, "threads is 0, expected more than 0"),
        ("device", 1, "device is 1, expected str"),
    ],
)
def test_damaged_rates_are_one_line(
    name: str, value: object, reason: str, tmp_path: Path, shell: Shell
) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({**dataclasses.asdict(ON_CPU), name: value}))
    error = shell.error(f"plan astra {ON_THIS_MACHINE} --probe {file}")
    assert error.startswith(f"probe {file} was not measured by this release ({reason})")


@pytest.mark.parametrize(
    "content",
    ["{}", "nojson", "[1]", '{"model_type": "foo"}', '{"model_type": "bert", "hidden_size": "x"}'],
)
def test_a_damaged_transformer_is_one_line(content: str, tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "config.json").write_text(content)
    error = shell.error(f"plan astra {SIZE} --set encoder.name={tmp_path}")
    assert f"encoder.name is '{tmp_path}', whose config.json is no transformer's (" in error


def test_an_index_that_could_not_be_built_is_refused(shell: Shell) -> None:
    plan = "plan astra --labels 1000 --queries 1000 --device a100-80gb --workers 2"
    expected = "negatives.index is 'Foo', expected a FAISS factory string"
    assert expected in shell.error(f"{plan} --set negatives.index=Foo")
    expected = "negatives.index is 'IVF600,Flat' with 600 lists, found 500 labels in an index"
    assert expected in shell.error(f"{plan} --set negatives.index=IVF600,Flat")


SIZE = "--labels 1.3e6 --queries 2.2e6 --device a100-80gb"


def test_the_verb_prints_a_plan(shell: Shell) -> None:
    plan = f"plan astra {SIZE} --workers 8 --price-per-hour 2"
    planned = json.loads(shell.run(f"{plan} --json"))
    sizes = planned["labels"], planned["workers"], planned["source"]
    assert sizes == (1_300_000, 8, "published specs")
    assert planned["cost"] == pytest.approx(16 * planned["total_s"] / 3600)
    printed = shell.run(plan)
    assert "device: label rows" in printed
    assert "assumed: device rates are published specs" in printed
    assert "16 tokens in each text (no --tokens-per-text was given)" in printed
    assert "12.9 tokens in each text" in shell.run(f"{plan} --tokens-per-text 12.9")


ON_THIS_MACHINE = "--labels 1000 --queries 1000 --set encoder.dim=8"


@pytest.mark.parametrize(
    ("arguments", "threads"),
    [
        ("--workers 2", 2),  # as many index actors as workers
        ("--workers 2 --set negatives.hard=0", 4),
        ("--set cluster.workers=0", 4),  # a half for the steps, a half for the index
        ("--workers 2 --set cluster.threads_per_process=3", 3),
    ],
)
def test_a_machine_is_measured_with_the_threads_of_a_training(
    arguments: str,
    threads: int,
    tmp_path: Path,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(threads: int) -> Rates:
        return dataclasses.replace(ON_CPU, source="measured", threads=threads, cores=8)

    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("xmcray.planning.probe.probe", measured)
    file = tmp_path / "rates.json"
    command = f"plan astra {ON_THIS_MACHINE} {arguments} --probe {file}"
    note = f"assumed: {threads} threads in each process (cluster.threads_per_process)"
    assert note in shell.run(command)
    assert load_rates(file).threads == threads
    assert note in shell.run(command)
    problem = f"probe {file} was measured with {threads} threads, but processes of this training"
    error = shell.error(f"{command} --set cluster.threads_per_process=7")
    assert error.startswith(f"{problem} have 7; measure into another file, or")


def test_a_probe_is_for_this_machine_alone(tmp_path: Path, shell: Shell) -> None:
    file = tmp_path / "probe.json"
    command = f"plan astra --labels 1000 --queries 1000 --device a100-80gb --probe {file}"
    assert shell.error(command).startswith(f"probe is {file}, expected none")
    assert not file.exists()


@pytest.mark.parametrize("settings", [{}, {"threads_per_process": 3}])
@pytest.mark.parametrize("num_shards", [0, 2])
def test_a_plan_has_the_threads_of_the_placement(
    settings: dict[str, int], num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    cluster = ClusterConfig(workers=2, cpus_per_worker=1, **settings)
    nodes = Nodes({"a": {"CPU": 8.0}}, [], autoscaled=False)
    threads = place(cluster, nodes, num_shards).threads
    assert threads == cluster.threads_on_one_machine(2, num_shards)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("astra", "the size of the data is not known"),
        (f"astr {SIZE}", "did you mean 'astra'"),
        (f"astra {SIZE[:-4]}81gb", "did you mean 'a100-80gb'"),
        (f"astra {SIZE} --memory-gb 1", "a worker needs"),
        (f"astra {SIZE} --workers -1", "workers is -1, expected at least 0"),
        (f"astra {SIZE} --labels many", "not a number"),
        (
            f"astra {SIZE} --labels 9 --positives 10",
            "--positives is 10, expected at most the number",
        ),
        (f"astra {SIZE} --labels 0", "--labels is 0, expected at least 1"),
        (f"astra {SIZE} --labels 1.5", "'1.5' is not an integer"),
        (f"astra {SIZE} --labels inf", "'inf' is not an integer"),
        (f"astra {SIZE} --memory-gb inf", "memory_gb is inf, expected at most 1e+09"),
        (f"astra {SIZE} --memory-gb nan", "memory_gb is nan, expected more than 0"),
        (f"astra {SIZE} --price-per-hour inf", "price_per_hour is inf, expected at most 1e+09"),
        (f"astra {SIZE} --data C", "labels is 1.3e+06, but data is counted; leave out labels, or"),
        ("astra --data C --positives 5", "positives is 5, but data is counted"),
        ("astra --data no-such-corpus", "does not exist"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, said: str, shell: Shell) -> None:
    assert said in shell.error(f"plan {arguments}")


def test_a_training_without_ray_has_a_plan(shell: Shell) -> None:
    by_option = shell.run(f"plan astra {SIZE} --workers 0")
    assert by_option == shell.run(f"plan astra {SIZE} --set cluster.workers=0")
    assert "Memory, 1 worker (" in by_option


def test_the_page_on_scale_is_up_to_date_and_its_refresh_is_shorter_than_an_epoch() -> None:
    root = Path(__file__).parents[3]
    script = runpy.run_path(str(root / "benchmarks" / "scale_plans.py"))
    page = (root / "docs" / "scale.md").read_text(encoding="utf-8")
    advice = "run: python benchmarks/scale_plans.py"
    assert page.startswith(script["HEAD"]), advice
    assert all(case.command in page for case in script["CASES"]), advice
    # One of them is enough: the others take a minute.
    (case,) = (case for case in script["CASES"] if case.title.startswith("370 million queries"))
    made = script["planned"](case)
    section = page.split(f"## {case.title}")[1].split("\n## ")[0]
    # These include what Python allocates for itself, which varies a little.
    varying = ("| process: copies for start", "| process: in all")
    for line in script["section"](case, made)[1:]:
        assert line in section or line.startswith(varying), advice
    assert made.run_s[FIRST_REFRESH] == made.run_s[REFRESH] < made.run_s[STEPS]
    assert not made.advice


def test_device_contexts_work_after_a_plan() -> None:
    # In a process of its own, because torch lists its constructors once.
    code = (
        "import torch\n"
        "from xmcray.cli import main\n"
        "main('plan astra --labels 100 --queries 100 --tokens-per-text 8 --device a100-80gb'.split())\n"
        "with torch.device('meta'):\n"
        "    assert torch.tensor([]).device.type == 'meta'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (999_400_000, "999 MB"),
        (999_600_000, "1 GB"),
        (12_340_000_000, "12.3 GB"),
        (1_234_000_000_000_000, "1,234 TB"),
    ],
)
def test_amounts_have_three_digits_and_no_exponent(num_bytes: int, text: str) -> None:
    assert tables._with_unit(num_bytes, tables._BYTES) == text
