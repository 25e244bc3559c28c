"""Compares versions with the requirements of the package, and finds harmful variables."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.request import getproxies, proxy_bypass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from xmcray import __version__
from xmcray.doctor.finding import Finding, Level
from xmcray.ray_adapter.switches import UNPICKLING

FAISS = ("faiss-cpu", "faiss-gpu")
INSTALL = "pip install -c constraints.txt -e '.[cpu]', or '.[gpu]'"


@dataclass(frozen=True, slots=True)
class Switch:
    """An environment variable that does harm.

    Attributes:
        values: harmful values, in lower case.
        level: level of the finding.
        harm: what the variable does.
        do: the remedy.
    """

    values: tuple[str, ...]
    level: Level
    harm: str
    do: str = "unset it"


_UNPICKLES = Switch(("1", "true"), "error", "Ray Data unpickles what a data file holds")
SWITCHES = {
    **dict.fromkeys(UNPICKLING, _UNPICKLES),
    "RAY_TRAIN_V2_ENABLED": Switch(
        ("0", "false"), "error", "the old Ray Train is chosen, in which no method trains"
    ),
    "RAY_AUTH_MODE": Switch(
        ("disabled",),
        "warning",
        "anyone who can reach a port of Ray can run code here",
        "set it to token, on every node and for every client",
    ),
    "RAY_SERVE_ENABLE_HA_PROXY": Switch(
        ("1", "true"),
        "warning",
        "that proxy opens ports 8404 and 9101 on all interfaces",
        "unset it, or close these ports to others",
    ),
}


def versions() -> Iterator[Finding]:
    """Checks the versions of Python and of every required package."""
    supported = str(importlib.metadata.metadata("xmcray")["Requires-Python"])
    python_version = platform.python_version()
    text = f"{python_version}, xmcray {__version__}"
    if SpecifierSet(supported).contains(python_version):
        yield Finding("python", "ok", text)
    else:
        remedy = f"expected {supported}: make a virtual environment with it"
        yield Finding("python", "error", text, remedy)
    for requirement in sorted(_requirements(), key=lambda requirement: requirement.name):
        yield version(requirement)
    yield faiss()


def version(requirement: Requirement) -> Finding:
    """Checks whether a package is installed in a version that we support."""
    name = requirement.name
    expected = f"expected {requirement.specifier}"
    version_here = installed(name)
    if version_here is None:
        return Finding(name, "error", f"missing, {expected}", INSTALL)
    if not requirement.specifier.contains(version_here, prereleases=True):
        return Finding(name, "error", f"{version_here}, {expected}", INSTALL)
    return Finding(name, "ok", version_here)


def faiss() -> Finding:
    """Checks whether exactly one of the two wheels with the module faiss is installed."""
    wheels = [name for name in FAISS if installed(name)]
    if not wheels:
        return Finding("faiss", "error", "missing", INSTALL)
    if len(wheels) > 1:
        both = " and ".join(wheels)
        remedy = f"pip uninstall {both}, then {INSTALL}"
        return Finding("faiss", "error", f"{both} overwrite each other", remedy)
    return Finding("faiss", "ok", f"{wheels[0]} {installed(wheels[0])}")


def installed(name: str) -> str | None:
    """Version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def switches(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Finds variables that undo a protection, or break Ray in ways that are hard to see."""
    for name, switch in SWITCHES.items():
        value = environment.get(name, "")
        if value.lower() in switch.values:
            yield Finding(name, switch.level, f"is {value}: {switch.harm}", switch.do)
    if getproxies().get("http") and not proxy_bypass("127.0.0.1"):
        text = "also holds for 127.0.0.1, where Ray listens"
        yield Finding("http_proxy", "warning", text, "export no_proxy=127.0.0.1,localhost")
    if sys.platform != "linux":
        text = f"{sys.platform}: only Linux is tested"
        yield Finding("platform", "warning", text, "use Linux for anything that lasts")


def _requirements() -> Iterator[Requirement]:
    """Packages that xmcray needs without any extra."""
    for text in importlib.metadata.requires("xmcray") or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement
