"""A plan as tables for the terminal."""

from __future__ import annotations

from rich.table import Table

from xmcray.planning.estimate import Plan

Rows = list[tuple[str, str]]


def sections(plan: Plan) -> dict[str, Rows]:
    """Titles with their rows of a name and a value."""
    memory = (
        f"Memory of each of {plan.workers} workers ({plan.device}, {_bytes(plan.memory_bytes)})"
    )
    return {
        memory: _memory(plan),
        "Disk": _disk(plan),
        f"A step of {plan.batch:,} queries": _step(plan),
        "The run": _run(plan),
    }


def tables(plan: Plan) -> list[Table | str]:
    """A heading, a table for each section, and what is assumed."""
    sizes = f"{plan.labels:,} labels, {plan.queries:,} queries, D = {plan.dim}"
    lines: list[Table | str] = [f"{plan.method}: {sizes}; {plan.source}"]
    for title, rows in sections(plan).items():
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(justify="left")
        table.add_column(justify="right")
        for row in rows:
            table.add_row(*row)
        lines.append(table)
    lines += [f"assumed: {assumption}" for assumption in plan.assumptions]
    return lines


def _memory(plan: Plan) -> Rows:
    rows = []
    for where, parts in (("device", plan.device_bytes), ("process", plan.host_bytes)):
        for name, size in parts.items():
            if size:
                rows.append((f"{where}: {name}", _bytes(size)))
        if parts:
            rows.append((f"{where}: in all", _bytes(sum(parts.values()))))
    if plan.index_bytes:
        rows.append(("an index actor of each worker", _bytes(plan.index_bytes)))
    rows.append(("Ray's object store, only while preparing", _bytes(plan.object_store)))
    return rows


def _disk(plan: Plan) -> Rows:
    checkpoints = f"checkpoints, {plan.checkpoints} of {_bytes(plan.checkpoint)}"
    return [
        (checkpoints, _bytes(plan.checkpoints * plan.checkpoint)),
        ("ledger of the negatives", _bytes(plan.ledger)),
        ("index without the vectors", _bytes(plan.index_on_disk)),
    ]


def _step(plan: Plan) -> Rows:
    rows = [(name, _seconds(value)) for name, value in plan.step_s.items() if value]
    rows.append(("one step", _seconds(plan.step_seconds)))
    rows.append(("queries per second", f"{plan.batch / plan.step_seconds:,.0f}"))
    return rows


def _run(plan: Plan) -> Rows:
    seconds = {
        "refresh of the negatives, while training goes on": plan.refresh_s,
        "of which: building an index": plan.build_s,
        "of which: searching it": plan.search_s,
        "the first refresh, of rows close to their start": plan.first_refresh_s,
        "one validation": plan.validation_s,
        "one checkpoint": plan.checkpoint_s,
        "one epoch": plan.epoch_s,
        f"{plan.epochs} epochs, the whole training": plan.total_s,
    }
    rows = [("steps per epoch", f"{plan.steps_per_epoch:,}")]
    rows += [(name, _seconds(value)) for name, value in seconds.items() if value]
    if plan.cost is not None:
        rows.append(("cost", f"{plan.cost:,.2f}"))
    return rows


def _bytes(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e3:.0f} kB"


def _seconds(value: float) -> str:
    units = ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"))
    for unit, name in units:
        if value >= unit * (2 if name == "days" else 1):
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.0f} µs"
