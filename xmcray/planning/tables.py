"""A plan as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Column, Table

from xmcray.planning.estimate import Plan

_Rows = list[tuple[str, str]]

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


def tables(plan: Plan) -> list[Table | str]:
    """What the terminal shows: a heading, a table per section, the assumptions, and the advice."""
    sizes = f"{plan.labels:,} labels, {plan.queries:,} queries, D = {plan.dim}"
    heading = f"{plan.method}: {sizes}; {plan.source}"
    tables_and_lines: list[Table | str] = [heading]
    tables_and_lines.extend(_table(title, rows) for title, rows in sections(plan).items())
    tables_and_lines.extend(f"assumed: {assumption}" for assumption in plan.assumptions)
    tables_and_lines.extend(f"advice: {advice}" for advice in plan.advice)
    return tables_and_lines


def _table(title: str, rows: _Rows) -> Table:
    names = Column()
    values = Column(justify="right")
    table = Table(names, values, title=title, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def sections(plan: Plan) -> dict[str, _Rows]:
    """Rows of name and value, by the title of their section."""
    limit = _with_unit(plan.limit_bytes, _BYTES)
    workers = "1 worker" if plan.workers == 1 else f"{plan.workers} workers"
    memory_title = f"Memory, {workers} ({plan.device}, at most {limit} for each)"

    queries_per_s = plan.batch / plan.step_seconds
    step_title = f"A step of {plan.batch:,} queries, {queries_per_s:,.0f} per second"

    run_title = f"A run of {plan.epochs} epochs of {plan.steps_per_epoch:,} steps"
    if plan.cost is not None:
        run_title += f", for {plan.cost:,.2f}"

    return {
        memory_title: _rows(_memory(plan), _BYTES),
        "Disk": _rows(_disk(plan), _BYTES),
        step_title: _rows({**plan.step_s, "one step": plan.step_seconds}, _SECONDS),
        run_title: _rows(plan.run_s, _SECONDS),
    }


def _memory(plan: Plan) -> dict[str, int]:
    """Bytes of memory, by the process or device that holds them."""
    return {
        **_with_sum("device", plan.device_bytes),
        **_with_sum("process", plan.host_bytes),
        "an index actor of each worker": plan.index_bytes,
        "the coordinator, while it clusters queries": plan.cluster_bytes,
        "Ray's object store, only while preparing": plan.object_store,
    }


def _with_sum(place: str, part_bytes: dict[str, int]) -> dict[str, int]:
    """Bytes of each part and of all parts together. The names of the rows begin with the place."""
    rows = {f"{place}: {part}": num_bytes for part, num_bytes in part_bytes.items()}
    rows[f"{place}: in all"] = sum(part_bytes.values())
    return rows


def _disk(plan: Plan) -> dict[str, int]:
    """Bytes on the disk, by what is stored."""
    one_checkpoint = _with_unit(plan.checkpoint, _BYTES)
    all_checkpoints = f"checkpoints, {plan.checkpoints} of {one_checkpoint}"
    return {
        all_checkpoints: plan.checkpoints * plan.checkpoint,
        "ledger of the negatives": plan.ledger,
        "index without the vectors": plan.index_on_disk,
    }


def _rows(values: Mapping[str, float], units: dict[str, float]) -> _Rows:
    """Names, and values as texts. Values of 0 are left out, such as the bytes of a missing GPU."""
    rows = []
    for name, value in values.items():
        if value:
            rows.append((name, _with_unit(value, units)))
    return rows


def _with_unit(value: float, units: dict[str, float]) -> str:
    """A value with up to three digits, in the largest unit that it reaches.

    A value that does not even reach the smallest unit has up to two digits, in that unit.
    """
    for name, unit in units.items():
        # 999.6 kB would be rounded to 1,000 kB, so it is written as 1 MB.
        if value >= 0.9995 * unit:
            return f"{_three_digits(value / unit)} {name}"
    smallest = min(units, key=lambda name: units[name])
    return f"{value / units[smallest]:.2g} {smallest}"


def _three_digits(value: float) -> str:
    """Up to three digits, or all digits before the point of a number of the largest unit."""
    # `g` would write such a number as 1e+03.
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"
