"""A sentence-transformers model trained with its in-batch loss on one data set; runs in the environment of the peers.

    PEERS/bin/python benchmarks/peer_sentences.py --model static --corpus CORPUS --data FOLDER --out FOLDER --epochs 4

`peers.py` makes the environment and calls this. A training example is a query and one of its labels; other labels of
the batch are its negatives (MultipleNegativesRankingLoss). `static` is sentence-transformers' own StaticEmbedding over
the vocabulary of the corpus, from random rows; anything else is a folder or a hub id. Written to --out:

    answers.npz   answers to the test queries by cosine, CSR [queries, labels]
    costs.json    seconds of training
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

DEPTH = 200  # answers kept of a query; filter pairs are masked later
BLOCK = 1024  # queries searched at once


def main() -> None:
    arguments = parse_arguments()
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    train = read(arguments.data / "trn.json.gz")
    label_texts = [text(row) for row in read(arguments.data / "lbl.json.gz")]
    queries = []
    labels = []
    for row in train:
        for label in row["target_ind"]:
            queries.append(text(row))
            labels.append(label_texts[label])
    model = open_model(arguments)
    train_s = fit(model, queries, labels, arguments)
    test = [text(row) for row in read(arguments.data / "tst.json.gz")]
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_answers(model, test, label_texts, arguments.out / "answers.npz")
    costs = {"train_s": train_s, "pairs": len(queries), "threads": arguments.threads}
    (arguments.out / "costs.json").write_text(json.dumps(costs), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="static, a folder or a hub id")
    parser.add_argument("--corpus", type=Path, required=True, help="whose vocabulary static has")
    parser.add_argument("--data", type=Path, required=True, help="folder of raw files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=float, required=True)
    parser.add_argument("--dim", type=int, default=256, help="of static")
    parser.add_argument("--tokens", type=int, default=128, help="kept of a text")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def text(row: dict[str, Any]) -> str:
    return f"{row['title']} {row['content']}".strip()


def open_model(arguments: argparse.Namespace) -> Any:
    from sentence_transformers import SentenceTransformer

    if arguments.model != "static":
        model = SentenceTransformer(arguments.model, device="cpu")
        model.max_seq_length = arguments.tokens
        return model
    from sentence_transformers.models import StaticEmbedding
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(arguments.corpus / "tokenizer" / "tokenizer.json"))
    tokenizer.enable_truncation(arguments.tokens)
    embedding = StaticEmbedding(tokenizer, embedding_dim=arguments.dim)
    return SentenceTransformer(modules=[embedding], device="cpu")


def fit(model: Any, queries: list[str], labels: list[str], arguments: argparse.Namespace) -> float:
    """Trains on pairs of a query and a label, with a complete cosine schedule; returns seconds."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    settings = SentenceTransformerTrainingArguments(
        output_dir=str(arguments.out / "trainer"),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch,
        learning_rate=arguments.lr,
        warmup_steps=0.1,  # below 1 it is a share of all steps
        lr_scheduler_type="cosine",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    pairs = Dataset.from_dict({"anchor": queries, "positive": labels})
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=settings, train_dataset=pairs, loss=loss)
    started = time.perf_counter()
    trainer.train()
    return time.perf_counter() - started


def write_answers(model: Any, queries: list[str], labels: list[str], path: Path) -> None:
    import numpy as np
    import scipy.sparse as sp
    import torch

    options = {"convert_to_tensor": True, "normalize_embeddings": True, "show_progress_bar": False}
    query_QD = model.encode(queries, **options)
    label_LD = model.encode(labels, **options)
    ids = []
    scores = []
    for block_BD in query_QD.split(BLOCK):
        best = torch.topk(block_BD @ label_LD.T, min(DEPTH, len(labels)), dim=1)
        ids.append(best.indices.numpy())
        scores.append(best.values.numpy())
    ids_QK = np.concatenate(ids)
    rows = np.repeat(np.arange(len(ids_QK)), ids_QK.shape[1])
    values = np.concatenate(scores).ravel()
    shape = (len(queries), len(labels))
    sp.save_npz(path, sp.csr_matrix((values, (rows, ids_QK.ravel())), shape=shape))


if __name__ == "__main__":
    main()
