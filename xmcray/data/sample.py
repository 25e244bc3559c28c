"""The embedded sample: which functions are worth a look beside this one, learned from documentation that is installed.

A documented object of numpy, scipy or pandas is a query: its name and the description at the start of its docstring.
The objects its "See Also" section lists are its labels; that section is never part of a text. A label's text is its
dotted name and the first sentence of its docstring. A query that is itself a label is a filter pair: it is no answer
to itself. The split is by a hash of the name. Nothing is downloaded, and the same installed versions give the same
files. Real and useful: it recommends functions of scientific Python for a description. With numpy 2.4, scipy 1.17 and
pandas 3.1: 2,391 training queries, 574 test queries, 2,200 labels, 90 % of them with at most 5 training queries.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import pkgutil
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

PACKAGES = ("numpy", "scipy", "pandas")
TEST_SHARE = 0.205
_HIDDEN = re.compile(r"(^|\.)(_|tests?$|testing$|conftest|setup|core$|f2py|distutils|io\.)")
_SECTION = re.compile(r"^(?P<title>[A-Z][A-Za-z ]+)\n[-=]{3,}[ ]*$", re.MULTILINE)
_ENTRY = re.compile(r"^(?P<names>[:`~\w.]+(?:[ ]*,[ ]*[:`~\w.]+)*)[ ]*,?[ ]*(?::(?:[ ]|$)|$)")
_MARKUP = re.compile(
    r":\w+:`~?([^`<]*)(?:<[^>]*>)?`|`{1,2}([^`]*)`{1,2}|^\.\. \w+::.*$", re.MULTILINE
)
_SIGNATURE = re.compile(r"^(?:[\w.]+\(.*\)(?: ->.*)?\n+)+")  # as ufuncs and compiled functions have
_SENTENCE = re.compile(r"(?<=[a-z)\]][.!?])\s")


@dataclass(frozen=True, slots=True)
class Documented:
    """A public object with a docstring. `scopes` are the dotted prefixes in which its See Also names are looked up."""

    name: str
    description: str
    see_also: tuple[str, ...]
    scopes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The first sentence of the description."""
        return _SENTENCE.split(self.description, 1)[0]

    @property
    def words(self) -> str:
        """The dotted name as words: what a reader would type of it."""
        return re.sub(r"[._]+", " ", self.name)


def write_sample(folder: Path) -> None:
    """Writes train.jsonl, test.jsonl, labels.jsonl and the filter files of the sample into `folder`.

    Raises:
        OSError: the folder cannot be written.
    """
    objects, aliases = collect()
    positives = {name: _resolve(item, objects, aliases) for name, item in objects.items()}
    test = {name for name in objects if _is_test(name)}
    labels = sorted(
        {label for name, found in positives.items() if name not in test for label in found}
    )
    label_ids = {name: row for row, name in enumerate(labels)}
    folder.mkdir(parents=True, exist_ok=True)
    _write(
        folder / "labels.jsonl", ({"uid": n, "text": f"{n} {objects[n].sentence}"} for n in labels)
    )
    for split, chosen in (("train", objects.keys() - test), ("test", test)):
        kept = [
            (n, ids)
            for n in sorted(chosen)
            if (ids := [label_ids[p] for p in positives[n] if p in label_ids])
        ]
        rows = (
            {"uid": n, "text": f"{objects[n].words}. {objects[n].description}", "labels": ids}
            for n, ids in kept
        )
        _write(folder / f"{split}.jsonl", rows)
        pairs = [f"{row} {label_ids[n]}\n" for row, (n, _) in enumerate(kept) if n in label_ids]
        (folder / f"filter_labels_{split}.txt").write_text("".join(pairs), encoding="utf-8")


def collect() -> tuple[dict[str, Documented], dict[str, str]]:
    """All documented public objects by name, and every dotted name under which one can be reached -> that name."""
    objects: dict[str, Documented] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for path, item in sorted(_public(), key=lambda entry: _preference(*entry)):
        if path not in aliases and (doc := inspect.getdoc(item)):
            name = first.setdefault(
                (doc, _qualname(item) or path), path
            )  # one object behind many names
            aliases[path] = name
            if name == path:
                objects[name] = Documented(name, *_parse(doc), _scopes(path))
    return {name: item for name, item in objects.items() if item.description}, aliases


