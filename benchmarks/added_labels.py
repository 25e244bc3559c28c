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

from xmcray import settings_files
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
from xmcray.training.run_config import RunConfig
from xmcray.types import Float32Array, Int64Array

# In the other methods the vector of a label is that of its text, in training and after it.
METHODS = ("astra", "unidec", "prime")
K = 10
HEADER = [
    "method",
    "vector of a label that joins",
    "P@1",
    "P@5",
    "R@10 of these",
    "share of answers",
    "own text",
]


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
            values = settings_files.load_yaml(f"preset:{method}/sample")
            config = RunConfig.resolve(method, values, ["cluster.workers=0", "cluster.device=cpu"])
            run = train(corpus.path, Path(folder) / method, config, watch=watch_training)
            rows += compared(method, Path(bundle_of(run, corpus)), corpus, arguments, Path(folder))
    notes = [
        f"embedded sample, {corpus.card.num_labels:,} labels, of which {arguments.labels} that test queries have join;"
        f" mean of {arguments.draws} draws of them; percent",
        "R@10: of positives among the labels that joined. Share of answers: first answers that are such a label",
        load,
    ]
    write_table(arguments.out, "Labels that join a finished bundle", HEADER, rows, notes)


def compared(
    method: str, bundle: Path, corpus: Corpus, arguments: argparse.Namespace, folder: Path
) -> list[list[object]]:
    """Rows of the table for one bundle."""
    retriever = Retriever.load(bundle)
    num_columns = load_label_side(bundle / "label_side").row_columns
    vector_LD = retriever.labels.vectors_of(np.arange(retriever.num_labels))
    test = corpus.split("test")
    test_labels = np.unique(test.positives(np.arange(len(test))).values)
    # A label without tokens has no text to join by.
    candidates = np.setdiff1d(test_labels, corpus.labels_without_tokens())
    # By the way in which the vectors are made: the measures of each draw.
    results: dict[str, list[list[float]]] = {}
    for draw in range(arguments.draws):
        held_out = np.random.default_rng(draw).choice(candidates, arguments.labels, replace=False)
        joined_HD = joined(bundle, corpus, held_out, folder / f"{method}-{draw}")
        variants = {"as trained": vector_LD[held_out], "made of its text": joined_HD}
        if num_columns:
            # The last columns are rows of a classifier.
            text_HC = retriever.encode(corpus.label_tokens(held_out))[:, -num_columns:]
            row_lengths = np.linalg.norm(vector_LD[:, -num_columns:], axis=1)
            text_lengths_H1 = np.linalg.norm(text_HC, axis=1, keepdims=True)
            plain_HD = joined_HD.copy()
            plain_HD[:, -num_columns:] = text_HC * (np.median(row_lengths) / text_lengths_H1)
            variants["the text's vector, as long as a row"] = plain_HD
        for name, vector_HD in variants.items():
            changed_LD = vector_LD.copy()
            changed_LD[held_out] = vector_HD
            measures = measured(retriever, corpus, changed_LD, held_out)
            results.setdefault(name, []).append(measures)
    rows: list[list[object]] = []
    for name, measures_of_draws in results.items():
        percent = 100 * np.mean(measures_of_draws, axis=0)
        rows.append([method, name, *percent.tolist()])
    return rows


def joined(bundle: Path, corpus: Corpus, held_out: Int64Array, folder: Path) -> Float32Array:
    """Vectors that labels get when they join a bundle that never had them."""
    retriever = Retriever.load(bundle)
    side = load_label_side(bundle / "label_side")
    kept = np.setdiff1d(np.arange(retriever.num_labels), held_out)
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
    new_labels = []
    for uid, text in zip(corpus.label_uids(held_out), corpus.label_texts(held_out), strict=True):
        new_labels.append(NewLabel(uid, text))
    add_labels(folder / "without", new_labels, folder / "with")
    # Added labels come after those of the bundle.
    new_ids = len(kept) + np.arange(len(held_out))
    return Retriever.load(folder / "with").labels.vectors_of(new_ids)


def measured(
    retriever: Retriever, corpus: Corpus, vector_LD: Float32Array, held_out: Int64Array
) -> list[float]:
    """The measures of a row of the table, as shares.

    Args:
        retriever: gives the query vectors.
        corpus: gives the test queries.
        vector_LD: of all labels.
        held_out: ids of the labels that joined.

    Returns:
        P@1, P@5, R@10 of the labels that joined, their share of first answers, and how often the text of such a label
        has the label as its first answer.
    """
    test = corpus.split("test")
    queries = np.arange(len(test))
    positives = test.positives(queries)
    filters = test.filters(queries)
    score_QL = retriever.encode(test.tokens(queries)) @ vector_LD.T
    score_QL[filters.row_ids, filters.values] = -np.inf
    top_QK = np.argsort(-score_QL, axis=1, kind="stable")[:, :K]
    is_positive_QL = np.zeros(score_QL.shape, bool)
    is_positive_QL[positives.row_ids, positives.values] = True
    hit_QK = np.take_along_axis(is_positive_QL, top_QK, axis=1)
    # Precision counts queries that have positives.
    judged_QK = hit_QK[positives.lengths > 0]
    num_recalled = np.isin(top_QK[hit_QK], held_out).sum()
    recall = num_recalled / np.isin(positives.values, held_out).sum()
    share = np.isin(top_QK[:, 0], held_out).mean()
    text_score_HL = retriever.encode(corpus.label_tokens(held_out)) @ vector_LD.T
    own_text = (text_score_HL.argmax(axis=1) == held_out).mean()
    return [judged_QK[:, 0].mean(), judged_QK[:, :5].mean(), recall, share, own_text]


if __name__ == "__main__":
    main()
