"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        level: "error" would break a run or lets others run code; "warning" is worth a look.
        found: what the check saw, in words. Never the value of a secret.
        do: the remedy; empty if there is nothing to do.
    """

    check: str
    level: Level
    found: str
    do: str = ""

    def __str__(self) -> str:
        text = f"{self.check}: {self.found}"
        return f"{text}; {self.do}" if self.do else text


def worst(findings: list[Finding]) -> str:
    """The first error and the number of others as one line; empty if there is none."""
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if not errors:
        return ""
    if len(errors) > 1:
        return f"{errors[0]} (and {len(errors) - 1} more)"
    return errors[0]
