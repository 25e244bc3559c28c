"""Damaged and hostile files: seeded changes of every kind, and what reading them afterwards leads to.

A change that the manifest shows must give the answer of the intact files or be refused. With
`renew`, the manifest is made to fit the changed file, as an attacker would do it: the checks of the
content are reached, and any answer or refusal is right, but no traceback, crash or code run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import math
import os
import random
import resource
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path

from file_changes import BYTES, MARKER, OF_SUFFIX, extend
from intact_artifacts import Artifact, write_artifacts

from xmcray.errors import XmcrayError
from xmcray.storage.manifest import MANIFEST, FileEntry, finish_manifest

MOST_BYTES = 4 << 30  # of memory that changed files may lead to


@dataclass(frozen=True)
class Outcome:
    """What a changed file led to: "same", "other", "refused", or a fault with its traceback."""

    kind: str
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in ("traceback", "many lines", "code run", "wrong answer")


def try_change(artifact: Artifact, file: str, folder: Path, seed: int) -> tuple[str, Outcome]:
    """Changes a copy of one file and uses the artifact; returns what was done and what came of it."""
    draw = random.Random(f"{artifact.name} {file} {seed}")
    changed_folder = folder / "copy"
    shutil.rmtree(changed_folder, ignore_errors=True)
    shutil.copytree(artifact.path, changed_folder, copy_function=_link)
    target = changed_folder / file
    data = target.read_bytes()
    target.unlink()
    renew = draw.random() < 0.75
    description, changed = _changed(artifact, file, data, draw)
    if changed is not None:
        target.write_bytes(changed)
    manifest = _manifest_of(changed_folder, target)
    if manifest is None:
        renew = True  # there is no hash that could show the change
    elif renew:
        _renew(manifest, target)
        description += ", hash renewed"
    marker = folder / "marker"
    os.environ[MARKER] = str(marker)
    outcome = _used(artifact, changed_folder, may_differ=renew)
    if marker.exists():
        marker.unlink()
        outcome = Outcome("code run", description)
    return description, outcome


def _link(source: str, target: str) -> None:
    # SQLite writes into its file, and a link would share the change with the intact one.
    if ".sqlite" in source:
        shutil.copyfile(source, target)
    else:
        os.link(source, target)


def _changed(
    artifact: Artifact, file: str, data: bytes, draw: random.Random
) -> tuple[str, bytes | None]:
    way = draw.random()
    if way < 0.03:
        return "deleted", None
    if way < 0.08:
        other = draw.choice(artifact.files())
        return f"replaced by {other}", (artifact.path / other).read_bytes()
    changes = OF_SUFFIX.get(Path(file).suffix, ())
    is_manifest = Path(file).name == MANIFEST
    # Random bytes rarely get past a parser; changes of values do.
    if changes and (way < 0.7 or is_manifest):
        change = draw.choice(changes)
    else:
        change = draw.choice(BYTES)
    if not data:
        change = extend
    return change.__name__.strip("_"), change(data, draw)


def _manifest_of(copy: Path, target: Path) -> Path | None:
    for folder in target.parents:
        if (folder / MANIFEST).is_file() or target == folder / MANIFEST:
            return folder / MANIFEST
        if folder == copy:
            return None
    return None


def _renew(manifest: Path, target: Path) -> None:
    """Makes the manifest fit what is there now."""
    with contextlib.suppress(
        ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError
    ):
        body = json.loads(manifest.read_bytes())
        if target == manifest:
            body.pop("sha256", None)
            text = json.dumps(body, sort_keys=True, separators=(",", ":"))
            body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
            manifest.unlink()
            manifest.write_text(json.dumps(body), encoding="utf-8")
            return
        name = target.relative_to(manifest.parent).as_posix()
        entries = {}
        for other, entry in body["files"].items():
            if other != name:
                entries[other] = FileEntry(entry["size"], entry["sha256"])
        manifest.unlink()
        finish_manifest(manifest.parent, body["kind"], body["about"], entries)


def _used(artifact: Artifact, copy: Path, may_differ: bool) -> Outcome:
    try:
        answer = artifact.use(copy)
    except XmcrayError as error:
        lines = str(error).splitlines()
        return Outcome("refused" if len(lines) == 1 else "many lines", str(error))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of a Rust library is no Exception
        return Outcome("traceback", traceback.format_exc())
    if answer == artifact.answer:
        return Outcome("same")
    return Outcome("other" if may_differ else "wrong answer")


def main() -> None:
    """Tries changes and prints each, so that the last line names what ended the process.

    A trial is two lines of JSON: ["trying", artifact, file, seed], and ["tried", artifact, file,
    seed, {what was done, what came of it}].
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where intact and changed files are written")
    parser.add_argument("--trials", type=int, default=3, help="of each file (default: %(default)s)")
    parser.add_argument(
        "--changes", type=int, help="of all files together, in place of --trials of each"
    )
    parser.add_argument("--first", type=int, default=0, help="first seed (default: %(default)s)")
    parser.add_argument("--kind", help="only files whose names end so, such as .npy")
    options = parser.parse_args()
    os.fsync = os.fstat  # type: ignore[assignment]  # nothing here has to outlast a power cut
    logging.disable()  # of damaged checkpoints that are passed over
    # What asks for too much memory is to fail here, and not to end other processes of the machine.
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    artifacts = write_artifacts(options.folder)
    shares: dict[tuple[str, str], float] = {}
    for artifact in artifacts.values():
        for file in artifact.files():
            if not options.kind or file.endswith(options.kind):
                # An export takes longer than all other uses together.
                shares[artifact.name, file] = 1 / 3 if artifact.name == "run" else 1.0
    trials_of_each = options.trials
    if options.changes is not None:
        trials_of_each = options.changes / sum(shares.values())
    for (name, file), share in shares.items():
        artifact = artifacts[name]
        trials = math.ceil(share * trials_of_each)
        for seed in range(options.first, options.first + trials):
            print(json.dumps(["trying", artifact.name, file, seed]), flush=True)
            description, outcome = try_change(artifact, file, options.folder, seed)
            result = {
                "change": description,
                "kind": outcome.kind,
                "is_fault": outcome.is_fault,
                "detail": outcome.detail,
            }
            print(json.dumps(["tried", artifact.name, file, seed, result]), flush=True)


if __name__ == "__main__":
    main()
