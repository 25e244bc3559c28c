"""What comes with the package: files to copy, the schema of settings, completion for shells."""

from __future__ import annotations

import argparse
from pathlib import Path

from xmcray import config
from xmcray.cli.output import show_json, show_line, show_text
from xmcray.errors import ConfigError
from xmcray.methods.registry import check_method_name, method_names
from xmcray.storage.path_errors import disk_errors
from xmcray.storage.whole_files import whole_file

SHELLS = ("bash", "zsh", "fish")
_ROOT = Path(__file__).parents[1] / "files"


def files_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("name", metavar="NAME", nargs="?", help="a file or folder of the list")
    verb.add_argument("--out", metavar="DIR", help="copy into this folder, instead of printing")


def files(options: argparse.Namespace) -> None:
    """Lists the files, prints one, or copies some."""
    names = _names()
    if options.name is not None:
        prefix = options.name.rstrip("/")
        # A file itself, or all files of a folder.
        chosen = [name for name in names if f"{name}/".startswith(f"{prefix}/")]
        if not chosen:
            folders = {name.partition("/")[0] for name in names}
            raise ConfigError(config.unknown("file", prefix, [*sorted(folders), *names]))
        names = chosen
    if options.out is not None:
        _copy(names, Path(options.out))
    elif names == [options.name]:
        show_text((_ROOT / options.name).read_text(encoding="utf-8"))
    else:
        for name in names:
            show_text(f"{name}\n")


def _names() -> list[str]:
    """All files, by their paths below the folder of files."""
    names = []
    # In a checkout the folders are links, which rglob would not follow.
    for folder in _ROOT.iterdir():
        target = folder.resolve()
        paths = [path.relative_to(target) for path in target.rglob("*") if path.is_file()]
        names += [f"{folder.name}/{path.as_posix()}" for path in paths]
    return sorted(name for name in names if "__pycache__" not in name)


def _copy(names: list[str], out: Path) -> None:
    """Copies files, all of them or none if one exists."""
    for name in names:
        if (out / name).exists():
            raise ConfigError(f"{out / name} exists already; choose another --out or remove it")
    for name in names:
        folder = (out / name).parent
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with whole_file(out / name) as path:
            path.write_bytes((_ROOT / name).read_bytes())
    show_line(f"{len(names)} files in {out}")


def schema_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("method", metavar="METHOD", help=", ".join(method_names()))


def schema(options: argparse.Namespace) -> None:
    """Prints the JSON Schema of a method's settings."""
    check_method_name(options.method)
    from xmcray.training.settings_schema import settings_schema

    show_json(settings_schema(options.method))


def completion_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("shell", choices=SHELLS)


def completion(options: argparse.Namespace) -> None:
    """Prints the script that a shell reads once."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise ConfigError(
            "completion needs argcomplete, which is not installed; run"
            " pip install 'xmcray[completion]'"
        ) from None
    show_text(f"{shellcode(['xmcray'], shell=options.shell)}\n")


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers a shell that asks what could come next on the command line, and ends the process."""
    import argcomplete

    argcomplete.autocomplete(parser)
