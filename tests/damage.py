"""Damaged and hostile files: seeded changes of every kind, and what reading them afterwards leads to.

A change that the manifest shows must give the answer of the intact files or be refused. With
`renew`, the manifest is made to fit the changed file, as an attacker would do it: the checks of the
content are reached, and any answer or refusal is right, but no traceback, crash or code run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import hashlib
import io
import json
import logging
import math
import os
import random
import resource
import shutil
import struct
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bundles import WORDS, write_bundle_of, write_fused, write_memory
from corpora import planted_corpus
from operations import BATCHES, add, operations_after

from xmcray.data.corpus import Corpus
from xmcray.errors import XmcrayError
from xmcray.evaluation.predictions import (
    predictions_to_top_labels,
    read_predictions,
    write_predictions,
)
from xmcray.retrieval.labels import annotate_labels, remove_labels
from xmcray.serving.event_export import export_events
from xmcray.serving.event_log import EventLog
from xmcray.serving.events import FeedbackEvent, SearchEvent
from xmcray.serving.log_place import BEGINNING
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot
from xmcray.serving.state_folder import StateFolder
from xmcray.storage.manifest import MANIFEST, FileEntry, finish_manifest
from xmcray.training.export import export_run
from xmcray.training.launch import refit_config, train
from xmcray.training.outcome import record
from xmcray.training.run import Run, RunConfig
from xmcray.types import TopLabels

Change = Callable[[bytes, random.Random], bytes]
HUGE = (-1, 0, 1, 2**31, 2**32 - 1, 2**50, 2**63 - 1, 10**30)
MOST_BYTES = 4 << 30  # of memory that changed files may lead to
MARKER = "XMCRAY_CODE_RAN"  # environment variable: the file that executed code would write


@dataclass(frozen=True)
class Artifact:
    """Something on disk, and how it is used.

    Attributes:
        path: its folder.
        use: reads everything of a copy of the folder and returns what can be compared.
        answer: what `use` returns for the intact folder.
    """

    name: str
    path: Path
    use: Callable[[Path], str]
    answer: str

    @classmethod
    def of(cls, name: str, path: Path, use: Callable[[Path], str]) -> Artifact:
        return cls(name, path, use, use(path))

    def files(self) -> list[str]:
        """All files by path relative to the folder."""
        return sorted(
            path.relative_to(self.path).as_posix()
            for path in self.path.rglob("*")
            if path.is_file() and path.name != "lock"
        )


@dataclass(frozen=True)
class Outcome:
    """What a changed file led to: "same", "other", "refused", or a fault with its traceback."""

    kind: str
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in ("traceback", "many lines", "code run", "wrong answer")


# --- The intact artifacts ---


def write_artifacts(folder: Path) -> dict[str, Artifact]:
    """A corpus, bundles, a run and a state folder."""
    corpus = planted_corpus(folder / "c", num_queries=60, num_labels=23)
    plain = write_bundle_of(folder / "plain", "textsIVF", shard_rows=300)
    annotate_labels(plain, {"u1": {"price": 1.5, "kind": "a"}, "u2": {"new": True}}, folder / "a")
    remove_labels(folder / "a", ["u7"], folder / "texts")
    write_bundle_of(folder / "prototypes", "prototypesHNSW")
    memory = write_memory(folder / "m")
    settings = [
        "encoder.dim=16",
        "optim.batch_size=32",
        "optim.epochs=3",
        "negatives.start_epoch=2",
        "negatives.hard=4",
        "negatives.uniform=10",
        "method.init=zeros",
        "cluster.workers=0",
        "cluster.threads_per_process=1",
    ]
    train(corpus.path, folder / "run", RunConfig.resolve("astra", {}, settings))
    state = folder / "state"
    config = ServeConfig(bundles={"m": str(plain)}, state_dir=str(state))
    with StateFolder(config, "m").open_log(BEGINNING) as log:
        for batch in BATCHES:
            log.append(batch)
    StateFolder(config, "m").remember(str(folder / "texts"), "0" * 64)
    for day in range(2):
        write_events(folder / "events", day)
    write_answers(folder / "answers")
    return {
        "corpus": Artifact.of("corpus", corpus.path, read_corpus),
        "bundle": Artifact.of("bundle", folder / "texts", search_bundle),
        "prototypes": Artifact.of("prototypes", folder / "prototypes", search_bundle),
        "memory": Artifact.of("memory", memory, search_bundle),
        "fused": Artifact.of("fused", write_fused(memory), search_bundle),
        "run": Artifact.of("run", folder / "run", lambda path: use_run(path, corpus)),
        "state": Artifact.of("state", state, lambda path: open_state(path, plain)),
        "events": Artifact.of("events", folder / "events", read_events),
        "answers": Artifact.of("answers", folder / "answers", read_answers),
    }


def read_corpus(path: Path) -> str:
    """Reads all of a corpus."""
    corpus = Corpus.open(path)
    labels = np.arange(corpus.card.num_labels)
    parts: list[Any] = [
        corpus.card,
        corpus.label_order.tolist(),
        corpus.label_rank.tolist(),
        corpus.train_counts.tolist(),
        corpus.label_texts(labels),
        corpus.label_uids(labels),
        corpus.label_tokens(labels).values.tolist(),
        corpus.tokenizer().encode(["w1 w2"]).values.tolist(),
    ]
    for name in ("train", "test"):
        split = corpus.split(name)
        rows = np.arange(len(split))
        for ragged in (split.tokens(rows), split.positives(rows), split.filters(rows)):
            parts += [ragged.values.tolist(), ragged.offsets.tolist()]
        parts += [split.texts(rows), split.uids(rows), split.rows_without_tokens.tolist()]
    return _fingerprint(parts)


def search_bundle(path: Path) -> str:
    """Loads a bundle as a server does, searches it, and adds a label."""
    snapshot = Snapshot.load(str(path), "m", 1)
    parts: list[Any] = []
    for current in (snapshot, snapshot.after([add("new", f"{WORDS[0]} {WORDS[3]} w1", price=2)])):
        has_memory = current.retriever.memory is not None
        texts = [f"{WORDS[2]} {WORDS[1]}", "w1 w2x0"]
        for answers in current.retriever.search(texts, 3, explain=has_memory):
            parts += [(answer.uid, answer.text, f"{answer.score:.4f}") for answer in answers]
        parts.append(current.attributes.of([0, 1, 2]))
    return _fingerprint(parts)


def use_run(path: Path, corpus: Corpus) -> str:
    """Reports on a finished run, chooses the epochs of its refit, exports it, and resumes it.

    A refusal of the other uses is raised after the run was resumed, so that each file is used.
    """
    run = Run.open(path)
    refusal = None
    parts: list[Any] = []
    try:
        record(run, corpus)
        report = (path / "report.html").read_text(encoding="utf-8")
        parts += [report, refit_config(run).to_dict(), _export(run)]
    except XmcrayError as error:
        refusal = error
    parts.append(_resume(path, run, corpus))
    if refusal is not None:
        raise refusal
    return _fingerprint(parts)


def _resume(path: Path, run: Run, corpus: Corpus) -> dict[str, str]:
    """Resumes a copy of a run, as if it had been killed before its end was noted, and exports it.

    With the newest checkpoint damaged, the epoch after the one before is trained again.
    """
    killed = path.with_name(f"{path.name}-killed")
    try:
        shutil.copytree(path, killed)
        (killed / "result.json").unlink(missing_ok=True)
        train(corpus.path, killed, run.config)
        return _export(Run.open(killed))
    finally:
        shutil.rmtree(killed, ignore_errors=True)


def _export(run: Run) -> dict[str, str]:
    """The SHA-256 of each file of a run's bundle, by name."""
    out = run.path.with_name(f"{run.path.name}-exported")
    try:
        export_run(run, out)
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        return {name: entry["sha256"] for name, entry in manifest["files"].items()}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def open_state(path: Path, bundle: Path) -> str:
    """Opens what a coordinator finds when it starts."""
    folder = StateFolder(ServeConfig(bundles={"m": str(bundle)}, state_dir=str(path)), "m")
    parts: list[Any] = [folder.bundle()]
    with folder.open_log(BEGINNING) as log:
        parts.append([operation.model_dump() for operation in operations_after(log, 0)])
    return _fingerprint(parts)


