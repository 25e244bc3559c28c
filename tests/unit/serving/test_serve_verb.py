"""`xmcray serve` as a user has it: one process, one line when it is ready, gone within seconds."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from bundles import write_bundle_of

from xmcray import cli
from xmcray.client import Client
from xmcray.retrieval.retriever import Retriever
from xmcray.serving.search_pb2 import SearchRequest
from xmcray.serving.search_pb2_grpc import RetrieverStub


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(tmp_path_factory.mktemp("serve") / "b", "texts")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_ends(number: signal.Signals, bundle: Path, tmp_path: Path) -> None:
    port = free_port()
    rpc_port = free_port()
    command = [
        sys.executable,
        "-c",
        "import sys; from xmcray.cli import main; sys.exit(main())",
        "serve",
        str(bundle),
    ]
    command += [
        "--port",
        str(port),
        "--state-dir",
        str(tmp_path / "state"),
        "--grpc-port",
        str(rpc_port),
        "--collect-events",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"serving default on http://127.0.0.1:{port}\n"
        token_file = tmp_path / "state" / "token"
        assert server.stdout.readline() == f"token: {token_file}\n"
        wanted = Retriever.load(bundle, threads=1).search(["sort join"], 5)[0]
        with Client(f"http://127.0.0.1:{port}", token_file=token_file) as client:
            found = client.search(["sort join"], 5).results[0].answers
            assert [a.uid for a in found] == [a.uid for a in wanted]
            request = client.search(["sort join"], 5).request_id
            assert client.feedback(request, wanted[0].uid, "accept").number == 3
        with grpc.insecure_channel(f"127.0.0.1:{rpc_port}") as channel:
            call = RetrieverStub(channel).Search
            asked = SearchRequest(texts=["sort join"], k=5)
            token = ("authorization", f"Bearer {token_file.read_text().strip()}")
            assert [a.uid for a in call(asked, metadata=[token]).results[0].answers] == [
                a.uid for a in wanted
            ]
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                call(asked)
        server.send_signal(number)
        output, errors = server.communicate()
        assert (server.returncode, output, errors) == (0, "", "")


def test_mistakes(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state-dir", str(tmp_path)]
    listener = socket.create_server(("127.0.0.1", 0))
    taken = listener.getsockname()[1]
    for arguments, message in [
        ([str(tmp_path / "no")], "does not exist"),
        ([str(bundle), "--host", "0.0.0.0"], "expected --token-file and --admin-token-file"),
        ([str(bundle), "--replicas", "2", "--grpc-port", "9000"], "say --accept-open-ports"),
        ([f"a={bundle}", f"a={bundle}"], "several bundles go by one name"),
        ([str(bundle), "--set", "recall_flor=1"], "did you mean 'recall_floor'"),
        ([str(bundle), "--mode", "both"], "mode"),
        ([str(bundle), "--token-file", str(tmp_path / "none")], "token file"),
        ([str(bundle), "--grpc-port", "99999"], "--grpc-port is 99999"),
        ([str(bundle), "--grpc-port", str(taken)], "choose another --grpc-port"),
        ([str(bundle), "--set", "swap_s=-1"], "swap_s is -1"),
        (["nowhere://x/y"], "Protocol not known"),
    ]:
        assert cli.main(["serve", *arguments, *state, "--port", str(free_port())]) == 2
        assert message in capsys.readouterr().err
    listener.close()
