"""A package outside xmcray that adds a method, installed in a folder without pip."""

from __future__ import annotations

import shutil
from pathlib import Path

SOURCE = Path(__file__).with_name("third_party") / "their_package"


def install(site: Path, entry_points: str = "seventh = their_package.seventh:ENTRY") -> Path:
    """Puts the package and its metadata into `site`, as pip would; returns `site`.

    Args:
        site: Folder to create. It must be on PYTHONPATH.
        entry_points: Lines of the group `xmcray.methods`.
    """
    shutil.copytree(SOURCE, site / "their_package", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = site / "their_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[xmcray.methods]\n{entry_points}\n")
    return site
