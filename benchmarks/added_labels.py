"""How well labels that are added without training are found, compared with vectors from training.

    python benchmarks/added_labels.py                           # three minutes
    python benchmarks/added_labels.py --method astra --draws 1  # does it work?

Each method is trained on the embedded sample with its preset. Then, a few times over, some labels that test queries
have are left out of the bundle, and join again by their text (`xmcray labels add`). The table compares the answers with
those of the trained bundle, and, where label vectors are rows of a classifier, with the plain idea: the vector of the
label's text, as long as a row is. The encoder has seen the labels in training: labels that are new to it fare worse.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import data_sets
import numpy as np
from common import new_parser, refuse_if_busy, write_table

from xmcray import config as configs
from xmcray.data.corpus import Corpus
from xmcray.nn.encoder import load_encoder
from xmcray.nn.heads import load_head
from xmcray.nn.label_side import load_label_side
from xmcray.progress import watch_training
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.labels import NewLabel, add_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.training.launch import train
from xmcray.training.outcome import bundle_of
from xmcray.training.run import RunConfig
from xmcray.types import Float32Array, Int64Array

METHODS = (
    "astra",
    "unidec",
    "prime",
)  # of the others a label's vector is its text's, in training and after it
K = 10


def main() -> None:
    parser = new_parser(__doc__, out="added_labels.md")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--labels", type=int, default=100, help="that join (default: %(default)s)")
    parser.add_argument(
        "--draws", type=int, default=5, help="of these labels (default: %(default)s)"
    )
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    corpus = data_sets.corpus("sample")
    assert corpus is not None
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory(dir=data_sets.CACHE) as folder:
        for method in arguments.method:
            values = configs.load_yaml(f"preset:{method}/sample")
            config = RunConfig.resolve(method, values, ["cluster.workers=0", "cluster.device=cpu"])
            run = train(corpus.path, Path(folder) / method, config, watch=watch_training)
            rows += compared(method, Path(bundle_of(run, corpus)), corpus, arguments, Path(folder))
    notes = [
        f"embedded sample, {corpus.card.num_labels:,} labels, of which {arguments.labels} that test queries have join;"
        f" mean of {arguments.draws} draws of them; percent",
        "R@10: of positives among the labels that joined. Share of answers: first answers that are such a label",
        load,
    ]
    header = [
        "method",
        "vector of a label that joins",
        "P@1",
        "P@5",
        "R@10 of these",
        "share of answers",
        "own text",
    ]
    write_table(arguments.out, "Labels that join a finished bundle", header, rows, notes)


def compared(
    method: str, bundle: Path, corpus: Corpus, arguments: argparse.Namespace, folder: Path
) -> list[list[object]]:
    """Rows of the table for one bundle."""
    retriever = Retriever.load(bundle)
    side = load_label_side(bundle / "label_side")
    vector_LD = retriever.labels.vectors_of(np.arange(retriever.num_labels))
    test = corpus.split("test")
    results: dict[str, list[list[float]]] = {}
    candidates = np.unique(test.positives(np.arange(len(test))).values)
    candidates = np.setdiff1d(candidates, corpus.labels_without_tokens())
    for draw in range(arguments.draws):
        held = np.random.default_rng(draw).choice(candidates, arguments.labels, replace=False)
        variants = {
            "as trained": vector_LD[held],
            "made of its text": joined(bundle, corpus, held, folder / f"{method}-{draw}"),
        }
        if side.row_columns:
            text = retriever.encode(corpus.label_tokens(held))[:, -side.row_columns :]
            row_lengths = np.linalg.norm(vector_LD[:, -side.row_columns :], axis=1)
            plain = variants["made of its text"].copy()
            plain[:, -side.row_columns :] = text * (
                np.median(row_lengths) / np.linalg.norm(text, axis=1, keepdims=True)
            )
            variants["the text's vector, as long as a row"] = plain
        for name, vectors in variants.items():
            changed = vector_LD.copy()
            changed[held] = vectors
            results.setdefault(name, []).append(measured(retriever, corpus, changed, held))
    return [
        [method, name, *(100 * np.mean(values, axis=0)).tolist()]
        for name, values in results.items()
    ]


def joined(bundle: Path, corpus: Corpus, held: Int64Array, folder: Path) -> Float32Array:
    """Vectors that labels get when they join a bundle that never had them."""
    retriever = Retriever.load(bundle)
    side = load_label_side(bundle / "label_side")
    kept = np.setdiff1d(np.arange(retriever.num_labels), held)
    if side.cluster_L is not None:
        side.cluster_L = side.cluster_L[retriever.labels.label_rows[kept]]
    model = BundleModel(
        encoder=load_encoder(bundle / "encoder"),
        head=load_head(bundle / "head"),
        tokenizer=retriever.tokenizer,
        label_side=side,
    )
    labels = BundleLabels(
        uids=corpus.label_uids(kept),
        texts=corpus.label_texts(kept),
        order=np.arange(len(kept)),
        vectors=[retriever.labels.vectors_of(kept)],
    )
    write_bundle(folder / "without", model, labels, ShardBuild(spec=IndexSpec()), {})
    texts = zip(corpus.label_uids(held), corpus.label_texts(held), strict=True)
    add_labels(folder / "without", [NewLabel(*label) for label in texts], folder / "with")
    return Retriever.load(folder / "with").labels.vectors_of(len(kept) + np.arange(len(held)))


def measured(
    retriever: Retriever, corpus: Corpus, vector_LD: Float32Array, held: Int64Array
) -> list[float]:
    """P@1, P@5, R@10 of the held labels, their share of first answers, and how often their own text finds them."""
    test = corpus.split("test")
    rows = np.arange(len(test))
    positives = test.positives(rows)
    filters = test.filters(rows)
    score_QL = retriever.encode(test.tokens(rows)) @ vector_LD.T
    score_QL[filters.row_ids, filters.values] = -np.inf
    top_QK = np.argsort(-score_QL, axis=1, kind="stable")[:, :K]
    true_QL = np.zeros(score_QL.shape, bool)
    true_QL[positives.row_ids, positives.values] = True
    hit_QK = np.take_along_axis(true_QL, top_QK, 1)[positives.lengths > 0]
    query, place = np.nonzero(np.take_along_axis(true_QL, top_QK, 1))
    recalled = np.isin(top_QK[query, place], held).sum() / np.isin(positives.values, held).sum()
    own = (retriever.encode(corpus.label_tokens(held)) @ vector_LD.T).argmax(axis=1)
    share = np.isin(top_QK[:, 0], held).mean()
    return [hit_QK[:, 0].mean(), hit_QK[:, :5].mean(), recalled, share, (own == held).mean()]


if __name__ == "__main__":
    main()
