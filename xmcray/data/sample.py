"""The embedded sample: related functions of Python, from installed documentation.

A documented object of numpy, scipy or pandas is a query: its name and the description at the start
of its docstring. The objects that its "See Also" section lists are its labels; that section is
never part of a text. A label's text is its dotted name and the first sentence of its docstring. A
query that is itself a label is a filter pair: it is no answer to itself. The split is by a hash of
the name. Nothing is downloaded, and the same installed versions give the same files. With numpy
2.4, scipy 1.17 and pandas 3.1 there are 2,391 training queries, 574 test queries and 2,200 labels;
90 % of the labels have at most 5 training queries.
"""

from __future__ import annotations

import contextlib
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
MAX_DESCRIPTION = 600  # characters
# Modules that are private, or of no interest to a user of the package.
_HIDDEN = re.compile(r"(^|\.)(_|tests?$|testing$|conftest|setup|core$|f2py|distutils|io\.)")
# A heading of a docstring: a line that is underlined.
_SECTION = re.compile(r"^(?P<title>[A-Z][A-Za-z ]+)\n[-=]{3,}[ ]*$", re.MULTILINE)
# An entry of a See Also section: names, separated by commas, and perhaps " : description".
_ENTRY = re.compile(r"^(?P<names>[:`~\w.]+(?:[ ]*,[ ]*[:`~\w.]+)*)[ ]*,?[ ]*(?::(?:[ ]|$)|$)")
# A role such as :func:`numpy.sum`, a literal, or a directive. The groups are what a reader sees.
_MARKUP = re.compile(
    r":\w+:`~?([^`<]*)(?:<[^>]*>)?`"
    r"|`{1,2}([^`]*)`{1,2}"
    r"|^\.\. \w+::.*$",
    re.MULTILINE,
)
# Ufuncs and compiled functions have their signature in the docstring.
_SIGNATURE = re.compile(r"^(?:[\w.]+\(.*\)(?: ->.*)?\n+)+")
_SENTENCE = re.compile(r"(?<=[a-z)\]][.!?])\s")
_ABBREVIATIONS = {"np": "numpy", "sp": "scipy", "pd": "pandas"}


@dataclass(frozen=True, slots=True)
class Documented:
    """A public object with a docstring.

    Attributes:
        name: dotted name, the shortest of all.
        description: start of the docstring without markup.
        see_also: names in its See Also section, as written there.
    """

    name: str
    description: str
    see_also: tuple[str, ...]

    @classmethod
    def parse(cls, name: str, docstring: str) -> Documented:
        """An object by its name and docstring."""
        return cls(name, _description(docstring), _see_also(docstring))

    @property
    def sentence(self) -> str:
        """The first sentence of the description."""
        return _SENTENCE.split(self.description, 1)[0]

    @property
    def words(self) -> str:
        """The dotted name as words, as a reader would type it."""
        return re.sub(r"[._]+", " ", self.name)


def write_sample(folder: Path) -> None:
    """Writes train.jsonl, test.jsonl, labels.jsonl and the filter files of the sample.

    Raises:
        OSError: the folder cannot be written.
    """
    objects, aliases = collect()
    related: dict[str, list[str]] = {}
    splits: dict[str, list[Documented]] = {"train": [], "test": []}
    for name, item in sorted(objects.items()):
        related[name] = _resolve(item, objects, aliases)
        split = "test" if _is_test(name) else "train"
        splits[split].append(item)
    # Labels that only the test split has are left out.
    labels: set[str] = set()
    for item in splits["train"]:
        labels.update(related[item.name])
    label_ids: dict[str, int] = {}
    label_rows = []
    for label in sorted(labels):
        label_ids[label] = len(label_ids)
        text = f"{label} {objects[label].sentence}"
        label_rows.append({"uid": label, "text": text})
    folder.mkdir(parents=True, exist_ok=True)
    _write_json_lines(folder / "labels.jsonl", label_rows)
    for split, items in splits.items():
        _write_queries(folder, split, items, related, label_ids)


def _write_queries(
    folder: Path,
    split: str,
    items: list[Documented],
    related: dict[str, list[str]],
    label_ids: dict[str, int],
) -> None:
    """Writes the queries of a split, and the queries that are labels themselves."""
    rows: list[dict[str, object]] = []
    filter_lines = []
    for item in items:
        positives = [label_ids[label] for label in related[item.name] if label in label_ids]
        if not positives:
            continue
        if item.name in label_ids:
            filter_lines.append(f"{len(rows)} {label_ids[item.name]}\n")
        text = f"{item.words}. {item.description}"
        rows.append({"uid": item.name, "text": text, "labels": positives})
    _write_json_lines(folder / f"{split}.jsonl", rows)
    filter_file = folder / f"filter_labels_{split}.txt"
    filter_file.write_text("".join(filter_lines), encoding="utf-8")


def _is_test(name: str) -> bool:
    """Whether an object belongs to the test split, by a hash of its name.

    The choice depends on the name alone, so a new object does not change the split of another one.
    """
    digest = hashlib.sha256(f"xmcray-sample:{name}".encode()).digest()
    # Eight bytes are an integer below 2^64. Divided by 2^64, it is a number from 0 to 1.
    point = int.from_bytes(digest[:8], "big") / 2**64
    return point < TEST_SHARE


