"""How the workers of one machine find each other: through a file, and on loopback.

The rendezvous of torch is a server that listens on every address of the machine and authenticates
no one. Workers on several nodes need it. On a local cluster a file is enough, and no port is open
to others.
"""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from xmcray.ray_adapter.cluster import alive_nodes

LOOPBACK = "127.0.0.1"
_LEAVE_S = 5.0  # for all workers to leave the group; a frozen one never does


def torch_config(backend: str, timeout_s: int, store: str) -> TorchConfig:
    """Chooses the process group of a training: on loopback if the whole cluster is there.

    Args:
        backend: "gloo" or "nccl".
        timeout_s: seconds after which a collective fails.
        store: path with which the names of rendezvous files begin.
    """
    addresses = {node.address for node in alive_nodes()}
    if addresses == {LOOPBACK}:
        return LoopbackConfig(backend=backend, timeout_s=timeout_s, store=store)
    return TorchConfig(backend=backend, timeout_s=timeout_s)


@dataclass
class LoopbackConfig(TorchConfig):
    """A process group of workers on one machine.

    Attributes:
        store: path of the rendezvous file without its ending; each start of the workers has a file
            of its own.
    """

    store: str = ""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class with which Ray Train starts and ends the process group."""
        return _Loopback


class _Loopback(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Lets all workers join a new process group."""
        num_ranks = len(worker_group)
        store = f"{backend_config.store}.{secrets.token_hex(4)}"
        joins = []
        for rank in range(num_ranks):
            join = worker_group.execute_single_async(
                rank,
                # By position: a keyword `rank` would be taken for that of the call itself.
                _join,
                store,
                backend_config.backend,
                rank,
                num_ranks,
                backend_config.timeout_s,
            )
            joins.append(join)
        ray.get(joins)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Ends the process group. Ray kills a worker that hangs afterwards."""
        leaves = worker_group.execute_async(_leave)
        ray.wait(leaves, num_returns=len(leaves), timeout=_LEAVE_S)


def _join(store: str, backend: str, rank: int, num_ranks: int, timeout_s: int) -> None:
    interface = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["NCCL_SOCKET_IFNAME"] = interface
    os.environ["LOCAL_RANK"] = str(rank)  # there is one machine
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, num_ranks),  # type: ignore[attr-defined]  # torch exports it untyped
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
