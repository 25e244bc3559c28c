"""A plan as tables for the terminal."""

from __future__ import annotations

from rich.table import Column, Table

from xmcray.planning.estimate import Plan

Units = tuple[tuple[float, str], ...]  # from large to small
Rows = list[tuple[str, str]]
_BYTES = (
    (1e12, "TB"),
    (1e9, "GB"),
    (1e6, "MB"),
    (1e3, "kB"),
)
_SECONDS = (
    (86_400, "days"),
    (3600, "h"),
    (60, "min"),
    (1, "s"),
    (1e-3, "ms"),
    (1e-6, "µs"),
)


def sections(plan: Plan) -> dict[str, Rows]:
    """Titles with their rows of a name and a value."""
    capacity = _text(plan.memory_bytes, _BYTES)
    memory_title = f"Memory of each of {plan.workers} workers ({plan.device}, {capacity})"

    queries_per_s = plan.batch / plan.step_seconds
    step_title = f"A step of {plan.batch:,} queries, {queries_per_s:,.0f} per second"
    step_s = {**plan.step_s, "one step": plan.step_seconds}

    run_title = f"A run of {plan.epochs} epochs of {plan.steps_per_epoch:,} steps"
    if plan.cost is not None:
        run_title += f", for {plan.cost:,.2f}"

    return {
        memory_title: _rows(_memory(plan), _BYTES),
        "Disk": _rows(_disk(plan), _BYTES),
        step_title: _rows(step_s, _SECONDS),
        run_title: _rows(plan.run_s, _SECONDS),
    }


def _memory(plan: Plan) -> dict[str, int]:
    """Bytes by what holds them."""
    num_bytes = {}
    for name, part in plan.device_bytes.items():
        num_bytes[f"device: {name}"] = part
    num_bytes["device: in all"] = sum(plan.device_bytes.values())
    for name, part in plan.host_bytes.items():
        num_bytes[f"process: {name}"] = part
    num_bytes["process: in all"] = sum(plan.host_bytes.values())
    num_bytes["an index actor of each worker"] = plan.index_bytes
    num_bytes["Ray's object store, only while preparing"] = plan.object_store
    return num_bytes


def _disk(plan: Plan) -> dict[str, int]:
    """Bytes by what is on the disk."""
    one_checkpoint = _text(plan.checkpoint, _BYTES)
    checkpoints = f"checkpoints, {plan.checkpoints} of {one_checkpoint}"
    return {
        checkpoints: plan.checkpoints * plan.checkpoint,
        "ledger of the negatives": plan.ledger,
        "index without the vectors": plan.index_on_disk,
    }


def tables(plan: Plan) -> list[Table | str]:
    """A heading, a table for each section, and what is assumed."""
    sizes = f"{plan.labels:,} labels, {plan.queries:,} queries, D = {plan.dim}"
    parts: list[Table | str] = [f"{plan.method}: {sizes}; {plan.source}"]
    for title, rows in sections(plan).items():
        table = Table("", Column(justify="right"), title=title, show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        parts.append(table)
    parts.extend(f"assumed: {assumption}" for assumption in plan.assumptions)
    return parts


def _rows(values: dict[str, int] | dict[str, float], units: Units) -> Rows:
    """The values that are not 0, as texts."""
    rows = []
    for name, value in values.items():
        if value:
            rows.append((name, _text(value, units)))
    return rows


def _text(value: float, units: Units) -> str:
    """A value in the largest unit of which it has at least one."""
    for unit, name in units:
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value / unit:.2g} {name}"  # of the smallest unit