def _qualname(item: object) -> str:
    """Where the object was defined within its module; of a property its getter's."""
    for inner in ("fget", "__func__", "func"):
        item = getattr(item, inner, item)
    return str(getattr(item, "__qualname__", ""))


def _preference(path: str, item: object) -> tuple[int, bool, int, str]:
    """Fewest parts first, then the class that defines a method, then the shortest name, then the alphabet."""
    return path.count("."), not path.endswith(f".{_qualname(item)}"), len(path), path


def _modules() -> Iterator[ModuleType]:
    """Public modules, short names first so that an object gets its shortest name; importing them prints nothing."""
    names = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in PACKAGES:
            names.append(package)
            root = importlib.import_module(package)
            for info in pkgutil.iter_modules(root.__path__, f"{package}."):
                names.append(info.name)
                if info.ispkg and not _HIDDEN.search(info.name):
                    path = [f"{p}/{info.name.rsplit('.', 1)[1]}" for p in root.__path__]
                    names += [
                        sub.name for sub in pkgutil.iter_modules(path, f"{info.name}.") if sub.ispkg
                    ]
        for name in sorted(
            (n for n in names if not _HIDDEN.search(n)), key=lambda n: (n.count("."), n)
        ):
            try:
                module = importlib.import_module(name)
            except ImportError:  # an optional dependency of one submodule
                continue
            yield module


def _public() -> Iterator[tuple[str, object]]:
    """Functions and classes the modules offer, and the public methods of those classes."""
    for module in _modules():
        for name in getattr(module, "__all__", None) or dir(module):
            item = getattr(module, name, None)
            home = getattr(item, "__module__", None) or module.__name__
            if name.startswith("_") or not callable(item) or not str(home).startswith(PACKAGES):
                continue
            path = f"{module.__name__}.{name}"
            yield path, item
            yield from _members(path, item)


def _members(path: str, item: object) -> Iterator[tuple[str, object]]:
    for name in dir(item) if inspect.isclass(item) else ():
        if not name.startswith("_"):
            member = inspect.getattr_static(item, name)
            if hasattr(member, "__get__"):  # methods and properties, not a table of coefficients
                yield f"{path}.{name}", member
            yield from _members(
                f"{path}.{name}", getattr(member, "_accessor", None)
            )  # pandas.Series.str


def _parse(doc: str) -> tuple[str, tuple[str, ...]]:
    """Description before the first section, and the names in the See Also section."""
    sections = list(_SECTION.finditer(doc))
    head = doc[: sections[0].start()] if sections else doc
    names: list[str] = []
    for number, section in enumerate(sections):
        if section["title"] == "See Also":
            stop = sections[number + 1].start() if number + 1 < len(sections) else len(doc)
            for line in doc[section.end() : stop].splitlines():
                if entry := _ENTRY.match(line):
                    names += [_plain(name).strip(" :") for name in entry["names"].split(",")]
    head = _SIGNATURE.sub("", head.strip())
    paragraphs = [" ".join(_plain(part).split()) for part in head.split("\n\n")]
    return " ".join(p for p in paragraphs[:3] if p)[:600], tuple(
        dict.fromkeys(n for n in names if n)
    )


def _plain(text: str) -> str:
    return _MARKUP.sub(lambda m: m[1] or m[2] or "", text)


def _scopes(path: str) -> tuple[str, ...]:
    parts = path.split(".")
    return tuple(".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))


def _resolve(
    item: Documented, objects: dict[str, Documented], aliases: dict[str, str]
) -> list[str]:
    """Names of the objects the See Also section means: as written, or seen from the object's class and modules."""
    found = []
    for name in item.see_also:
        full = re.sub(
            r"^(np|sp|pd)\.",
            lambda m: {"np": "numpy.", "sp": "scipy.", "pd": "pandas."}[m[1]],
            name,
        )
        for candidate in (full, *(f"{scope}.{full}" for scope in item.scopes)):
            target = aliases.get(candidate)
            if target in objects and target != item.name:
                found.append(str(target))
                break
    return sorted(set(found))


def _is_test(name: str) -> bool:
    digest = hashlib.sha256(f"xmcray-sample:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < TEST_SHARE


def _write(path: Path, rows: Iterable[object]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
