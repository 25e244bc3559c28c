"""A plan as tables for the terminal."""

from __future__ import annotations

from rich.table import Column, Table

from xmcray.planning.estimate import Plan

Units = tuple[tuple[float, str], ...]
Rows = list[tuple[str, str]]
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))


def sections(plan: Plan) -> dict[str, Rows]:
    """Titles with their rows of a name and a value."""
    memory = {}
    for where, parts in (("device", plan.device_bytes), ("process", plan.host_bytes)):
        for name, num_bytes in parts.items():
            memory[f"{where}: {name}"] = num_bytes
        memory[f"{where}: in all"] = sum(parts.values())
    memory["an index actor of each worker"] = plan.index_bytes
    memory["Ray's object store, only while preparing"] = plan.object_store
    checkpoint = _text(plan.checkpoint, _BYTES)
    disk = {
        f"checkpoints, {plan.checkpoints} of {checkpoint}": plan.checkpoints * plan.checkpoint,
        "ledger of the negatives": plan.ledger,
        "index without the vectors": plan.index_on_disk,
    }
    queries_s = plan.batch / plan.step_seconds
    cost = "" if plan.cost is None else f", for {plan.cost:,.2f}"
    memory_title = f"Memory of each of {plan.workers} workers"
    return {
        f"{memory_title} ({plan.device}, {_text(plan.memory_bytes, _BYTES)})": _rows(
            memory, _BYTES
        ),
        "Disk": _rows(disk, _BYTES),
        f"A step of {plan.batch:,} queries, {queries_s:,.0f} per second": _rows(
            {**plan.step_s, "one step": plan.step_seconds}, _SECONDS
        ),
        f"A run of {plan.epochs} epochs of {plan.steps_per_epoch:,} steps{cost}": _rows(
            plan.run_s, _SECONDS
        ),
    }


def tables(plan: Plan) -> list[Table | str]:
    """A heading, a table for each section, and what is assumed."""
    sizes = f"{plan.labels:,} labels, {plan.queries:,} queries, D = {plan.dim}"
    parts: list[Table | str] = [f"{plan.method}: {sizes}; {plan.source}"]
    for title, rows in sections(plan).items():
        table = Table("", Column(justify="right"), title=title, show_header=False)
        for row in rows:
            table.add_row(*row)
        parts.append(table)
    return [*parts, *(f"assumed: {assumption}" for assumption in plan.assumptions)]


def _rows(values: dict[str, int] | dict[str, float], units: Units) -> Rows:
    """The values that are not 0, as texts."""
    return [(name, _text(value, units)) for name, value in values.items() if value]


def _text(value: float, units: Units) -> str:
    for unit, name in units:
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value / unit:.2g} {name}"  # of the smallest unit
