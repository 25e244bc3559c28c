"""Planted secrets: in the environment and in URLs. None may reach a file of a run, a report, a log or an error line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from corpora import planted_corpus
from shell import SMALL_SETTINGS, Shell, run_command

from xmcray import credentials
from xmcray.api.answers import serve
from xmcray.errors import ConfigError
from xmcray.training.launch import train
from xmcray.training.run_config import RunConfig

NAMES = [
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
]
NAMES += ["AZURE_STORAGE_KEY", "GOOGLE_API_KEY", "RAY_AUTH_TOKEN", "GITHUB_TOKEN", "DATABASE_URL"]
SECRET_URL = "ftp://ann:s3cr3t@127.0.0.1:1/copy"
PLANTED = {
    name: f"planted-{number:02d}-{name.lower()}-0123456789abcdef"
    for number, name in enumerate(NAMES)
}


def test_secrets_of_the_environment_reach_no_file_and_no_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    caplog.set_level(logging.DEBUG)
    corpus = str(planted_corpus(tmp_path / "planted").path)
    run = str(tmp_path / "run")
    train = f"train astra --data {corpus} --out {run} --workers 0 {SMALL_SETTINGS}"
    assert run_command(f"{train} --set optim.epochs=2") == 0
    assert run_command(f"evaluate {run} --data {corpus} --json {tmp_path}/measured.json") == 0
    assert run_command(f"{train} --set optim.epochs=3") == 2
    run_command("doctor --json")
    out, err = capfd.readouterr()
    assert '"check": "Ray token"' in out
    said = [out, err, caplog.text, *(path.name for path in tmp_path.rglob("*"))]
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    for value in PLANTED.values():
        assert not any(value in text for text in said)
        assert not any(value.encode() in content for content in files)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("s3://key:s3cr3t@bucket/corpus", "s3://key:***@bucket/corpus"),
        ("http://:s3cr3t@host:8080/x", "http://:***@host:8080/x"),
        (
            "mlflow:https://ann:s3cr3t@host/api and ftp://a:s3cr3t@h",
            "mlflow:https://ann:***@host/api and ftp://a:***@h",
        ),
        ("https://a.blob/x?sv=1&sig=s3cr3t%3D&se=2", "https://a.blob/x?sv=1&sig=***&se=2"),
        (
            "https://b/x?X-Amz-Credential=s3cr3t&X-Amz-Signature=s3cr3t",
            "https://b/x?X-Amz-Credential=***&X-Amz-Signature=***",
        ),
        (
            "abfs://container@account.dfs.core.windows.net/x",
            "abfs://container@account.dfs.core.windows.net/x",
        ),
        ("http://127.0.0.1:8265/a@b:c", "http://127.0.0.1:8265/a@b:c"),
        ("s3://bucket/key=value/part:1", "s3://bucket/key=value/part:1"),
    ],
)
def test_secrets_in_urls_are_masked(text: str, masked: str) -> None:
    assert credentials.mask(text) == masked


def test_urls_with_secrets_are_refused_and_leave_nothing(tmp_path: Path, shell: Shell) -> None:
    url = "ftp://ann:s3cr3t@127.0.0.1:1/corpus"
    out = tmp_path / "run"
    for command in (
        f"train astra --data {url} --out {out}",
        f"prepare . --out {url}",
        f"export {tmp_path} --out={url}",
        f"serve m={url}",
    ):
        error = shell.error(command)
        assert error.startswith("the command line has a URL with a secret, ")
        assert "ftp://ann:***@127.0.0.1:1/corpus" in error
        assert "s3cr3t" not in error
    with pytest.raises(
        ConfigError, match="what the run would keep has a URL"
    ) as caught:  # from Python, or from YAML
        train(url, out, RunConfig.resolve("astra", {}))
    assert "s3cr3t" not in str(caught.value)
    named = RunConfig.resolve("astra", {"encoder": {"name": "https://hub/model?token=s3cr3t"}})
    with pytest.raises(ConfigError, match=r"token=\*\*\*"):
        train(tmp_path, out, named)
    assert not out.exists()


@pytest.mark.parametrize(
    "settings",
    [{"upload": SECRET_URL}, {"bundle_roots": [SECRET_URL]}, {"bundles": {"m": SECRET_URL}}],
)
def test_settings_of_a_server_with_secrets_are_refused(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python, or from a file; the command line is checked on its own."""
    monkeypatch.chdir(tmp_path)
    expected = r"a setting of the server has a URL with a secret, ftp://ann:\*\*\*@"
    with pytest.raises(ConfigError, match=expected):
        serve({"a": tmp_path / "b"}, settings)
    assert not list(tmp_path.iterdir())