def _write_json_lines(path: Path, rows: Iterable[object]) -> None:
    """Writes each row as JSON, a line each."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False)
            file.write(line + "\n")


def collect() -> tuple[dict[str, Documented], dict[str, str]]:
    """Finds the documented public objects of all packages.

    Returns:
        The objects by name, and for each path that leads to one the object's name.
    """
    objects: dict[str, Documented] = {}
    aliases: dict[str, str] = {}
    name_of: dict[tuple[str, str], str] = {}
    for path, item in sorted(_public_objects(), key=_preference):
        docstring = inspect.getdoc(item)
        if path in aliases or not docstring:
            continue
        # If docstring and place of definition are equal, several paths lead to the same object. Paths are
        # sorted by preference, so the first one becomes its name.
        identity = (docstring, _qualname(item) or path)
        name = name_of.setdefault(identity, path)
        aliases[path] = name
        if name == path:
            objects[name] = Documented.parse(name, docstring)
    # The description is empty if a docstring consists of sections alone.
    described = {name: item for name, item in objects.items() if item.description}
    return described, aliases


def _preference(entry: tuple[str, object]) -> tuple[int, bool, int, str]:
    """Sort key of paths: fewest parts first, then the class that defines a method, then the shortest."""
    path, item = entry
    is_inherited = not path.endswith(f".{_qualname(item)}")
    # The path itself comes last, so that the order is always the same.
    return path.count("."), is_inherited, len(path), path


def _qualname(item: object) -> str:
    """Where an object was defined within its module; for a property, where its getter was."""
    for wrapped in ("fget", "__func__", "func"):
        item = getattr(item, wrapped, item)
    return str(getattr(item, "__qualname__", ""))


def _public_objects() -> Iterator[tuple[str, object]]:
    """Functions and classes that the modules offer, and the public members of those classes."""
    for module in _public_modules():
        for name in getattr(module, "__all__", None) or dir(module):
            item = getattr(module, name, None)
            if name.startswith("_") or not callable(item):
                continue
            # A module also offers what it imports from other packages.
            home = getattr(item, "__module__", None) or module.__name__
            if not str(home).startswith(PACKAGES):
                continue
            path = f"{module.__name__}.{name}"
            yield path, item
            yield from _members(path, item)


def _members(path: str, item: object) -> Iterator[tuple[str, object]]:
    """Public methods and properties of a class, and those of its accessors."""
    if not inspect.isclass(item):
        return
    for name in dir(item):
        if name.startswith("_"):
            continue
        member_path = f"{path}.{name}"
        member = inspect.getattr_static(item, name)
        # Methods and properties are descriptors; a table of coefficients is not.
        if hasattr(member, "__get__"):
            yield member_path, member
        # An accessor such as pandas.Series.str is a class with members of its own.
        accessor = getattr(member, "_accessor", None)
        yield from _members(member_path, accessor)


def _public_modules() -> Iterator[ModuleType]:
    """Public modules; importing them prints nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in PACKAGES:
            for name in _module_names(package):
                if _HIDDEN.search(name):
                    continue
                with contextlib.suppress(ImportError):  # an optional dependency of one submodule
                    yield importlib.import_module(name)


def _module_names(package: str) -> Iterator[str]:
    """A package, its modules, and the packages inside its packages."""
    yield package
    root = importlib.import_module(package)
    for module in pkgutil.iter_modules(root.__path__):
        name = f"{package}.{module.name}"
        yield name
        if module.ispkg and not _HIDDEN.search(name):
            # The inner packages are listed from the files: importing every package is slow.
            folders = [f"{folder}/{module.name}" for folder in root.__path__]
            for inner in pkgutil.iter_modules(folders, f"{name}."):
                if inner.ispkg:
                    yield inner.name


def _description(docstring: str) -> str:
    """The first three paragraphs before the first section, without signature and markup."""
    head = _SECTION.split(docstring, 1)[0].strip()
    paragraphs = _SIGNATURE.sub("", head).split("\n\n")
    text = "\n\n".join(paragraphs[:3])
    # Line breaks become spaces.
    words = _plain(text).split()
    return " ".join(words)[:MAX_DESCRIPTION]


def _see_also(docstring: str) -> tuple[str, ...]:
    """The names in the See Also section, each once, in their order."""
    # `split` returns the text before the first section, then title and body of each section.
    _, *parts = _SECTION.split(docstring)
    titles = parts[::2]
    bodies = parts[1::2]
    sections = dict(zip(titles, bodies, strict=True))
    # A dictionary keeps the order of its keys and drops repeated ones.
    names: dict[str, None] = {}
    for line in sections.get("See Also", "").splitlines():
        entry = _ENTRY.match(line)
        if entry is None:
            continue
        for written_name in entry["names"].split(","):
            name = _plain(written_name).strip(" :")
            if name:
                names[name] = None
    return tuple(names)


def _plain(text: str) -> str:
    """`text` without reStructuredText markup: what a reader of the rendered page sees."""
    return _MARKUP.sub(lambda match: match[1] or match[2] or "", text)


def _resolve(
    item: Documented,
    objects: dict[str, Documented],
    aliases: dict[str, str],
) -> list[str]:
    """Names of the objects that the See Also section means, sorted.

    A name is tried as it is written, then relative to the object's class and modules, the innermost
    first.
    """
    # Prefixes: none, then "numpy.linalg." and "numpy." for the object numpy.linalg.norm.
    prefixes = [""]
    scope = item.name
    while "." in scope:
        scope, _, _ = scope.rpartition(".")
        prefixes.append(f"{scope}.")
    related = set()
    for written_name in item.see_also:
        package, dot, rest = written_name.partition(".")
        package = _ABBREVIATIONS.get(package, package)
        for prefix in prefixes:
            target = aliases.get(f"{prefix}{package}{dot}{rest}")
            if target in objects and target != item.name:
                related.add(target)
                break
    return sorted(related)
