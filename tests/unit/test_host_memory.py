"""The memory of a container is that of its control group."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from xmcray.host_memory import host_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("limit", "used", "statistics"),
    [
        ("memory.max", "memory.current", "memory.stat"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
        ),
    ],
)
def test_a_container_has_its_limit(limit: str, used: str, statistics: str, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text(f"{GIB}\n")
    (tmp_path / used).write_text(f"{GIB // 2}\n")
    # Cached files are not used memory.
    (tmp_path / statistics).write_text(f"anon 5\ninactive_file {GIB // 4}\nactive_file 7\n")
    assert host_memory(tmp_path) == (GIB, 3 * GIB // 4)


@pytest.mark.parametrize("limit", ["max\n", f"{1 << 62}\n", ""])
def test_without_a_limit_the_machine_has_its_own_memory(limit: str, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("1\n")
    (tmp_path / "memory.stat").write_text("")
    assert host_memory(tmp_path).total == psutil.virtual_memory().total
