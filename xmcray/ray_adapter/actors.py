"""Actors of Ray: long-lived objects in processes of their own, found by their names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from xmcray.errors import XmcrayError


def start_actor(kind: type, arguments: Sequence[Any], name: str, options: Mapping[str, Any]) -> Any:
    """Starts an actor that Ray restarts for ever, repeating the calls that it lost.

    Args:
        kind: class of the actor.
        arguments: what its constructor gets.
        name: under which `find_actor` finds it.
        options: Ray's options, such as where it goes. It reserves no CPU unless they say so.
    Returns:
        The actor's handle, which `call` takes.
    """
    defaults = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    actor_class: Any = ray.remote(kind).options(name=name, **{**defaults, **options})
    return actor_class.remote(*arguments)


def find_actor(name: str) -> Any:
    """Returns the handle of the actor with this name."""
    return ray.get_actor(name)


def wait_for_calls(calls: Sequence[Any]) -> list[Any]:
    """Waits for calls of actors and returns their results."""
    results: list[Any] = ray.get(list(calls))
    return results


def unfinished_calls(calls: Sequence[Any]) -> list[Any]:
    """Returns the calls that still run, without waiting.

    Raises:
        XmcrayError: a call has raised it; it is raised as it was in the actor.
        RayTaskError: a call has raised another error.
    """
    if not calls:
        return []
    finished, unfinished = ray.wait(list(calls), num_returns=len(calls), timeout=0)
    try:
        ray.get(finished)
    except RayTaskError as error:
        if isinstance(error.cause, XmcrayError):
            raise error.cause from None
        raise
    return list(unfinished)


def kill_actors(actors: Sequence[Any]) -> None:
    """Ends actors at once, without restarts; those that have ended are skipped."""
    for actor in actors:
        with contextlib.suppress(RayError):
            ray.kill(actor)
