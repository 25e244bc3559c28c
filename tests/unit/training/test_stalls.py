"""A rank that hangs is named, a rank that waits for it is not."""

from __future__ import annotations

import inspect
import logging
import re
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from xmcray.parallel import collectives
from xmcray.ray_adapter.private import WorkerFailure
from xmcray.training.stalls import Interruptions, StallAlarm, culprits, place_of


def names_on_rank() -> list[str]:
    """Rank 1 hangs in a callback of this package until it is named; rank 0 waits in a collective."""
    sentences: list[str] = []
    named = threading.Event()

    def say(sentence: str) -> None:
        sentences.append(sentence)
        named.set()

    with StallAlarm(collectives.rank(), 0.5, say) as alarm:
        alarm.beat(7)
        if collectives.rank() == 1:
            assert named.wait(60)
        dist.all_reduce(torch.zeros(1))
    return sentences


def test_the_rank_that_hangs_is_named_and_the_waiting_one_is_not() -> None:
    of_waiting, of_hanging = on_ranks(names_on_rank, 2)
    assert of_waiting == []
    assert len(of_hanging) == 1
    # Half a second on an idle machine.
    assert re.match(r"rank 1 has been at step 7 for \d+ s, in ", of_hanging[0])


def test_a_rank_that_reads_what_a_collective_returns_only_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames: list[FrameType] = []

    class Unread:
        """A number of the device that other ranks have not sent yet."""

        def __int__(self) -> int:
            frame = inspect.currentframe()
            assert frame is not None
            frames.append(frame)
            return 3

    monkeypatch.setattr(collectives, "num_ranks", lambda: 2)
    monkeypatch.setattr(collectives.torch, "tensor", lambda *args, **options: Unread())
    monkeypatch.setattr(collectives.dist, "broadcast", lambda tensor, src: None)
    monkeypatch.setattr(collectives, "_device", lambda: torch.device("cpu"))
    assert collectives.broadcast_int(1) == 3
    # On a real device there is no Python code below `broadcast_int`.
    assert place_of(frames[0].f_back) is None


def test_a_place_is_said_once_and_steps_end_the_silence() -> None:
    sentences: list[str] = []
    spoken = threading.Event()

    def say(sentence: str) -> None:
        sentences.append(sentence)
        spoken.set()

    with StallAlarm(0, 0.02, say):
        assert spoken.wait(60)
        spoken.clear()
        assert not spoken.wait(0.2), "the same line twice"
    assert len(sentences) == 1


def test_what_lost_processes_break_elsewhere_is_not_blamed() -> None:
    lost = WorkerFailure(1, "stalled", "process 12 on a", "")
    broken = WorkerFailure(0, "failed", "", "RuntimeError: connection closed by peer")
    assert culprits({0: broken, 1: lost}) == [lost]
    assert culprits({0: broken}) == [broken]
    assert lost.text(60) == "rank 1 (process 12 on a) gave no sign of life for 60 s"
    assert broken.text(60) == "rank 0 failed (RuntimeError: connection closed by peer)"


def test_interruptions_are_logged_while_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("step-00000035", "step-00000035-copy"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    interruptions = Interruptions(tmp_path, 60)
    interruptions.note("of an earlier run")
    with caplog.at_level(logging.WARNING), interruptions.logged(lambda: False):
        interruptions.note_failures({1: WorkerFailure(1, "died", "", "")})
    with interruptions.logged(lambda: True):
        interruptions.note("a mistake that is the last line anyway")
    assert caplog.messages == [
        "rank 1 died; the workers are started again (newest checkpoint: step 35)"
    ]
