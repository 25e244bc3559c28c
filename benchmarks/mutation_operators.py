"""One-line mutations of Python source: named by text in a chosen list, or drawn by operators on the syntax tree."""

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
# Messages and checks of settings are no computation.
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


@dataclass(frozen=True)
class Edit:
    """A mistake within a line.

    Attributes:
        start: first column that is replaced.
        stop: the column after the last one.
        text: what is written there instead.
        meaning: what a reader would call the mistake.
    """

    start: int
    stop: int
    text: str
    meaning: str

    def apply(self, line: str) -> str:
        """The changed line."""
        return line[: self.start] + self.text + line[self.stop :]


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
    is_unique = len(numbers) == 1 and lines[numbers[0] - 1].count(find) == 1
    if not is_unique:
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
        for edit in _edits(node, lines):
            before = lines[node.lineno - 1]
            after = edit.apply(before)
            mutation = Mutation(file, node.lineno, before, after, edit.meaning, chosen=False)
            candidates.append(mutation)
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


def _edits(node: ast.AST, lines: list[str]) -> Iterator[Edit]:
    """Mistakes at a node that lies within one line."""
    if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno:
        return
    # The tree counts bytes, and the lines are text.
    line = lines[node.lineno - 1]
    if not line.isascii():
        return
    if isinstance(node, ast.Compare):
        yield from _comparison(node, line)
    elif isinstance(node, ast.BinOp):
        yield from _arithmetic(node, line)
    elif isinstance(node, ast.BoolOp):
        yield _conjunction(node, line)
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            yield Edit(node.col_offset, node.operand.col_offset, "", "negation dropped")
    elif isinstance(node, ast.Constant):
        yield from _constant(node)
    elif isinstance(node, ast.Call):
        yield from _call(node, line)
    elif _is_dropped_statement(node):
        yield Edit(node.col_offset, _stop(node), "pass", "statement dropped")


def _is_dropped_statement(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign)


def _comparison(node: ast.Compare, line: str) -> Iterator[Edit]:
    left = node.left
    for operator, right in zip(node.ops, node.comparators, strict=True):
        sign, other = _COMPARISONS[type(operator)]
        start = line.find(sign, _stop(left))
        if 0 <= start < right.col_offset:
            yield _replaced(start, sign, other)
        left = right


def _arithmetic(node: ast.BinOp, line: str) -> Iterator[Edit]:
    if type(node.op) not in _ARITHMETIC or _is_text(node.left) or _is_text(node.right):
        return
    if isinstance(node.op, ast.Div):
        # A path is joined by the same sign.
        term = _text(node, line)
        if "path" in term or "folder" in term:
            return
    sign, other = _ARITHMETIC[type(node.op)]
    start = line.find(sign, _stop(node.left))
    if 0 <= start < node.right.col_offset:
        yield _replaced(start, sign, other)
    if isinstance(node.op, _TERMS):
        dropped = f"{sign} {_text(node.right, line)}"
        yield Edit(_stop(node.left), _stop(node), "", f"`{dropped}` dropped")


def _conjunction(node: ast.BoolOp, line: str) -> Edit:
    word = "and"
    other = "or"
    if isinstance(node.op, ast.Or):
        word = "or"
        other = "and"
    start = line.index(word, _stop(node.values[0]))
    return _replaced(start, word, other)


def _constant(node: ast.Constant) -> Iterator[Edit]:
    value = node.value
    if isinstance(value, bool):
        other = repr(not value)
    elif isinstance(value, int):
        other = str(value + 1)
    elif isinstance(value, float):
        other = repr(2 * value if value else 1.0)
    else:
        return
    yield Edit(node.col_offset, _stop(node), other, f"`{value!r}` becomes `{other}`")


def _call(node: ast.Call, line: str) -> Iterator[Edit]:
    name = _called(node)
    if name in _EXTREMES:
        start = _stop(node.func) - len(name)
        yield _replaced(start, name, _EXTREMES[name])
    if name in _DROPPED_CALLS:
        value = _value(node)
        if value is not None:
            yield Edit(node.col_offset, _stop(node), _text(value, line), f"`{name}` dropped")
    if len(node.args) > 1:
        first, second = node.args[:2]
        if _kind(first) == _kind(second) != "":
            swapped = f"{_text(second, line)}, {_text(first, line)}"
            meaning = f"arguments of `{name}` swapped"
            yield Edit(first.col_offset, _stop(second), swapped, meaning)
    if node.keywords and node.args:
        last = node.keywords[-1]
        # Without `device` nothing changes on a CPU.
        if last.arg != "device":
            previous = node.keywords[-2].value if len(node.keywords) > 1 else node.args[-1]
            yield Edit(_stop(previous), _stop(last.value), "", f"`{_text(last, line)}` dropped")


def _value(node: ast.Call) -> ast.expr | None:
    """What a call such as `sort(x)` or `x.sort()` changes."""
    if node.args:
        return node.args[0]
    return node.func.value if isinstance(node.func, ast.Attribute) else None


def _replaced(start: int, word: str, other: str) -> Edit:
    return Edit(start, start + len(word), other, f"`{word}` becomes `{other}`")


def _stop(node: ast.expr | ast.stmt) -> int:
    """The column after a node."""
    assert node.end_col_offset is not None
    return node.end_col_offset


def _text(node: ast.expr | ast.keyword, line: str) -> str:
    """A node as it is written."""
    return line[node.col_offset : node.end_col_offset]


def _called(node: ast.Call) -> str:
    """The last name of what is called."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    if isinstance(node.func, ast.Name):
        return node.func.id
    return ""


def _kind(node: ast.expr) -> str:
    """The axes of an array, or "number": arguments of different kinds are not confused."""
    if not isinstance(node, ast.Name):
        return ""
    suffix = node.id.rpartition("_")[2]
    return suffix if suffix.isupper() else "number"


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.JoinedStr)


def _is_other_program(source: str, mutation: Mutation) -> bool:
    """Whether the changed file is Python, and not the same tree as before."""
    try:
        changed = ast.parse(mutation.apply(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def _rank(seed: int, *key: str) -> bytes:
    """Where a mutation stands in the random order of a seed."""
    text = "\0".join([str(seed), *key])
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
