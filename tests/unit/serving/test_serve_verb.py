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
from shell import Shell

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
    options = f"--port {port} --state-dir {tmp_path}/state --grpc-port {rpc_port} --collect-events"
    program = "import sys; from xmcray.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", str(bundle), *options.split()]
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


def test_mistakes(bundle: Path, tmp_path: Path, shell: Shell) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    taken = listener.getsockname()[1]
    tokens = "--token-file a --admin-token-file b"  # looked at after the address
    for arguments, message in [
        (f"{tmp_path}/no", "does not exist"),
        (f"{bundle} --host 0.0.0.0", "expected --token-file and --admin-token-file"),
        (
            f"{bundle} --host 192.0.2.1 {tokens}",
            "192.0.2.1 is no address of this machine, expected",
        ),
        (
            f"{bundle} --host no.invalid {tokens}",
            "use 127.0.0.1 for this machine alone, or 0.0.0.0",
        ),
        (f"{bundle} --host a..b {tokens}", "--host a..b is no address of this machine"),
        (f"{bundle} --replicas 2 --grpc-port 9000", "say --accept-open-ports"),
        (f"a={bundle} a={bundle}", "several bundles go by one name"),
        (f"{bundle} --set recall_flor=1", "did you mean 'recall_floor'"),
        (f"{bundle} --mode both", "mode"),
        (f"{bundle} --token-file {tmp_path}/none", "token file"),
        (f"{bundle} --grpc-port 99999", "--grpc-port is 99999"),
        (f"{bundle} --grpc-port {taken}", "choose another --grpc-port"),
        (f"{bundle} --set swap_s=-1", "swap_s is -1"),
        ("nowhere://x/y", "Protocol not known"),
    ]:
        command = f"serve {arguments} --state-dir {tmp_path} --port {free_port()}"
        assert message in shell.error(command)
    listener.close()
