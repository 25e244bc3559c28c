"""Versions against what the package asks for, and settings of the environment that are known to do harm."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping
from urllib.request import getproxies, proxy_bypass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from xmcray import __version__
from xmcray.doctor.finding import Finding, Level

FAISS = ("faiss-cpu", "faiss-gpu")
INSTALL = "pip install -c constraints.txt -e '.[cpu]', or '.[gpu]'"

# name -> harmful value, how bad, what it does, what to do
SWITCHES: dict[str, tuple[str, Level, str, str]] = {
    "RAY_DATA_AUTOLOAD_PICKLE_OBJECT_SCALAR": (
        "1",
        "error",
        "Ray Data unpickles what a data file holds",
        "unset it",
    ),
    "RAY_DATA_AUTOLOAD_PYEXTENSIONTYPE": (
        "1",
        "error",
        "Ray Data unpickles what a data file holds",
        "unset it",
    ),
    "RAY_TRAIN_V2_ENABLED": (
        "0",
        "error",
        "the old Ray Train is chosen, in which no method trains",
        "unset it",
    ),
    "RAY_AUTH_MODE": (
        "disabled",
        "warning",
        "whoever reaches a port of Ray runs code here",
        "set it to token, on every node and for every client",
    ),
    "RAY_SERVE_ENABLE_HA_PROXY": (
        "1",
        "warning",
        "that proxy opens ports 8404 and 9101 on all interfaces",
        "unset it, or close these ports to others",
    ),
}


def versions() -> Iterator[Finding]:
    """Python and every required package."""
    about = importlib.metadata.metadata("xmcray")
    wanted = str(about["Requires-Python"] or ">=3.11,<3.13")
    found = platform.python_version()
    good = SpecifierSet(wanted).contains(found)
    yield Finding(
        "python",
        "ok" if good else "error",
        f"{found}, xmcray {__version__}",
        "" if good else f"expected {wanted}: make a virtual environment with it",
    )
    requirements = [Requirement(text) for text in importlib.metadata.requires("xmcray") or ()]
    base = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    yield from (version(one) for one in sorted(base, key=lambda one: one.name))
    yield faiss()


def version(wanted: Requirement) -> Finding:
    """One package."""
    found = installed(wanted.name)
    if found is None:
        return Finding(wanted.name, "error", f"missing, expected {wanted.specifier}", INSTALL)
    if not wanted.specifier.contains(found, prereleases=True):
        return Finding(wanted.name, "error", f"{found}, expected {wanted.specifier}", INSTALL)
    return Finding(wanted.name, "ok", found)


def faiss() -> Finding:
    """One of the two wheels that hold the module faiss, and not both."""
    there = {name: found for name in FAISS if (found := installed(name))}
    if not there:
        return Finding("faiss", "error", "missing", INSTALL)
    if len(there) > 1:
        both = " and ".join(there)
        return Finding(
            "faiss",
            "error",
            f"{both} overwrite each other",
            f"pip uninstall {both}, then {INSTALL}",
        )
    return Finding("faiss", "ok", ", ".join(f"{name} {found}" for name, found in there.items()))


def installed(name: str) -> str | None:
    """Version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def switches(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Environment variables that undo a protection, or break Ray in ways that are hard to see."""
    for name, (value, level, harm, do) in SWITCHES.items():
        if environment.get(name, "").lower() in (value, {"1": "true", "0": "false"}.get(value)):
            yield Finding(name, level, f"is {environment[name]}: {harm}", do)
    if getproxies().get("http") and not proxy_bypass("127.0.0.1"):
        yield Finding(
            "http_proxy",
            "warning",
            "also holds for 127.0.0.1, where Ray listens",
            "export no_proxy=127.0.0.1,localhost",
        )
    if sys.platform != "linux":
        yield Finding(
            "platform",
            "warning",
            f"{sys.platform}: only Linux is tested",
            "use Linux for anything that lasts",
        )
