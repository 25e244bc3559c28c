"""What an encoder makes of queries and of label texts."""

from __future__ import annotations

import numpy as np
import pytest
from bundles import DIM, TEXTS

from xmcray.data.tokens import train_wordpiece
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import Head, TwoHeads
from xmcray.retrieval.bundle import Settings
from xmcray.retrieval.query_encoder import QueryEncoder
from xmcray.types import Float32Array

SOME = TEXTS[:20]


def query_encoder(head: Head, predictor: str) -> QueryEncoder:
    """An untrained encoder as a bundle with this predictor has it."""
    tokenizer = train_wordpiece(TEXTS, vocab_size=400, max_len=16)
    encoder = build_encoder(EncoderConfig(dim=DIM), tokenizer, None, seed=0).eval()
    settings = Settings(num_labels=1, dim=head.out_dim, predictor={"kind": predictor})
    return QueryEncoder(
        encoder,
        head,
        tokenizer,
        normalised=settings.normalises,
        normalised_labels=settings.normalises_labels,
    )


def lengths(vectors: Float32Array) -> Float32Array:
    made: Float32Array = np.linalg.norm(vectors, axis=1)
    return made


@pytest.mark.parametrize(
    ("predictor", "queries", "labels"),
    [("labels", False, False), ("fused", True, False), ("memory", True, True)],
)
def test_vectors_get_length_1_as_those_in_the_bundle_did(
    predictor: str, queries: bool, labels: bool
) -> None:
    made = query_encoder(Head(DIM), predictor)
    query_lengths = lengths(made.encode(SOME))
    label_lengths = lengths(made.encode_labels(made.tokenizer.encode_labels(SOME)))
    assert np.allclose(query_lengths, 1) == queries
    assert np.allclose(label_lengths, 1) == labels


@pytest.mark.parametrize("predictor", ["labels", "fused"])
def test_weights_of_two_heads_are_those_of_queries_alone(predictor: str) -> None:
    head = TwoHeads(DIM, DIM, text_share=0.8)
    head.reset(0)
    made = query_encoder(head, predictor)
    query_BD = made.encode(SOME)
    label_BD = made.encode_labels(made.tokenizer.encode_labels(SOME))
    # The exported vectors of labels have two halves of length 1.
    np.testing.assert_allclose(lengths(label_BD[:, :DIM]), 1, rtol=1e-5)
    np.testing.assert_allclose(lengths(label_BD[:, DIM:]), 1, rtol=1e-5)
    halves = lengths(query_BD[:, :DIM]) / lengths(query_BD[:, DIM:])
    np.testing.assert_allclose(halves, 0.8 / 0.2, rtol=1e-5)


def test_no_labels_have_a_width() -> None:
    made = query_encoder(Head(DIM), "labels")
    assert made.encode_labels(made.tokenizer.encode_labels([])).shape == (0, DIM)
