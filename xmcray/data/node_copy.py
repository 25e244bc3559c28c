"""The corpus on the machine that reads it: training processes should map files of a local disk.

A corpus given as a URL is copied to each node once, whatever the number of processes there. With
`cluster.copy_corpus` a corpus in a shared folder is copied too. The copy lies in XMCRAY_CACHE (or
~/.cache/xmcray) under the hash of its manifest (`local_copy`), so a later run of the same
corpus finds it. Nothing removes it: it is the same few gigabytes for every run. `rm -r` any folder
there when no run uses it; the next run copies it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmcray.data.corpus import KIND, Corpus
from xmcray.errors import DataError
from xmcray.storage.artifact import open_artifact
from xmcray.storage.cache import local_copy
from xmcray.storage.remote import is_url


@dataclass(frozen=True, slots=True)
class CorpusSource:
    """Where the corpus of a run is.

    Attributes:
        origin: absolute path or URL.
        sha256: of the corpus that the run was started with.
        copy_folder: whether a folder is copied too.
    """

    origin: str
    sha256: str
    copy_folder: bool = False


def open_on_node(source: CorpusSource) -> Corpus:
    """Opens the corpus of a run on the caller's node.

    Raises:
        StorageError: not a complete corpus, or no room for the copy.
        DataError: another corpus has taken its place.
    """
    needs_copy = source.copy_folder or is_url(source.origin)
    path = local_copy(source.origin, KIND) if needs_copy else source.origin
    # The hashes of a copy were compared when it was made.
    folder, manifest = open_artifact(path, KIND, contents=False)
    if manifest.sha256 != source.sha256:
        raise DataError(
            f"{source.origin} holds another corpus than the run was started with; put the old one back"
        )
    return Corpus(source.origin, folder, manifest.sha256)
