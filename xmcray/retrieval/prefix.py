"""Bundles with the first columns of another one's vectors: smaller, and quicker to search.

Little is lost if the encoder was trained with `encoder.matryoshka` (Kusupati et al., NeurIPS 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xmcray.data.tokens import TextTokenizer
from xmcray.errors import ConfigError
from xmcray.nn.heads import Head, NormalisedHead, PrefixHead, load_head
from xmcray.nn.label_side import LabelSide, load_label_side
from xmcray.retrieval.attributes import FILE as ATTRIBUTES
from xmcray.retrieval.bundle import KIND, Settings, read_labels, read_settings
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import answer_spec
from xmcray.retrieval.shards import ShardBuild, open_vectors, vectors_name
from xmcray.storage.artifact import open_artifact
from xmcray.types import Float32Array, spans

_BLOCK_ROWS = 65_536


def cut_bundle(
    bundle: str | Path,
    out: str | Path,
    dim: int,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a bundle with the first `dim` columns of another one's vectors.

    Vectors of length 1 get that length again, so scores stay cosines. Scores change, so the new
    bundle has no probabilities. On failure nothing is left at `out`.

    Args:
        bundle: folder or URL.
        out: folder or URL that does not exist yet.
        dim: columns that are kept.
        config: section `index`: fields of IndexSpec by name. Without a factory string the index is
            of the kind that the bundle has.

    Raises:
        ConfigError: `config` has something else than settings of an index; the bundle has not more
            columns, or they mean something else than those of the encoder.
        StorageError: the bundle is damaged, `out` exists, or the disk is full.
    """
    folder, manifest = open_artifact(bundle, KIND)
    settings = read_settings(folder)
    spec = answer_spec(config or {}, factory=settings.factory)
    head = load_head(folder / "head")
    side = load_label_side(folder / "label_side")
    labels, row_labels, removed = read_labels(folder, settings)
    if isinstance(head, PrefixHead):
        raise ConfigError(
            f"{bundle} was cut before, expected a whole bundle; cut the one that it was made from"
        )
    has_other_parts = settings.normalises or side.prototypes is not None
    if has_other_parts or type(head) not in (Head, NormalisedHead):
        raise ConfigError(
            f"{bundle} answers by more than one vector of the encoder for each label, expected a"
            " bundle of astra, renee or dexml without a memory; leave out --dim"
        )
    if settings.first_added is not None or (folder / ATTRIBUTES).is_file():
        raise ConfigError(
            f"labels of {bundle} were changed after its export, expected the bundle of a run; cut"
            " that one and change its labels after that"
        )
    if not 1 <= dim < settings.dim:
        raise ConfigError(
            f"--dim is {dim}, expected 1 to {settings.dim - 1}: vectors of {bundle} have"
            f" {settings.dim} columns"
        )
    is_normalised = isinstance(head, NormalisedHead)
    cut_model = BundleModel(
        encoder=folder / "encoder",
        head=PrefixHead(head.dim, dim, is_normalised),
        tokenizer=TextTokenizer.load(folder / "tokenizer"),
        label_side=LabelSide(min(side.row_columns, dim)),
        method=settings.method,
    )
    cut_labels = BundleLabels(
        uids=labels["uid"].to_pylist(),
        texts=labels["text"].to_pylist(),
        order=row_labels,
        vectors=_cut_vectors(folder, settings, dim, is_normalised),
        removed=removed,
    )
    about = {**manifest.about, "prefix_of": manifest.sha256, "prefix_dim": dim}
    write_bundle(out, cut_model, cut_labels, ShardBuild(spec=spec), about)


def _cut_vectors(
    folder: Path, settings: Settings, dim: int, is_normalised: bool
) -> Iterator[Float32Array]:
    """Label vectors float32 [n, dim] in internal order, in blocks of bounded size."""
    for number, shard in enumerate(settings.shards):
        num_rows = shard.stop - shard.start
        for span in spans(num_rows, _BLOCK_ROWS):
            # The file is opened anew each time, because pages of a mapped file stay in memory.
            with open_vectors(folder / vectors_name(number), "np") as file:
                vectors: Float32Array = file.get_slice("vectors")[span, :dim]
            if is_normalised:
                lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
                vectors = vectors / np.maximum(lengths, 1e-12)
            yield np.ascontiguousarray(vectors)
