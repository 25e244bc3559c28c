"""One-line mutations of Python source: found by text for a chosen list, or drawn by operators on the syntax tree."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_TERMS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_EXTREMES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "amin": "amax",
    "amax": "amin",
    "clamp_min": "clamp_max",
}
_DROPPED_CALLS = ("abs", "detach", "sort", "sqrt", "unique")
# What users read or what refuses their mistakes is no computation.
_SKIPPED_FUNCTIONS = ("__post_init__",)
_SKIPPED_CALLS = ("check_range", "check_choices", "warning", "info", "debug")


@dataclass(frozen=True)
class Mutation:
    """A changed line.

    Attributes:
        file: path below the package.
        line: number of the line, from 1.
        before: the line.
        after: what it becomes.
        meaning: what a reader would call the mistake.
        chosen: it comes from the list, and not from the operators.
    """

    file: str
    line: int
    before: str
    after: str
    meaning: str
    chosen: bool

    @property
    def key(self) -> tuple[str, str, str]:
        """Names the mutation whatever its place in the file."""
        return self.file, self.before.strip(), self.after.strip()

    def apply(self, source: str) -> str:
        """The file with the changed line."""
        lines = source.splitlines(keepends=True)
        assert lines[self.line - 1].rstrip("\n") == self.before
        lines[self.line - 1] = self.after + "\n"
        return "".join(lines)


def chosen_mutation(
    source: str, file: str, find: str, replace: str, mistake: str, inside: str | None = None
) -> Mutation:
    """The mutation that replaces a text which occurs once in a file, or once in one of its functions.

    Args:
        source: text of the file.
        file: its path below the package.
        find: text within one line.
        replace: what it becomes.
        mistake: its name for readers.
        inside: qualified name of the function or class; None for the whole file.

    Raises:
        ValueError: the text does not occur exactly once, or the result is no Python.
    """
    lines = source.splitlines()
    first = 1
    last = len(lines)
    if inside is not None:
        first, last = _span(ast.parse(source), inside)
    numbers = [number for number in range(first, last + 1) if find in lines[number - 1]]
    if len(numbers) != 1 or lines[numbers[0] - 1].count(find) != 1:
        place = f"{file} ({inside})" if inside else file
        raise ValueError(f"{find!r} occurs in {len(numbers)} lines of {place}, expected 1")
    number = numbers[0]
    before = lines[number - 1]
    mutation = Mutation(file, number, before, before.replace(find, replace), mistake, chosen=True)
    if not _is_other_program(source, mutation):
        raise ValueError(f"{replace!r} instead of {find!r} in {file} is no other program")
    return mutation


def drawn_mutations(source: str, file: str, count: int, seed: int) -> list[Mutation]:
    """Draws mutations of a file by operators, at most one for each line, in the order of the lines.

    A mutation is drawn by the hash of its own text, so an edit elsewhere in the file leaves it in
    the draw.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    candidates = []
    for node in _computations(tree):
        for start, stop, text, meaning in _replacements(node, lines):
            before = lines[node.lineno - 1]
            after = before[:start] + text + before[stop:]
            candidates.append(Mutation(file, node.lineno, before, after, meaning, chosen=False))
    candidates.sort(key=lambda mutation: _rank(seed, *mutation.key))
    drawn: dict[int, Mutation] = {}
    for mutation in candidates:
        if len(drawn) == count:
            break
        if mutation.line not in drawn and _is_other_program(source, mutation):
            drawn[mutation.line] = mutation
    return sorted(drawn.values(), key=lambda mutation: mutation.line)


def count_statements(source: str) -> int:
    """Statements inside functions, which decides how many mutations a file gets."""
    return sum(isinstance(node, ast.stmt) for node in _computations(ast.parse(source)))


def _span(tree: ast.Module, name: str) -> tuple[int, int]:
    """First and last line of a function or class, named as in `Class.method`."""
    body: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = None
        for statement in body:
            if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == part:
                node = statement
                body = statement.body
        if node is None:
            raise ValueError(f"no function or class {name}")
    assert node is not None
    return node.lineno, node.end_lineno or node.lineno


def _computations(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes within the bodies of functions, without annotations, messages, checks and docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in _SKIPPED_FUNCTIONS:
            for statement in node.body:
                yield from _below(statement)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.FunctionDef | ast.ClassDef):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Call) and _called(node) in _SKIPPED_CALLS:
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _below(child)


