"""Writes a bundle with the labels as they are now."""

from __future__ import annotations

from xmcray.errors import StorageError
from xmcray.retrieval.bundle import KIND, new_bundle
from xmcray.retrieval.labels import write_changes
from xmcray.retrieval.retriever import Retriever
from xmcray.serving.log_place import record_of, record_origin
from xmcray.serving.snapshot import Snapshot
from xmcray.storage.artifact import link_files, open_artifact
from xmcray.storage.manifest import FileEntry, read_manifest


def write_compacted(snapshot: Snapshot, out: str, threads: int) -> str:
    """Writes the labels of a snapshot into a new bundle, which names its last operation.

    Args:
        snapshot: the snapshot.
        out: folder or URL of the new bundle.
        threads: see `Retriever.load`.
    Returns:
        Its SHA-256.
    Raises:
        XmcrayError: it cannot be written there, or the bundle was changed in place.
    """
    exported = Retriever.load(snapshot.folder, threads=threads)
    manifest = read_manifest(snapshot.folder, KIND)
    # Ids of labels of another version would be those of other labels.
    if {exported.sha256, manifest.sha256} != {snapshot.version}:
        raise StorageError(
            f"{snapshot.folder} has changed since it was loaded, expected version"
            f" {snapshot.version[:12]}; swap to it, then compact"
        )
    change = {"operations": snapshot.number, "of": manifest.sha256}
    about = {
        **manifest.about,
        "changes": [*manifest.about.get("changes", []), change],
        "label_log": record_of(snapshot.model, snapshot.place),
    }
    record_origin(about, snapshot.compacted_from or manifest.sha256)
    # Filled in the block: entries of files that are already verified are not hashed again.
    entries: dict[str, FileEntry] = {}
    with new_bundle(out, about, entries) as target:
        # Only files that changed are written; the others are hard links to the old bundle's.
        written = write_changes(exported, snapshot.retriever, target)
        written |= snapshot.attributes.save(target)
        entries |= link_files(snapshot.folder, manifest, target, written)
        if read_manifest(snapshot.folder, KIND).sha256 != manifest.sha256:
            raise StorageError(f"{snapshot.folder} has changed while it was read; compact again")
    return open_artifact(out, KIND, contents=False)[1].sha256
