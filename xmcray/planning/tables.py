"""A plan as tables for the terminal and as Markdown: the same rows."""

from __future__ import annotations

from rich.table import Table

from xmcray.planning.plan import Plan

Rows = list[tuple[str, str]]


def sections(plan: Plan) -> dict[str, Rows]:
    """Titles with their rows of a name and a value."""
    memory: Rows = []
    for where, parts in (("device", plan.device_bytes), ("process", plan.host_bytes)):
        memory += [(f"{where}: {name}", _bytes(size)) for name, size in parts.items() if size]
        memory += [(f"{where}: in all", _bytes(sum(parts.values())))] if parts else []
    memory += (
        [("an index actor of each worker", _bytes(plan.index_bytes))] if plan.index_bytes else []
    )
    memory += [("Ray's object store, only while preparing", _bytes(plan.object_store))]
    disk = [
        (
            f"checkpoints, {plan.checkpoints} of {_bytes(plan.checkpoint)}",
            _bytes(plan.checkpoints * plan.checkpoint),
        ),
        ("ledger of the negatives", _bytes(plan.ledger)),
        ("index without the vectors", _bytes(plan.index_on_disk)),
    ]
    seconds = [(name, _seconds(value)) for name, value in plan.step_s.items() if value]
    seconds += [
        ("one step", _seconds(plan.step_seconds)),
        ("queries per second", f"{plan.batch / plan.step_seconds:,.0f}"),
    ]
    run = [
        ("steps per epoch", f"{plan.steps_per_epoch:,}"),
        ("refresh of the negatives, while training goes on", _seconds(plan.refresh_s)),
        ("of which: building an index", _seconds(plan.build_s)),
        ("of which: searching it", _seconds(plan.search_s)),
        ("the first refresh, of rows close to their start", _seconds(plan.first_refresh_s)),
        ("one validation", _seconds(plan.validation_s)),
        ("one checkpoint", _seconds(plan.checkpoint_s)),
        ("one epoch", _seconds(plan.epoch_s)),
        (f"{plan.epochs} epochs, the whole training", _seconds(plan.total_s)),
    ]
    if plan.cost is not None:
        run.append(("cost", f"{plan.cost:,.2f}"))
    return {
        f"Memory of each of {plan.workers} workers ({plan.device}, {_bytes(plan.memory_bytes)})": memory,
        "Disk": disk,
        f"A step of {plan.batch:,} queries": seconds,
        "The run": [row for row in run if row[1] != "0 s"],
    }


def tables(plan: Plan) -> list[Table | str]:
    """For the terminal."""
    made: list[Table | str] = [
        f"{plan.method}: {plan.labels:,} labels, {plan.queries:,} queries, D = {plan.dim}; {plan.source}"
    ]
    for title, rows in sections(plan).items():
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(justify="left")
        table.add_column(justify="right")
        for row in rows:
            table.add_row(*row)
        made.append(table)
    return [*made, *(f"assumed: {line}" for line in plan.assumptions)]


def markdown(plan: Plan) -> list[str]:
    """For a page."""
    lines: list[str] = []
    for title, rows in sections(plan).items():
        lines += [
            "",
            f"| {title} | |",
            "| --- | ---: |",
            *(f"| {name} | {value} |" for name, value in rows),
        ]
    return [*lines, "", *(f"- assumed: {line}" for line in plan.assumptions)]


def _bytes(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e3:.0f} kB"


def _seconds(value: float) -> str:
    for unit, name in ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if value >= unit * (2 if name == "days" else 1):
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.0f} µs" if value else "0 s"