def _replacements(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, str, str]]:
    """Mutations of a node within its line: first and last column, new text, meaning."""
    if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno:
        return
    # The tree counts bytes, and the lines are text.
    raw = lines[node.lineno - 1]
    if not raw.isascii():
        return
    if isinstance(node, ast.Compare):
        yield from _comparison(node, raw)
    elif isinstance(node, ast.BinOp):
        yield from _arithmetic(node, raw)
    elif isinstance(node, ast.BoolOp):
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        start = node.values[0].end_col_offset or 0
        place = raw.index(word, start)
        yield place, place + len(word), other, f"`{word}` becomes `{other}`"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node.col_offset, node.operand.col_offset, "", "negation dropped"
    elif isinstance(node, ast.Constant):
        yield from _constant(node)
    elif isinstance(node, ast.Call):
        yield from _call(node, raw)
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield node.col_offset, node.end_col_offset or 0, "pass", "statement dropped"


def _comparison(node: ast.Compare, raw: str) -> Iterator[tuple[int, int, str, str]]:
    left = node.left
    for operator, right in zip(node.ops, node.comparators, strict=True):
        text, other = _COMPARISONS[type(operator)]
        place = raw.find(text, left.end_col_offset or 0)
        if 0 <= place < right.col_offset:
            yield place, place + len(text), other, f"`{text}` becomes `{other}`"
        left = right


def _arithmetic(node: ast.BinOp, raw: str) -> Iterator[tuple[int, int, str, str]]:
    if type(node.op) not in _ARITHMETIC or _is_text(node.left) or _is_text(node.right):
        return
    written = raw[node.col_offset : node.end_col_offset]
    if isinstance(node.op, ast.Div) and ("path" in written or "folder" in written):
        return
    text, other = _ARITHMETIC[type(node.op)]
    place = raw.find(text, node.left.end_col_offset or 0)
    if 0 <= place < node.right.col_offset:
        yield place, place + len(text), other, f"`{text}` becomes `{other}`"
    if isinstance(node.op, _TERMS):
        term = raw[node.right.col_offset : node.right.end_col_offset]
        yield (
            node.left.end_col_offset or 0,
            node.end_col_offset or 0,
            "",
            f"`{text} {term}` dropped",
        )


def _constant(node: ast.Constant) -> Iterator[tuple[int, int, str, str]]:
    value = node.value
    if isinstance(value, bool):
        other = repr(not value)
    elif isinstance(value, int):
        other = str(value + 1)
    elif isinstance(value, float):
        other = repr(2 * value if value else 1.0)
    else:
        return
    yield node.col_offset, node.end_col_offset or 0, other, f"`{value!r}` becomes `{other}`"


def _call(node: ast.Call, raw: str) -> Iterator[tuple[int, int, str, str]]:
    name = _called(node)
    function_stop = node.func.end_col_offset or 0
    if name in _EXTREMES:
        other = _EXTREMES[name]
        yield function_stop - len(name), function_stop, other, f"`{name}` becomes `{other}`"
    if name in _DROPPED_CALLS:
        value: ast.expr | None = node.args[0] if node.args else None
        if value is None and isinstance(node.func, ast.Attribute):
            value = node.func.value
        if value is not None:
            kept = raw[value.col_offset : value.end_col_offset]
            yield node.col_offset, node.end_col_offset or 0, kept, f"`{name}` dropped"
    if len(node.args) > 1 and _kind(node.args[0]) == _kind(node.args[1]) != "":
        first, second = node.args[:2]
        first_text = raw[first.col_offset : first.end_col_offset]
        second_text = raw[second.col_offset : second.end_col_offset]
        swapped = f"{second_text}, {first_text}"
        meaning = f"arguments of `{name}` swapped"
        yield first.col_offset, second.end_col_offset or 0, swapped, meaning
    # Without `device` nothing changes on a CPU.
    if node.keywords and node.args and node.keywords[-1].arg != "device":
        last = node.keywords[-1]
        start = (
            node.keywords[-2].value if len(node.keywords) > 1 else node.args[-1]
        ).end_col_offset
        stop = last.value.end_col_offset or 0
        yield start or 0, stop, "", f"`{raw[last.col_offset : stop]}` dropped"


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _kind(node: ast.expr) -> str:
    """The axes of an array, or "number": arguments of different kinds are not confused."""
    if not isinstance(node, ast.Name):
        return ""
    suffix = node.id.rpartition("_")[2]
    return suffix if suffix.isupper() else "number"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_other_program(source: str, mutation: Mutation) -> bool:
    """Whether the changed file is Python, and not the same tree as before."""
    try:
        changed = ast.parse(mutation.apply(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def _rank(seed: int, *key: str) -> bytes:
    text = "\0".join([str(seed), *key])
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