def write_events(path: Path, day: int) -> None:
    """Collects some events, in a file of their own."""
    # Each start one day later begins another file.
    clock = functools.partial(float, 2e9 + 86_400 * day)
    folder = path / "m" / "events"
    with EventLog(folder, "m", redact=False, max_days=5, max_bytes=1 << 30, clock=clock) as log:
        for number in range(5):
            name = f"{day}-{number}"
            log.note(SearchEvent(request=name, version="v", texts=[name], answers=[["u1", "u2"]]))
            feedback = FeedbackEvent(
                request=name, text=0, label="u1", label_text="one", event="click"
            )
            log.add_feedback(feedback).result()


def read_events(path: Path) -> str:
    """Exports an event log."""
    out = path.with_name(f"{path.name}-exported")
    try:
        exported = export_events(path, "m", out)
        files = sorted(out.glob("*.jsonl"))
        return _fingerprint([exported, *(file.read_text() for file in files)])
    finally:
        shutil.rmtree(out, ignore_errors=True)


def write_answers(path: Path) -> None:
    """Predictions of 6 queries."""
    path.mkdir()
    ids = np.arange(18).reshape(6, 3)
    scores = np.linspace(1, -1, 18, dtype=np.float32).reshape(6, 3)
    write_predictions(path / "answers.npz", [TopLabels(ids, scores)], num_labels=18)


