"""Which module may import which. The folders of the library form a line, and imports never point
backwards.

Every module of the package is checked. Only the public functions (api/) and the scripts in jobs/,
serve/ and tune/ stand on top of the library and may import all of it. The command line calls the public
functions, and imports what checks names and prints results.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOUNDATION = {
    "types",
    "errors",
    "config",
    "settings_files",
    "storage",
    "hub",
    "hub_licences",
    "draws",
    "host_memory",
    "permutations",
    "logs",
    "credentials",
    "terminal",
}
MAY_IMPORT: dict[str, set[str]] = {
    "": set(),
    **{module: set() for module in FOUNDATION},
    "ray_adapter": set(),
    "data": {"parallel.partition", "ray_adapter"},
    "evaluation": {"data.formats.matrices"},
    "parallel": set(),
    "nn": {"parallel"},
    "losses": {"parallel"},
    "retrieval": {"parallel", "nn", "losses", "data", "evaluation.pages"},
    "negatives": {"parallel", "nn", "losses", "data", "retrieval", "ray_adapter"},
    "methods": {"parallel", "nn", "losses", "data", "retrieval", "negatives", "evaluation.metrics"},
    "serving": {"nn", "retrieval", "ray_adapter"},
    "client": {"serving.schema"},
    "training": {
        "parallel",
        "nn",
        "losses",
        "data",
        "retrieval",
        "negatives",
        "methods",
        "evaluation",
        "ray_adapter",
    },
    "progress": {"training"},
    "paths": {"data", "training"},
    "prediction": {"data", "retrieval", "evaluation", "ray_adapter"},
    "tuning": {"nn", "data", "retrieval", "evaluation", "training", "ray_adapter"},
    "quickstart": {"data", "retrieval", "evaluation", "training", "progress", "ray_adapter"},
    "doctor": {"ray_adapter"},
    "cluster_files": {"ray_adapter"},
    "planning": {
        "parallel",
        "nn",
        "losses",
        "data",
        "retrieval",
        "negatives",
        "methods",
        "training",
    },
    "__main__": {"cli"},
    "cli": {
        "api",
        "methods.registry",
        "paths",
        "data.writer.statistics_table",
        "evaluation.evaluate.compare_several",
        "evaluation.table",
        "planning.tables",
        "tuning.report",
    },
}
ON_TOP = {"api"}
# What single modules of the command line do without a public function.
ONLY_IN_CLI = {
    "cli": {"training.preemption"},  # signals
    "cli.auto": {"training.part_weights.METRICS"},  # columns of its table
    "cli.bundles": {"retrieval.votes.changed_memory"},  # of a single search
    "cli.continual": {
        "cli",
        "data.corpus",
        "serving.event_export",
        "training.promotion",
        "training.run",
    },
    "cli.doctor": {"cluster_files", "doctor"},
    "cli.mcp": {"client.mcp_tool"},
    "cli.shipped": {"training.settings_schema"},
    "cli.training": {"quickstart"},
}

# Modules that import Ray's public interface themselves, because they are Ray code; all others use
# the adapter.
RAY_CODE = {
    "data.stream": "builds Ray Data pipelines and their watchdog",
    "tuning.search": "subclasses Ray Tune's searcher and stopper",
    "tuning.trial": "is a trainable of Ray Tune",
    "serving.application": "consists of Ray Serve deployments",
    "serving.run": "starts and ends Ray Serve",
}
# Folders and modules that have to work where Ray is not installed.
WITHOUT_RAY = (
    *FOUNDATION,
    "parallel",
    "nn",
    "losses",
    "retrieval",
    "methods",
    "evaluation",
    "planning",
    "client",
    "api",
    "paths",
    "cli",
    "cluster_files",
)
PRIVATE_PARTS = re.compile(
    r"ray\._private|ray\.[\w.]+\._(private|internal)|\b_raylet\b|node:__internal_head__"
    r"|from ray[\w.]* import _"
)


def name_of(path: Path) -> str:
    """Returns the dotted name below xmcray, such as "nn.encoder"; that of xmcray itself is ""."""
    parts = path.relative_to(ROOT / "xmcray").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


PATHS = {name_of(path): path for path in sorted((ROOT / "xmcray").rglob("*.py"))}


def imports(tree: ast.AST, inside_functions: bool = True) -> Iterator[str]:
    """Yields the full names that a module imports, except those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node, inside_functions)


@functools.cache
def imports_of(module: str, inside_functions: bool = True) -> list[str]:
    tree = ast.parse(PATHS[module].read_text(encoding="utf-8"))
    return list(imports(tree, inside_functions))


