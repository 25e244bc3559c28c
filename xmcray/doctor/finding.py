"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: its name. found: in words, never the value of a secret. do: what mends it; empty when nothing is to do.
        level: "error" would break a run or lets others run code; "warning" is worth a look.
    """

    check: str
    level: Level
    found: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.found}" + (f"; {self.do}" if self.do else "")


def worst(findings: list[Finding]) -> str:
    """The errors as one line; empty if there is none."""
    errors = [str(finding) for finding in findings if finding.level == "error"]
    rest = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return errors[0] + rest if errors else ""