def read_answers(path: Path) -> str:
    """Reads predictions as an evaluation does."""
    matrix = read_predictions(path / "answers.npz", 6, 18)
    top = predictions_to_top_labels(matrix, np.arange(6), 3)
    return _fingerprint([top.ids.tolist(), top.scores.tolist()])


def _fingerprint(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# --- Changes of bytes ---


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 20))):
        place = draw.randrange(len(data))
        changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.choice((0, 1, len(data) - 1, draw.randrange(len(data))))]


def _extend(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.choice((1, 8, 4096)))


def _overwrite(data: bytes, draw: random.Random) -> bytes:
    """A block of zeros, of ones or of noise."""
    width = min(len(data), draw.choice((1, 4, 8, 64)))
    start = draw.randrange(len(data) - width + 1)
    block = draw.choice((bytes(width), b"\xff" * width, draw.randbytes(width)))
    return data[:start] + block + data[start + width :]


def _huge(data: bytes, draw: random.Random) -> bytes:
    """A number of four or eight bytes becomes very large or negative, at the start more often."""
    width = draw.choice((4, 8))
    if len(data) < width:
        return data * 2
    limit = draw.choice((min(len(data), 256), len(data)))
    start = draw.randrange(max(1, limit - width + 1))
    number = draw.choice(HUGE[:-1]) % (1 << 8 * width)
    return data[:start] + number.to_bytes(width, "little") + data[start + width :]


BYTES: tuple[Change, ...] = (_flip, _truncate, _extend, _overwrite, _huge)

# --- Changes of JSON ---

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**40, 2**63, 10**30, 0.5, float("inf"), float("nan"), "", "x", "\u0000", "\ud800", "..",
    "/etc/passwd", [], {}, [[]], {"a": {}}, "1" * 5000,
)  # fmt: skip


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Container and key of every value in a document."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def change_document(document: Any, draw: random.Random) -> None:
    """Deletes, replaces, renames or repeats one value of a JSON document."""
    places = list(_places(document))
    if not places:
        return
    container, key = draw.choice(places)
    way = draw.choice(("delete", "value", "value", "value", "swap", "rename"))
    if way == "delete":
        del container[key]
    elif way == "value":
        # A copy, because the next change may be inside of it.
        container[key] = copy.deepcopy(draw.choice(VALUES))
    elif way == "swap":
        other, other_key = draw.choice(places)
        with contextlib.suppress(KeyError, IndexError, TypeError):
            container[key] = json.loads(json.dumps(other[other_key]))
    elif isinstance(container, dict):
        container[f"{key}_"] = container.pop(key)
    else:
        container.append(container[key])


def _json(data: bytes, draw: random.Random) -> bytes:
    whole = draw.choice((*["change"] * 12, b"[" * 200_000, b"null", b"[]", b'{"a":1e999}'))
    if isinstance(whole, bytes):
        return whole
    document = json.loads(data)
    for _ in range(draw.choice((1, 1, 2))):
        change_document(document, draw)
    return json.dumps(document).encode()


def _json_lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines()
    place = draw.randrange(len(lines))
    lines[place] = _json(lines[place], draw)
    return b"\n".join(lines)


def _yaml(data: bytes, draw: random.Random) -> bytes:
    import yaml

    if not draw.randrange(6):
        return draw.choice((b"!!python/object/apply:os.system [id]", b"[]", b"1", b"a: &a [*a]"))
    document = yaml.safe_load(data)
    change_document(document, draw)
    with contextlib.suppress(ValueError, UnicodeError):
        return str(yaml.safe_dump(document)).encode()
    return b"{}"


# --- Changes of arrays and tables ---


class _Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (open, (os.environ[MARKER], "w"))


def _npy_bytes(array: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=True)
    return sink.getvalue()


