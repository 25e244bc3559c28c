"""Who may import whom. The folders of the library form a line, and arrows between them never turn back."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUND = {"types", "errors", "config", "storage", "draws", "gauges", "logs", "credentials"}
MAY_IMPORT: dict[str, set[str]] = {
    **{module: set() for module in GROUND},
    "data": {"parallel.partition"},
    "evaluation": set(),
    "parallel": set(),
    "nn": {"parallel"},
    "losses": {"parallel"},
    "retrieval": {"parallel", "nn", "losses", "data"},
    "negatives": {"parallel", "nn", "losses", "data", "retrieval"},
    "methods": {"parallel", "nn", "losses", "data", "retrieval", "negatives", "evaluation.metrics"},
    "serving": {"nn", "retrieval", "data.session"},
    "training": {
        "parallel",
        "nn",
        "losses",
        "data",
        "retrieval",
        "negatives",
        "methods",
        "evaluation",
    },
    "tuning": {"nn", "data", "retrieval", "evaluation", "training"},
    "doctor": set(),
    "cluster_files": set(),
    "planning": {"nn", "losses", "data", "retrieval", "negatives", "training"},
}
WITH_RAY = {
    "data.pipeline",
    "data.session",
    "data.stream",
    "negatives.pool",
    "serving.application",
    "serving.run",
}
WITH_RAY |= {
    "training.worker",
    "training.launch",
    "training.placement",
    "training.rendezvous",
    "gauges",
}
WITH_RAY |= {"training.waiting", "tuning.search", "tuning.trial"}
WITH_RAY |= {"doctor.head", "cluster_files"}
FILES = sorted((ROOT / "xmcray").rglob("*.py"))


def module_of(path: Path) -> str:
    """Dotted name below xmcray: "nn.encoder"; a package is named after its folder, xmcray itself is "" ."""
    return (
        ".".join(path.relative_to(ROOT / "xmcray").with_suffix("").parts)
        .removesuffix("__init__")
        .rstrip(".")
    )


def library_modules() -> list[str]:
    """Modules of the folders and files named above; the verbs of the command line stand on top of them."""
    return [name for name in map(module_of, FILES) if name.split(".")[0] in MAY_IMPORT]


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports, inside functions too; imports for type checkers alone do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node)


def breaks_the_line(module: str, imported: str) -> bool:
    package, name = module.split(".")[0], imported.removeprefix("xmcray.")
    target = name.split(".")[0]
    if not imported.startswith("xmcray.") or name == "__version__":
        return False
    if package in GROUND:
        return target not in GROUND
    allowed = MAY_IMPORT[package] | GROUND | {package}
    return not any(f"{name}.".startswith(f"{known}.") for known in allowed)


@pytest.mark.parametrize("module", library_modules())
def test_arrows_between_folders_never_turn_back(module: str) -> None:
    path = next(p for p in FILES if module_of(p) == module)
    found = list(imports(ast.parse(path.read_text(encoding="utf-8"))))
    wrong = [name for name in found if breaks_the_line(module, name)]
    assert not wrong, (
        f"{module} imports {wrong}; its folder may import {sorted(MAY_IMPORT[module.split('.')[0]])}"
    )
    with_ray = any(name.split(".")[0] == "ray" for name in found)
    assert not with_ray or module in WITH_RAY, f"{module} imports ray; only {sorted(WITH_RAY)} may"


def test_the_rule_sees_a_wrong_arrow() -> None:
    assert breaks_the_line("losses.bce", "xmcray.nn.encoder")
    assert breaks_the_line("data.corpus", "xmcray.parallel.collectives.gather_rows")
    assert breaks_the_line("nn.encoder", "xmcray.cli")
    assert breaks_the_line("types", "xmcray.parallel")
    assert not breaks_the_line("data.batches", "xmcray.parallel.partition.share")
    assert not breaks_the_line("training.loop", "xmcray.methods.base.METHODS")
    code = "if TYPE_CHECKING:\n    import a\ndef f():\n    from b import c\n"
    assert list(imports(ast.parse(code))) == ["b.c"]


def test_an_application_needs_serving_only() -> None:
    for path in (ROOT / "serve").rglob("*.py"):
        found = [
            name
            for name in imports(ast.parse(path.read_text(encoding="utf-8")))
            if name.startswith("xmcray.")
        ]
        wrong = [
            name for name in found if name.split(".")[1] not in GROUND | {"serving", "__version__"}
        ]
        assert not wrong, f"{path.name} imports {wrong}"


def test_everything_else_works_where_ray_is_missing() -> None:
    names = [f"xmcray.{name}" for name in library_modules() if name not in WITH_RAY]
    code = (
        "import importlib, sys\n"
        "sys.modules['ray'] = None\n"  # from now on `import ray`, and any of its modules, is an ImportError
        f"for name in {names}: importlib.import_module(name)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
