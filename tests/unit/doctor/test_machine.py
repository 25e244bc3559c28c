"""The findings of the doctor about a machine, on folders and environments made for the test."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from shell import Shell, run_command

from xmcray import cli
from xmcray.doctor import exposure, machine, software
from xmcray.doctor.finding import Finding, worst
from xmcray.doctor.sockets import Listener, listeners
from xmcray.errors import ConfigError, ResourceError
from xmcray.ray_adapter.session import start_ray
from xmcray.ray_adapter.switches import UNPICKLING


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def test_the_command_says_ok_warning_error_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("xmcray.doctor.sockets.listeners", lambda: [])
    # This machine's own disk and memory may be full.
    roomy = SimpleNamespace(total=100 * machine.GIB, free=50 * machine.GIB)
    monkeypatch.setattr("shutil.disk_usage", lambda _: roomy)
    monkeypatch.setattr(machine, "memory", lambda *_: Finding("memory", "ok", "all"))
    assert cli.main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert {line[:9].strip() for line in out.splitlines()} <= {"ok", "warning"}
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    assert run_command("doctor --json") == 2
    out, err = capsys.readouterr()
    assert err == f"error: token file: {token} has mode 0644; run chmod 600 {token}\n"
    errors = [one for one in json.loads(out) if one["level"] == "error"]
    assert errors == [
        {
            "check": "token file",
            "level": "error",
            "found": f"{token} has mode 0644",
            "do": f"run chmod 600 {token}",
        }
    ]
    assert "0123456789abcdef" not in out


def test_versions() -> None:
    assert {finding.level for finding in software.versions()} == {"ok"}, (
        "this environment is the one we ask for"
    )
    assert software.version(Requirement("numpy>=99")).level == "error"
    assert "missing" in software.version(Requirement("no-such-package-here>=1")).found


@pytest.mark.parametrize(
    ("there", "level"), [((), "error"), (("faiss-cpu",), "ok"), (software.FAISS, "error")]
)
def test_one_faiss(there: tuple[str, ...], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed", lambda name: "1.15.1" if name in there else None)
    assert software.faiss().level == level


def test_harmful_switches() -> None:
    assert [one for one in software.switches({"PATH": "x"}) if one.check in software.SWITCHES] == []
    bad = {
        "RAY_DATA_AUTOLOAD_PYEXTENSIONTYPE": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TRAIN_V2_ENABLED": "0",
    }
    level_by_check = levels(
        [one for one in software.switches(bad) if one.check in software.SWITCHES]
    )
    assert level_by_check == dict(zip(bad, ["error", "warning", "error"], strict=True))


@pytest.mark.parametrize("name", UNPICKLING)
def test_ray_does_not_start_where_data_files_could_run_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name} is set, with which data files can run code"):
        start_ray()


@pytest.mark.parametrize("address", ["", "127.0.0.1:1"])
def test_a_failed_start_of_ray_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: object) -> None:
        raise Exception("timed out during startup.\nThe GCS may be overloaded.")

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.init", fail)
    # Tests of the same process may have left a cluster.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ResourceError, match=r"timed out during startup\. The GCS") as caught:
        start_ray()
    assert "\n" not in str(caught.value)


def test_a_container_that_may_use_two_cores_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)))
    few, threads = machine.cores({"OMP_NUM_THREADS": "8"}, tmp_path)
    assert few.found == "2 may be used of 64 that libraries count"
    assert "OMP_NUM_THREADS=2" in few.do
    assert threads.level == "warning"


def test_memory(tmp_path: Path) -> None:
    def level(total_gib: int, free_gib: int) -> str:
        return machine.memory(total_gib << 30, free_gib << 30).level

    assert [level(64, 32), level(64, 3), level(8, 1)] == ["ok", "error", "warning"]
    assert machine.shared_memory(tmp_path / "none").level == "warning"


def test_a_folder_too_long_for_sockets(tmp_path: Path) -> None:
    assert "RAY_TMPDIR" not in levels(list(machine.disk({"RAY_TMPDIR": "/tmp"})))
    assert (
        levels(list(machine.disk({"RAY_TMPDIR": str(tmp_path / ("x" * 90))})))["RAY_TMPDIR"]
        == "error"
    )


def test_ray_token(tmp_path: Path) -> None:
    def level(**environment: str) -> list[str]:
        return [finding.level for finding in exposure.token_mode(environment, tmp_path)]

    assert level() == ["ok"]
    assert level(RAY_AUTH_MODE="token") == ["error"]
    assert level(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="x") == ["ok"]
    assert level(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(tmp_path / "none")) == ["error"]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    assert level() == ["warning"]


def test_listeners_are_found_with_their_process() -> None:
    with socket.socket() as here, socket.socket(socket.AF_INET6) as everywhere:
        here.bind(("127.0.0.1", 0))
        here.listen()
        everywhere.bind(("::", 0))
        everywhere.listen()
        wanted = {here.getsockname()[1]: True, everywhere.getsockname()[1]: False}
        assert {one.port: one.loopback for one in listeners() if one.port in wanted} == wanted
    assert Listener("::ffff:127.0.0.1", 1, 1, "raylet").loopback


def test_open_ports() -> None:
    dashboard = "python3 -u site-packages/ray/dashboard/dashboard.py --host=0.0.0.0 --port=8265 --port-retries=0"
    local = Listener("127.0.0.1", 6379, 1, "ray/core/gcs_server")
    raylet = Listener("::", 4000, 2, "ray/core/raylet --x")
    head = Listener("0.0.0.0", 8265, 3, dashboard)
    strange = Listener("0.0.0.0", 22, 4, "sshd")
    assert [one.level for one in exposure.open_ports([local, strange])] == ["ok"]
    assert [one.level for one in exposure.open_ports([local, raylet, head])] == ["error", "warning"]
    (ports,) = exposure.open_ports([raylet])
    assert ports.found == "raylet :::4000"


def test_errors_in_one_line() -> None:
    bad = Finding("a", "error", "is wrong", "mend it")
    assert (
        worst([Finding("x", "ok", "fine"), bad, Finding("b", "error", "too")])
        == "a: is wrong; mend it (and 1 more)"
    )
    assert worst([Finding("x", "warning", "so so")]) == ""


def test_a_low_limit_of_mapped_files_is_a_warning(tmp_path: Path) -> None:
    limit = tmp_path / "max_map_count"
    levels_by_limit = {}
    for text in ("65530\n", "1000\n"):
        limit.write_text(text)
        levels_by_limit[text] = machine.mappings(limit).level
    assert levels_by_limit == {"65530\n": "ok", "1000\n": "warning"}
    assert machine.mappings(tmp_path / "absent").level == "ok"


def test_a_low_limit_of_open_files_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    levels_by_limit = {}
    for limit in (1024, 65_536, -1):  # unlimited is negative
        monkeypatch.setattr(machine.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        levels_by_limit[limit] = machine.limits().level
    assert levels_by_limit == {1024: "warning", 65_536: "ok", -1: "ok"}


class OtherService(http.server.BaseHTTPRequestHandler):
    """Answers each request with JSON, but not as a dashboard does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.body)  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'{"status": "ok"}',
        b'{"ray_version": "2", "data": null}',
        b'{"ray_version": "2", "data": {"result": {"result": [{"state": "ALIVE"}]}}}',
    ],
)
def test_another_service_is_no_dashboard(body: bytes, shell: Shell) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), OtherService) as server:
        server.body = body  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        message = shell.error(f"doctor --cluster {url}")
        server.shutdown()
    assert message == f"{url} answers, but is not the dashboard of a Ray head; check the port"


