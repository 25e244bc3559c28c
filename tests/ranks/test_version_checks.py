"""A version of the negatives is hashed by one rank of a node, and no rank uses an altered one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks

from xmcray.errors import ShortlistError
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.version_checks import VersionChecks
from xmcray.negatives.version_folder import VersionFolder
from xmcray.parallel import collectives
from xmcray.storage.manifest import FileEntry, hash_file


def complete_version(folder: Path) -> VersionFolder:
    version = Ledger(folder).version(0)
    version.publish(0, 1, 7)
    with version.new_shortlist(5, 2) as labels:
        labels[:] = 3
    version.write_clusters(np.arange(5, dtype=np.int32))
    version.finish({})
    return version


def check_on_rank(path: Path) -> tuple[list[str], str]:
    """Names of the files that this rank hashes, and the error that it meets."""
    os.environ["LOCAL_RANK"] = str(collectives.rank())
    hashed = []

    def counted(file: Path) -> FileEntry:
        hashed.append(file.name)
        return hash_file(file)

    checks = VersionChecks()
    folder = VersionFolder(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xmcray.negatives.version_folder.hash_file", counted)
        checks.expect(folder)
        try:
            for _ in range(2):
                checks.checked(folder).shortlist()
        except ShortlistError as error:
            return hashed, str(error)
    return hashed, ""


def test_one_rank_of_a_node_hashes_a_version_once(tmp_path: Path) -> None:
    version = complete_version(tmp_path)
    results = on_ranks(check_on_rank, 2, version.path)
    assert results == [(["shortlist.npy", "clusters.npy"], ""), ([], "")]


def test_all_ranks_refuse_what_one_of_them_finds_altered(tmp_path: Path) -> None:
    version = complete_version(tmp_path)
    np.save(version.path / "clusters.npy", np.zeros(5, np.int32))
    errors = [error for _, error in on_ranks(check_on_rank, 2, version.path)]
    assert errors[0] == errors[1]
    assert "clusters.npy was altered after it was written" in errors[0]


def check_in_own_view(path: Path) -> str:
    """The error that this rank meets if complete.json appears on its node later than on rank 0's."""
    os.environ["LOCAL_RANK"] = "0"  # each rank has a node of its own
    folder = VersionFolder(path / f"node-{collectives.rank()}" / "v00000-0000")
    complete = folder.path / "complete.json"
    hidden = folder.path / "hidden"
    if collectives.rank() == 1:
        complete.rename(hidden)
    with pytest.MonkeyPatch.context() as patch:
        # The file appears while the rank waits.
        patch.setattr("time.sleep", lambda seconds: hidden.rename(complete))
        try:
            VersionChecks().checked(folder).shortlist()
        except ShortlistError as error:
            return str(error)
    return ""


def test_a_node_waits_for_a_version_that_its_file_system_still_hides(tmp_path: Path) -> None:
    version = complete_version(tmp_path / "node-0")
    shutil.copytree(version.path, tmp_path / "node-1" / version.path.name)
    assert on_ranks(check_in_own_view, 2, tmp_path) == ["", ""]
