"""Jobs as a user submits them: `ray job submit` to a head that wants a token, which no one else can use."""

from __future__ import annotations

import json
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from corpora import planted_corpus
from heads import RAY, Head, free_ports, head
from processes import descendants
from ray._private.runtime_env.packaging import create_package
from shell import run_command

from xmcray.doctor.sockets import listeners

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "encoder.dim=16",
    "optim.batch_size=64",
    "optim.epochs=4",
    "negatives.hard=3",
    "negatives.uniform=10",
]
SETTINGS += ["negatives.start_epoch=2", "negatives.refresh_every=1", "method.dropout=0.2"]
SETTINGS += ["cluster.cpus_per_worker=0.5", "cluster.threads_per_process=1"]


def test_the_upload_is_code_alone(tmp_path: Path) -> None:
    excludes = yaml.safe_load((ROOT / "jobs" / "runtime_env.yaml").read_text())["excludes"]
    package = tmp_path / "package.zip"
    create_package(str(ROOT), package, include_gitignore=True, excludes=excludes)
    names = zipfile.ZipFile(package).namelist()
    assert package.stat().st_size < 5 << 20
    assert {
        "xmcray/data/pipeline.py",
        "xmcray/presets/astra/sample.yaml",
        "jobs/train_astra.py",
    } <= set(names)
    unwanted = (".git/", ".venv/", "runs/", "data/", "tests/", "docs/")
    assert [name for name in names if name.startswith(unwanted) or "__pycache__" in name] == []


@pytest.fixture(scope="module")
def local_head() -> Iterator[Head]:
    with head() as started:
        yield started


def submit(server: Head, *command: object) -> subprocess.Popen[str]:
    """`ray job submit` of a script, followed to its end."""
    words = [
        RAY,
        "job",
        "submit",
        "--working-dir",
        ".",
        "--runtime-env",
        "jobs/runtime_env.yaml",
        "--",
        "python",
    ]
    return subprocess.Popen(
        [*words, *(str(word) for word in command)],
        cwd=ROOT,
        env=server.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_jobs(local_head: Head, tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path / "planted", num_queries=300, num_labels=40).path
    train = ["jobs/train_astra.py", "--data", corpus, "--out", tmp_path / "run", "--workers", 1]
    good = submit(
        local_head, *train, *(part for setting in SETTINGS for part in ("--set", setting))
    )
    mistaken = submit(
        local_head, "jobs/train_astra.py", "--data", tmp_path / "none", "--out", tmp_path / "none"
    )

    text, _ = mistaken.communicate()
    assert mistaken.returncode == 1  # of `ray job submit`, whatever the job's is
    lines = {
        line for line in text.splitlines() if line.startswith("error: ")
    }  # in the log, and in Ray's summary
    assert lines == {f"error: {tmp_path / 'none'} does not exist; expected a corpus folder"}
    assert "entrypoint command failed with exit code 2" in text
    assert "Traceback" not in text
    text, _ = good.communicate()
    assert good.returncode == 0, text
    assert f"next: xmcray search {tmp_path}/run/bundle TEXT" in text
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["P@1"] > 0.1


def test_doctor_of_a_cluster(
    local_head: Head,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def doctor(*options: str, **environment: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
                patch.delenv(name, raising=False)
            for name, value in {"HOME": str(tmp_path), **environment}.items():
                patch.setenv(name, value)
            code = run_command("doctor --cluster", *options)
        out, err = capsys.readouterr()
        return code, out, err

    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    good = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(local_head.token_file)}
    deadline = time.monotonic() + 60
    while doctor(local_head.url, **good)[0] and time.monotonic() < deadline:
        pass  # a head answers a little before its node is counted
    code, out, err = doctor(local_head.url, **good)
    assert (code, err) == (0, "")
    assert "head node: 127.0.0.1: 4 CPUs, 0 GPUs" in out
    assert local_head.token_file.read_text() not in out
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    for options, environment, expected in (
        (
            [local_head.url, "--gpus", "2"],
            good,
            "GPUs: the cluster has 0, expected at least 2; add GPU nodes, or",
        ),
        (
            [dead],
            good,
            f"no Ray head answers at {dead} (Connection refused); start it, or forward its port",
        ),
        (
            [local_head.url],
            {},
            "wants a token, and RAY_AUTH_MODE is not token, so Ray's commands send none; export",
        ),
        (
            [local_head.url],
            {"RAY_AUTH_MODE": "token"},
            "wants a token, and there is none here; put the cluster's token",
        ),
        (
            [local_head.url],
            {**good, "RAY_AUTH_TOKEN_PATH": str(wrong)},
            f"refuses the token of {wrong}; put that",
        ),
        (
            [local_head.address],
            {**good, "RAY_AUTH_TOKEN_PATH": str(wrong)},
            f"refuses the token of {wrong}; put that",
        ),
    ):
        code, out, err = doctor(*options, **environment)
        assert (code, err.count("\n")) == (2, 1), (options, environment, err)
        assert expected in err
    code, out, _ = doctor(local_head.address, "--json", **good)
    assert code == 0
    assert {"node", "head", "token"} & {finding["check"] for finding in json.loads(out)}


def test_a_submission_without_a_token_is_refused(local_head: Head) -> None:
    body = {"entrypoint": "touch /tmp/never"}
    assert httpx.post(f"{local_head.url}/api/jobs/", json=body).status_code == 401


@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/api/jobs/"), ("DELETE", "/api/jobs/raysubmit_1")]
)
def test_requests_that_a_web_page_can_make_are_refused(
    method: str, path: str, has_token: bool, local_head: Head
) -> None:
    """CVE-2025-62593 (a page behind a rebound name) and CVE-2026-27482 (the same with DELETE)."""
    headers = {
        "Host": "attacker.example",
        "Origin": "http://attacker.example",
        "User-Agent": "Mozilla/5.0 (X11; Linux x86_64) Firefox/140.0",
        "Sec-Fetch-Site": "same-origin",
    }
    if has_token:
        headers["Authorization"] = f"Bearer {local_head.token_file.read_text().strip()}"
    body = {"entrypoint": "touch /tmp/never"} if method == "POST" else None
    answer = httpx.request(method, local_head.url + path, headers=headers, json=body)
    assert answer.status_code in (401, 403, 405), answer.text
    assert "raysubmit" not in answer.text or method == "DELETE"


def test_the_head_opens_no_port_beyond_this_machine(local_head: Head) -> None:
    family = {local_head.pid, *descendants(local_head.pid)}
    ours = [one for one in listeners() if one.pid in family]
    assert ours
    assert [f"{one.name} {one.address}:{one.port}" for one in ours if not one.loopback] == []
    assert local_head.token_file.stat().st_mode & 0o077 == 0
