"""Runs several trainings of `xmcray auto` at the same time, each in a process of its own.

A step of a small model is too short to keep many cores busy. Two trainings side by side with one
core each finish sooner than two trainings in turn with two cores.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from xmcray import logs
from xmcray.errors import RunError, XmcrayError
from xmcray.training.launch import train
from xmcray.training.preemption import Terminated
from xmcray.training.run_config import RunConfig

# Each training holds its model and its optimiser in memory, so many cores do not mean many lanes.
_MAX_LANES = 4

Item = TypeVar("Item")
Result = TypeVar("Result")
# A context around a training: gets the run's folder and a function that asks the training to end.
Watch = Callable[[Path, Callable[[], None]], contextlib.AbstractContextManager[None]]


def number_of_lanes() -> int:
    """Trainings that this machine runs at the same time; one if it has a GPU."""
    if torch.cuda.is_available():
        return 1
    return min(_MAX_LANES, _num_cores())


def threads_of_lane() -> int:
    """Threads of each training."""
    return max(1, _num_cores() // number_of_lanes())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


class Lanes:
    """Runs trainings side by side."""

    def __init__(self) -> None:
        # A server process imports the libraries once, and is forked for each training.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._lock = threading.Lock()
        self._processes: set[multiprocessing.process.BaseProcess] = set()
        self._is_ending = False

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Calls a function for each item, as many at a time as there are lanes.

        The first error ends the trainings that run, which save a checkpoint, and is raised.
        """
        with concurrent.futures.ThreadPoolExecutor(number_of_lanes()) as threads:
            futures = [threads.submit(function, item) for item in items]
            try:
                concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
                for future in futures:
                    # An error of one that is done must not wait for those that still run.
                    if future.done():
                        future.result()
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                self._end()
                raise

    def train(self, corpus: str, out: Path, config: RunConfig, refit: bool, watch: Watch) -> None:
        """Trains a run until it is finished or asked to end.

        Args:
            corpus: folder or URL of the corpus.
            out: folder of the run.
            config: settings of the run.
            refit: train on all training queries; `out` already has the selection.
            watch: context around the training.
        Raises:
            XmcrayError: a mistake of the user, or the process was killed.
            Terminated: another lane has failed, or the whole call is ended.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        arguments = (sender, corpus, out, config, refit)
        process = self._context.Process(target=_train, args=arguments, daemon=True)
        with self._lock:
            if self._is_ending:
                raise Terminated("ended before its first step")
            process.start()
            self._processes.add(process)
        sender.close()
        with watch(out, process.terminate):
            mistake = _received(receiver)
            process.join()
        with self._lock:
            self._processes.remove(process)
            if self._is_ending:
                raise Terminated("ended together with the others")
        if mistake is not None:
            raise mistake
        if process.exitcode not in (0, -signal.SIGTERM):
            raise RunError(
                f"the process of {out.name} ended with exit code {process.exitcode}"
                " (-9: killed, often because the memory was full)"
            )

    def _end(self) -> None:
        """Asks all processes to save a checkpoint and end."""
        with self._lock:
            self._is_ending = True
            for process in self._processes:
                process.terminate()


def _received(receiver: Connection) -> XmcrayError | None:
    """The mistake that a process sends before it ends; None if it sends nothing."""
    try:
        mistake: XmcrayError = receiver.recv()
    except EOFError:
        return None
    finally:
        receiver.close()
    return mistake


def _train(sender: Connection, corpus: str, out: Path, config: RunConfig, refit: bool) -> None:
    """Trains in this process, and sends a mistake of the user to the parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with logs.on_stderr():
        try:
            train(corpus, out, config, refit=refit)
        except XmcrayError as mistake:
            sender.send(mistake)
        except KeyboardInterrupt:
            # The training has saved a checkpoint.
            return


def _end_with_parent() -> None:
    """Ends this process as soon as its parent is gone, because a restart needs the run's lock."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started by a parent"
    parent.join()
    os._exit(1)