def points_backwards(module: str, imported: str) -> bool:
    if not imported.startswith("xmcray.") or imported == "xmcray.__version__":
        return False
    package = module.split(".")[0]
    if package in ON_TOP:
        return False
    target = imported.removeprefix("xmcray.")
    allowed = set(FOUNDATION)
    if package not in FOUNDATION:
        allowed |= MAY_IMPORT[package] | {package} | ONLY_IN_CLI.get(module, set())
    return not any(f"{target}.".startswith(f"{name}.") for name in allowed)


def imports_ray(module: str) -> bool:
    return any(name.split(".")[0] == "ray" for name in imports_of(module))


@functools.cache
def needs_ray() -> set[str]:
    """Returns the modules that cannot be imported without Ray: they import it, or a module that
    does.
    """
    needy = {"ray"}
    grows = True
    while grows:
        before = len(needy)
        for module in PATHS:
            for imported in imports_of(module, inside_functions=False):
                parts = imported.removeprefix("xmcray.").split(".")
                # Importing a.b.c imports a and a.b too; c may be a name in the module a.b.
                prefixes = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
                if prefixes & needy:
                    needy.add(module)
        grows = len(needy) > before
    return needy - {"ray"}


@pytest.mark.parametrize("module", PATHS)
def test_imports_never_point_backwards(module: str) -> None:
    package = module.split(".")[0]
    assert package in MAY_IMPORT or package in ON_TOP, (
        f"say in MAY_IMPORT what {package} may import"
    )
    wrong = [name for name in imports_of(module) if points_backwards(module, name)]
    assert not wrong, (
        f"{module} imports {wrong}, {package} may import {sorted(MAY_IMPORT[package])}"
    )


def test_ray_is_behind_its_adapter() -> None:
    modules = {module for module in PATHS if imports_ray(module)}
    outside = {module for module in modules if not module.startswith("ray_adapter.")}
    assert outside == RAY_CODE.keys()


def test_private_parts_of_ray_are_touched_in_one_file() -> None:
    touching = [
        module for module, path in PATHS.items() if PRIVATE_PARTS.search(path.read_text("utf-8"))
    ]
    assert touching == ["ray_adapter.private"]


@pytest.mark.parametrize(
    "line",
    [
        "from ray._private import state",
        "from ray.train.v2._internal.execution.callback import ControllerCallback",
        "from ray import _raylet",
        "from ray.autoscaler._private.util import prepare_config",
        'HEAD = "node:__internal_head__"',
        "ray._private.services.resolve_ip_for_localhost = None",
    ],
)
def test_a_private_part_is_recognised(line: str) -> None:
    assert PRIVATE_PARTS.search(line)


def test_the_rule_sees_a_wrong_import() -> None:
    assert points_backwards("losses.bce", "xmcray.nn.encoder")
    assert points_backwards("data.corpus", "xmcray.parallel.collectives.gather_rows")
    assert points_backwards("nn.encoder", "xmcray.cli")
    assert points_backwards("cli.bundles", "xmcray.training.fuse.fuse")
    assert points_backwards("types", "xmcray.parallel")
    assert points_backwards("types", "xmcray.ray_adapter.session")
    assert not points_backwards("data.batches", "xmcray.parallel.partition.share")
    assert not points_backwards("training.loop", "xmcray.methods.base.METHODS")
    code = "if TYPE_CHECKING:\n    import a\ndef f():\n    from b import c\n"
    assert list(imports(ast.parse(code))) == ["b.c"]
    assert list(imports(ast.parse(code), inside_functions=False)) == []


@pytest.mark.parametrize(
    ("folder", "allowed"), [("serve", {"serving"}), ("jobs", {"cli"}), ("tune", {"tuning", "cli"})]
)
def test_a_script_needs_its_layer_only(folder: str, allowed: set[str]) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if name.startswith("xmcray."):
                assert name.split(".")[1] in FOUNDATION | allowed | {"__version__"}, path


def test_the_library_works_where_ray_is_missing() -> None:
    needy = needs_ray()
    wrong = [module for module in needy if module.split(".")[0] in WITHOUT_RAY]
    assert not wrong, f"{wrong} import Ray when they are imported"
    names = [f"xmcray.{module}".rstrip(".") for module in PATHS if module not in needy]
    code = (
        "import importlib, sys\n"
        "sys.modules['ray'] = None\n"  # from now on `import ray`, and any of its modules, is an ImportError
        f"for name in {names}: importlib.import_module(name)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