def test_a_token_that_is_no_text_is_one_line(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"\xff\xfe\x00")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    message = shell.error("doctor --cluster http://127.0.0.1:1")
    assert message.startswith(f"the token file {token} cannot be read (UnicodeDecodeError")
    assert message.endswith("put the cluster's token there")


def test_a_cluster_file_that_is_fine_is_json_too(tmp_path: Path, shell: Shell) -> None:
    template = Path(__file__).parents[3] / "cluster" / "aws.yaml"
    file = tmp_path / "aws.yaml"
    file.write_text(template.read_text().replace("CHANGE-ME", "ours"))
    (finding,) = json.loads(shell.run(f"doctor --cluster-file {file} --json"))
    assert (finding["level"], finding["found"]) == ("ok", f"{file} is fine")


@pytest.mark.parametrize("option", ["--cluster", "--cluster-file"])
def test_an_empty_address_or_file_is_not_this_machine(option: str, shell: Shell) -> None:
    """Such as that of a variable that is not set."""
    assert "expected" in shell.error(f"doctor {option} ''")


def test_a_disk_is_that_of_the_folder_above_one_that_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(total=100 * machine.GIB, free=50 * machine.GIB)

    monkeypatch.setattr("shutil.disk_usage", usage)
    list(machine.disk({"RAY_TMPDIR": str(tmp_path / "none" / "x")}))
    assert asked[1] == tmp_path
