"""Vectors of each family of encoders against sentence-transformers, prompts, pooling and normalisation included.

Random models of each family are made on the spot, with prompts, in folders as sentence-transformers writes them. Both
libraries read such a folder; then ours is saved, or exported from a bundle, and sentence-transformers reads that one.
MiniLM is the real model. sentence-transformers runs in its own environment, which is made when it is first needed.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import new_parser, write_table
from data_sets import MINILM  # puts the folder of the tests on the path
from models import as_sentence_transformer, write_family
from peer_environment import SENTENCES, run_script

from xmcray.data.tokens import TextTokenizer, from_transformer, train_wordpiece
from xmcray.nn.encoder import Encoder, EncoderConfig, build_encoder, load_encoder
from xmcray.nn.heads import Head, NormalisedHead
from xmcray.nn.transformer import find
from xmcray.retrieval.bundle import write_bundle
from xmcray.retrieval.encoder_export import export_encoder
from xmcray.retrieval.index import IndexSpec
from xmcray.types import Float32Array

WORDS = "sort an array of numbers find the largest element in each row by value".split()  # noqa: SIM905
TEXTS = [" ".join(WORDS[first : first + size]) for size in (1, 2, 4, 7, 13) for first in range(14)]
PROMPTS = {"query": "find the row ", "document": "an array "}
POOLINGS = {
    "bert": "cls_token",
    "roberta": "weightedmean_tokens",
    "mpnet": "mean_tokens",
    "modernbert": "mean_tokens",
    "qwen3": "lasttoken",
}
MAX_LEN = 64


@dataclass(frozen=True, slots=True)
class Case:
    """A folder that sentence-transformers opens, and what its vectors should be.

    Attributes:
        name: for the table.
        folder: of the encoder.
        queries: our vectors of `TEXTS` as queries.
        labels: our vectors of them as label texts.
        trusted: whether the folder holds code.
    """

    name: str
    folder: Path
    queries: Float32Array
    labels: Float32Array
    trusted: bool = False


def main() -> None:
    parser = new_parser(__doc__)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cases: list[Case] = []
        for family in POOLINGS:
            cases += family_cases(folder, family)
        minilm = find(MINILM)
        tokenizer = from_transformer(str(minilm), MAX_LEN, MAX_LEN)
        cases.append(case("MiniLM, as published", minilm, load_encoder(minilm), tokenizer))
        cases.append(lora_case(folder))
        cases += [static_case(folder, parts) for parts in (False, True)]
        rows = compared(folder, cases)
    write_table(
        "encoder_families.md",
        "Vectors of encoders against sentence-transformers",
        ["encoder", "least cosine, queries", "least cosine, label texts", "largest difference"],
        rows,
        [
            f"{len(TEXTS)} texts of 1 to 13 words; prompts {PROMPTS}; goal: cosine of at least 0.99999.",
            f"{SENTENCES[0]}, {SENTENCES[2]}; `encode_query` and `encode_document`.",
            "Models other than MiniLM are random, of two layers and 16 dimensions.",
        ],
    )


def case(
    name: str, folder: Path, encoder: Encoder, tokenizer: TextTokenizer, normalised: bool = False
) -> Case:
    """Our vectors of an encoder, for a folder that should have the same."""
    with torch.no_grad():
        queries = encoder(tokenizer.encode(TEXTS))
        labels = encoder(encoder.as_labels(tokenizer.encode_labels(TEXTS)))
    if normalised:
        queries = torch.nn.functional.normalize(queries, dim=-1)
        labels = torch.nn.functional.normalize(labels, dim=-1)
    trusted = (folder / "static.json").is_file()
    return Case(name, folder, queries.numpy(), labels.numpy(), trusted)


def family_cases(folder: Path, family: str) -> list[Case]:
    """A published folder, and what we save of it."""
    published = write_family(folder / family, WORDS, family)
    as_sentence_transformer(published, POOLINGS[family], PROMPTS)
    tokenizer = from_transformer(str(published), MAX_LEN, MAX_LEN)
    encoder = load_encoder(published)
    saved = folder / f"{family}-saved"
    encoder.save(saved)
    return [
        case(f"{family}, as published", published, encoder, tokenizer),
        case(f"{family}, saved by us", saved, encoder, tokenizer),
    ]


def lora_case(folder: Path) -> Case:
    """A bundle of an encoder whose adapters were merged."""
    name = str(folder / "qwen3")
    tokenizer = from_transformer(name, MAX_LEN, MAX_LEN)
    config = EncoderConfig(name=name, dim=8, lora_rank=2)
    encoder = build_encoder(config, tokenizer, None, seed=0).eval()
    randomise(encoder)
    encoder.save(folder / "merged")
    return exported("qwen3 with LoRA, exported", folder, load_encoder(folder / "merged"), tokenizer)


def static_case(folder: Path, has_parts: bool) -> Case:
    """A bundle of a static encoder, plain or with everything that can be added to it."""
    tokenizer = train_wordpiece(TEXTS, max_len=10, label_max_len=5)
    config = EncoderConfig(
        dim=16,
        residual=has_parts,
        position_decay=1.5 * has_parts,
        bigram_buckets=50 * has_parts,
        separate_labels=has_parts,
    )
    counts = np.arange(tokenizer.vocab_size)
    encoder = build_encoder(config, tokenizer, counts, seed=0).eval()
    randomise(encoder)
    name = "static with all its parts, exported" if has_parts else "static, exported"
    return exported(name, folder, encoder, tokenizer, normalised=has_parts)


def randomise(encoder: Encoder) -> None:
    """Moves all weights away from their start, at which adapters and networks add nothing."""
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(torch.randn_like(weight) / 8)


def exported(
    name: str,
    folder: Path,
    encoder: Encoder,
    tokenizer: TextTokenizer,
    normalised: bool = True,
) -> Case:
    """The export of a bundle with an encoder, for a head that normalises or not."""
    head = NormalisedHead(encoder.dim) if normalised else Head(encoder.dim)
    bundle = folder / f"{name}-bundle"
    vectors = np.random.default_rng(0).standard_normal((2, encoder.dim), np.float32)
    order = np.arange(2)
    spec = IndexSpec()
    write_bundle(
        bundle, encoder, head, tokenizer, ["a", "b"], TEXTS[:2], order, [vectors], spec, {}
    )
    export_encoder(bundle, folder / name)
    return case(name, folder / name, encoder, tokenizer, normalised)


def compared(folder: Path, cases: list[Case]) -> list[list[object]]:
    """Rows of the table."""
    folders = [{"folder": str(each.folder), "trusted": each.trusted} for each in cases]
    text = json.dumps({"texts": TEXTS, "folders": folders})
    (folder / "cases.json").write_text(text, encoding="utf-8")
    run_script("sentences", "peer_vectors.py", [folder], threads=1)
    rows: list[list[object]] = []
    for number, each in enumerate(cases):
        cosines = []
        differences = []
        for side, ours in (("query", each.queries), ("document", each.labels)):
            theirs = np.load(folder / f"{number}-{side}.npy")
            products = (ours * theirs).sum(axis=1)
            lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
            cosines.append(f"{(products / lengths).min():.7f}")
            differences.append(np.abs(ours - theirs).max())
        rows.append([each.name, *cosines, f"{max(differences):.1e}"])
    return rows


if __name__ == "__main__":
    main()