def _npy(data: bytes, draw: random.Random) -> bytes:
    array = np.load(io.BytesIO(data))
    way = draw.choice(("dtype", "value", "shape", "header", "pickle", "npz", "length"))
    if way == "dtype":
        kinds = ("<f4", "<f8", "<i2", ">i8", "<u8", "?", "<U3", "<M8[s]", "<c8", "<i4", "<f2")
        with np.errstate(all="ignore"):
            return _npy_bytes(array.astype(draw.choice(kinds)))
    if way == "value" and array.size:
        if array.dtype.kind == "f":
            values = [np.nan, np.inf, -1.0, 1e30, 0.0]
        else:
            info = np.iinfo(array.dtype)
            values = [info.min, info.max, info.max // 2, 0, len(array)]
        place = draw.randrange(array.size)
        array.flat[place] = draw.choice(values)
        return _npy_bytes(array)
    if way == "length":
        return _npy_bytes(draw.choice((array[:-1], array[:0], np.concatenate([array, array]))))
    if way == "shape":
        shapes = (array[None], array.ravel(), array[..., None], np.asfortranarray(array[:, None]))
        return _npy_bytes(draw.choice((*shapes, array.sum())))
    if way == "pickle":
        return _npy_bytes(np.array([_Bomb()] * 3, object))
    if way == "npz":
        sink = io.BytesIO()
        np.savez(sink, a=array)
        return sink.getvalue()
    shape = draw.choice(("(1125899906842624,)", "(-1,)", "(2,", "(1e9,)", "()", "((1,),)", "None"))
    kind = draw.choice(("'<i8'", "'|O'", "'|V9'", "None", "[('a', '<i4')]", "'<i4'", "'|S0'"))
    header = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    raw = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    return raw + array.tobytes()


def _npz(data: bytes, draw: random.Random) -> bytes:
    """Changes one of the arrays of a sparse matrix."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(("data.npy", "indices.npy", "indptr.npy", "shape.npy"))
    members[name] = _npy(members[name], draw)
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for member, body in members.items():
            archive.writestr(member, body)
    return sink.getvalue()


def _safetensors(data: bytes, draw: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = bytearray(data[8 + length :])
    if not draw.randrange(4) and len(body) >= 4:
        # Not a number, or infinity.
        start = draw.randrange(len(body) // 4) * 4
        body[start : start + 4] = draw.choice(
            (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff" * 4)
        )
    else:
        names = [name for name in header if name != "__metadata__"]
        entry = header[draw.choice(names)]
        way = draw.choice(("dtype", "shape", "reshape", "any"))
        if way == "dtype":
            entry["dtype"] = draw.choice(
                ("F16", "BF16", "I32", "F64", "I64", "U8", "F8_E4M3", "C64")
            )
        elif way == "shape":
            entry["shape"] = [draw.choice(HUGE), *entry["shape"][1:]]
        elif way == "reshape":
            entry["shape"] = draw.choice((entry["shape"][::-1], [1, *entry["shape"]], []))
        else:
            change_document(header, draw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


def _parquet(data: bytes, draw: random.Random) -> bytes:
    table = pq.read_table(io.BytesIO(data))
    name = draw.choice(table.column_names)
    at = table.column_names.index(name)
    length = len(table)
    way = draw.choice(("nulls", "type", "drop", "rows", "rename", "twice", "order"))
    with contextlib.suppress(pa.ArrowException):
        if way == "nulls":
            column = pa.array([None] * length, table.schema.field(at).type)
            table = table.set_column(at, name, column)
        elif way == "type":
            numbers = pa.array(range(length))
            columns = (
                numbers,
                pa.array([b"\xff\xfe"] * length),
                pa.array([[1]] * length),
                pa.array([{"a": 1}] * length),
                pa.array(["x"] * length).dictionary_encode(),
                pa.array([str(number) for number in range(length)], pa.string()),
                pa.nulls(length),
            )
            table = table.set_column(at, name, draw.choice(columns))
        elif way == "drop":
            table = table.drop_columns([name])
        elif way == "rows":
            table = draw.choice((table.slice(0, length - 1), pa.concat_tables([table] * 2)))
        elif way == "rename":
            names = [draw.choice(("x", other)) for other in table.column_names]
            table = table.rename_columns(names)
        elif way == "twice":
            table = table.append_column(name, table[name])
        else:
            table = table.take(pa.array(np.arange(length)[::-1]))
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=draw.choice((1 << 20, max(1, length // 3))))
    return sink.getvalue()


OF_SUFFIX: dict[str, tuple[Change, ...]] = {
    ".json": (_json,),
    ".jsonl": (_json_lines,),
    ".yaml": (_yaml,),
    ".npy": (_npy,),
    ".npz": (_npz,),
    ".safetensors": (_safetensors,),
    ".parquet": (_parquet,),
    ".faiss": (_huge,),
}


# --- One trial ---


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
        change = _extend
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
