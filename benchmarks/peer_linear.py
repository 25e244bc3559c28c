"""XR-Linear, a TF-IDF memory and their fusion on one data set; runs in the environment of the peers.

    PEERS/bin/python benchmarks/peer_linear.py --tool TOOL --data FOLDER --out FOLDER [--threads 2] [--speed]

`methods.py`, `peers.py` and `answer_speed.py` make the environment and call this. The recipe is that of the data sets' own floor tool,
linear_floor.py, which is imported. It is repeated here only because the tool keeps no answers, and a paired test needs
them. Written to --out:

    linear.npz, fused.npz, memory.npz   answers to the test queries, CSR [queries, labels]
    costs.json                          seconds of vectors and training, weights of the fusion
    speed.json                          with --speed, in place of all others: how fast XR-Linear answers
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARES = (0.0, 0.25, 0.5, 1.0, 2.0)  # weights of the fusion's other parts
BEAM = 20
TOP_K = 10  # answers to a text where speed is measured
SINGLE = 300  # texts that are answered one at a time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", type=Path, required=True, help="path of linear_floor.py")
    parser.add_argument("--data", type=Path, required=True, help="folder of raw files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--speed", action="store_true", help="measure the answers' speed alone")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.tool.parent))
    import linear_floor as tool

    data = arguments.data
    train = tool.read(f"{data}/trn.json.gz")
    labels = tool.read(f"{data}/lbl.json.gz")
    test = tool.read(f"{data}/tst.json.gz")
    label_texts = tool.texts(labels)
    positives = tool.truth(train, len(labels))
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.speed:
        final = tool.Linear(tool.texts(train), label_texts, positives, arguments.threads)
        figures = speed(final, tool.texts(test), arguments.threads)
        hidden = tool.filters(f"{data}/filter_labels_tst.txt", len(test), len(labels))
        ids = tool.best(final.linear(tool.texts(test)), hidden, depth=1)
        figures["P@1"] = precision_at_1(ids[:, 0], tool.truth(test, len(labels)))
        (arguments.out / "speed.json").write_text(json.dumps(figures), encoding="utf-8")
        return
    weights = chosen_weights(tool, data, train, label_texts, positives, arguments.threads)

    final = tool.Linear(tool.texts(train), label_texts, positives, arguments.threads)
    queries = tool.texts(test)
    started = time.perf_counter()
    linear = final.linear(queries)
    answer_s = time.perf_counter() - started
    votes, cosines = final.neighbours(queries)
    hidden = tool.filters(f"{data}/filter_labels_tst.txt", len(test), len(labels))
    fused = weighted_sum(weights, [linear, votes, cosines])
    all_scores = {"linear": linear, "fused": fused, "memory": votes + cosines}
    for name, scores in all_scores.items():
        write_answers(tool, arguments.out / f"{name}.npz", scores, hidden)
    costs = {
        "vectors_s": final.vectors_s,
        "train_s": final.train_s,
        "answers_per_s": len(test) / answer_s,
        "weights": weights,
        "threads": arguments.threads,
    }
    (arguments.out / "costs.json").write_text(json.dumps(costs), encoding="utf-8")


def chosen_weights(
    tool: Any, data: Path, train: Any, label_texts: list[str], positives: Any, threads: int
) -> tuple[float, ...]:
    """Weights of linear model, votes and cosines, chosen on a tenth of the training queries."""
    import numpy as np

    # The same draw as in linear_floor.py.
    random_order = np.random.default_rng(1).permutation(len(train))
    is_held_out = random_order < len(train) // 10
    texts = np.array(tool.texts(train), dtype=object)
    learned_texts = list(texts[~is_held_out])
    model = tool.Linear(learned_texts, label_texts, positives[~is_held_out], threads)
    queries = list(texts[is_held_out])
    parts = [model.linear(queries), *model.neighbours(queries)]
    all_hidden = tool.filters(f"{data}/filter_labels_trn.txt", len(train), len(label_texts))
    hidden = all_hidden[is_held_out]
    # The inverse propensities of PSP@k, with A = 0.55 and B = 1.5.
    counts = np.asarray(positives.sum(0)).ravel()
    constant = (np.log(len(train)) - 1) * 2.5**0.55
    inverse_propensity = 1 + constant * (counts + 1.5) ** -0.55

    def quality(weights: tuple[float, ...]) -> float:
        ids = tool.best(weighted_sum(weights, parts), hidden)
        metrics = tool.measure(ids, positives[is_held_out], inverse_propensity)
        return float(np.mean([metrics["P@1"], metrics["P@5"], metrics["PSP@5"]]))

    # Only ratios of weights matter, so the weight of the linear model is fixed.
    return max(itertools.product((1.0,), SHARES, SHARES), key=quality)


def weighted_sum(weights: Sequence[float], parts: Sequence[Any]) -> Any:
    return sum(weight * part for weight, part in zip(weights, parts, strict=True))


def speed(final: Any, queries: list[str], threads: int) -> dict[str, float]:
    """Texts a second in bulk, and milliseconds of one text with one thread, from texts to label ids."""
    import numpy as np

    def answer(texts: list[str], num_threads: int) -> None:
        rows = final.pairs.transform(texts).tocsr()
        final.model.predict(rows, only_topk=TOP_K, beam_size=BEAM, threads=num_threads)

    answer(queries[:SINGLE], threads)  # the first call sets up what later ones reuse
    started = time.perf_counter()
    answer(queries, threads)
    bulk_s = time.perf_counter() - started
    single_ms = []
    for text in queries[:SINGLE]:
        started = time.perf_counter()
        answer([text], 1)
        single_ms.append(1000 * (time.perf_counter() - started))
    median, slow = np.percentile(single_ms, [50, 99])
    return {"texts_per_s": len(queries) / bulk_s, "p50_ms": float(median), "p99_ms": float(slow)}


def precision_at_1(best_ids: Any, positives: Any) -> float:
    """Percentage of the queries whose best label is one of their positives."""
    import numpy as np

    is_hit = positives[np.arange(len(best_ids)), best_ids]
    return 100 * float(np.asarray(is_hit).mean())


def write_answers(tool: Any, path: Path, scores: Any, hidden: Any) -> None:
    """Keeps the best answers of each query, as the tool ranks them."""
    import numpy as np
    import scipy.sparse as sp

    ids = tool.best(scores, hidden)
    row, place = np.nonzero(ids >= 0)
    label = ids[row, place]
    values = np.asarray(scores.tocsr()[row, label]).ravel().astype(np.float32)
    sp.save_npz(path, sp.csr_matrix((values, (row, label)), shape=scores.shape))


if __name__ == "__main__":
    main()
