"""A plan as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Column, Table

from xmcray.planning.estimate import Plan

Rows = list[tuple[str, str]]
# Units from large to small.
_BYTES = {
    "TB": 1e12,
    "GB": 1e9,
    "MB": 1e6,
    "kB": 1e3,
}
_SECONDS = {
    "days": 86_400,
    "h": 3600,
    "min": 60,
    "s": 1,
    "ms": 1e-3,
    "µs": 1e-6,
}


def sections(plan: Plan) -> dict[str, Rows]:
    """Rows of name and value, by the title of their section."""
    limit = _text(plan.limit_bytes, _BYTES)
    memory_title = f"Memory, {plan.workers} workers ({plan.device}, at most {limit} for each)"

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
    return {
        **_with_sum("device", plan.device_bytes),
        **_with_sum("process", plan.host_bytes),
        "an index actor of each worker": plan.index_bytes,
        "the coordinator, while it clusters queries": plan.cluster_bytes,
        "Ray's object store, only while preparing": plan.object_store,
    }


def _with_sum(place: str, parts: dict[str, int]) -> dict[str, int]:
    """Bytes by part, and their sum, under names that begin with the place."""
    num_bytes = {f"{place}: {name}": part for name, part in parts.items()}
    num_bytes[f"{place}: in all"] = sum(parts.values())
    return num_bytes


def _disk(plan: Plan) -> dict[str, int]:
    """Bytes by what is on the disk."""
    one_checkpoint = _text(plan.checkpoint, _BYTES)
    title = f"checkpoints, {plan.checkpoints} of {one_checkpoint}"
    return {
        title: plan.checkpoints * plan.checkpoint,
        "ledger of the negatives": plan.ledger,
        "index without the vectors": plan.index_on_disk,
    }


def tables(plan: Plan) -> list[Table | str]:
    """A heading, a table for each section, and what is assumed."""
    sizes = f"{plan.labels:,} labels, {plan.queries:,} queries, D = {plan.dim}"
    heading = f"{plan.method}: {sizes}; {plan.source}"
    parts: list[Table | str] = [heading]
    for title, rows in sections(plan).items():
        table = Table(
            "",
            Column(justify="right"),
            title=title,
            show_header=False,
        )
        for name, value in rows:
            table.add_row(name, value)
        parts.append(table)
    parts.extend(f"assumed: {assumption}" for assumption in plan.assumptions)
    parts.extend(f"advice: {advice}" for advice in plan.advice)
    return parts


def _rows(values: Mapping[str, float], units: dict[str, float]) -> Rows:
    """Names and values as texts, without what is 0, such as the parts of a missing GPU."""
    rows = []
    for name, value in values.items():
        if value:
            rows.append((name, _text(value, units)))
    return rows


def _text(value: float, units: dict[str, float]) -> str:
    """A value with up to three digits, in the largest unit that it reaches.

    Below the smallest unit it has up to two.
    """
    for name, unit in units.items():
        # 999.6 kB would be rounded to 1,000 kB, so it is written as 1 MB.
        if value >= 0.9995 * unit:
            return f"{_three_digits(value / unit)} {name}"
    # The loop has ended at the smallest unit.
    return f"{value / unit:.2g} {name}"


def _three_digits(value: float) -> str:
    """Three digits, or all before the point of a larger number, which only the largest unit has."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
