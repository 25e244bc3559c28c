"""How the workers of one machine find each other: through a file, and on loopback.

torch's own rendezvous is a server on every address of the machine that asks nobody who they are. It is needed where
workers are on several nodes; on a local cluster a file does, and nothing is open to others.
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

LOOPBACK = "127.0.0.1"
_LEAVE_S = 30.0


def torch_config(backend: str, timeout_s: int, store: str) -> TorchConfig:
    """The process group of a training: on loopback if the whole cluster is.

    Args:
        backend: "gloo" or "nccl". timeout_s: after which a collective fails. store: path that files may begin with.
    """
    if {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} == {LOOPBACK}:
        return LoopbackConfig(backend=backend, timeout_s=timeout_s, store=store)
    return TorchConfig(backend=backend, timeout_s=timeout_s)


@dataclass
class LoopbackConfig(TorchConfig):
    """A process group of workers on one machine.

    Attributes:
        store: path of the file without its ending; each start of the workers has a file of its own.
    """

    store: str = ""

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray Train starts and ends the group with."""
        return _Loopback


class _Loopback(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Joins all workers."""
        told = {
            "store": f"{backend_config.store}.{secrets.token_hex(4)}",
            "backend": backend_config.backend,
            "ranks": len(worker_group),
            "timeout_s": backend_config.timeout_s,
        }
        ray.get(
            [
                worker_group.execute_single_async(i, _join, worker=i, **told)
                for i in range(len(worker_group))
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Ends the group; a worker that hangs is killed by Ray afterwards."""
        ray.wait(
            left := worker_group.execute_async(_leave), num_returns=len(left), timeout=_LEAVE_S
        )


def _join(store: str, backend: str, worker: int, ranks: int, timeout_s: int) -> None:
    interface = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, ranks),  # type: ignore[attr-defined]  # torch exports it untyped
        rank=worker,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
