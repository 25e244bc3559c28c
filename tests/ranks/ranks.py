"""Runs a function of a test module on several Gloo ranks and returns what each rank returned; reads golden vectors."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ORACLE = Path(__file__).parents[1] / "oracle" / "data"


def golden(name: str) -> dict[str, np.ndarray]:
    """Inputs and expected results of one golden vector."""
    with np.load(ORACLE / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """`function(*args)` on ranks 0 .. num_ranks - 1; results in rank order. One rank runs here, without a group."""
    if num_ranks == 1:
        return [function(*args)]
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        queue = context.SimpleQueue()
        processes = [
            context.Process(
                target=_rank, args=(rank, num_ranks, folder, queue, function, args), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        results = dict(pickle.loads(queue.get()) for _ in processes)
        for process in processes:
            process.join()
    failed = [value for value in results.values() if isinstance(value, BaseException)]
    if failed:
        raise failed[0]
    return [results[rank] for rank in range(num_ranks)]


def over_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """The sum of the losses that `function` returns on each rank, and each gradient in one piece."""
    losses, *gradients = zip(*on_ranks(function, num_ranks, *args), strict=True)
    return [sum(losses), *map(np.concatenate, gradients)]


def _rank(
    rank: int, num_ranks: int, folder: str, queue: Any, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        dist.barrier()  # a function without collectives could end before slower ranks have met this one
        # As bytes: a tensor in a queue is shared memory, which is gone when its process has ended.
        queue.put(pickle.dumps((rank, function(*args))))
        dist.destroy_process_group()
    except BaseException as error:
        failure = RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
        queue.put(pickle.dumps((rank, failure)))
