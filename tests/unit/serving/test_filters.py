"""Filters over an index of inverted lists: nothing that does not pass is answered, and what does is found."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError

from xmcray.data.tokens import train_wordpiece
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import Head
from xmcray.retrieval import label_index
from xmcray.retrieval.attributes import LabelAttributes
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.labels import annotate_labels
from xmcray.retrieval.shards import ShardBuild
from xmcray.serving.schema import Filter, OperationsRequest, Range, Schema, SearchRequest
from xmcray.serving.snapshot import Snapshot

LABELS = 12_000
DIM = 24
GROUPS = 300
K = 10


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """Labels in groups, as real ones are; attribute "share" is uniform in [0, 1), "side" is "left" or "right"."""
    folder = tmp_path_factory.mktemp("filters")
    rng = np.random.default_rng(0)
    tokenizer = train_wordpiece(["a b c"] * 3, vocab_size=40, max_len=8)
    encoder = build_encoder(EncoderConfig(dim=DIM), tokenizer, None, seed=0).eval()
    centre = rng.standard_normal((GROUPS, DIM))
    vectors = (
        centre[rng.integers(GROUPS, size=LABELS)] + 0.5 * rng.standard_normal((LABELS, DIM))
    ).astype(np.float32)
    uids = [f"u{i}" for i in range(LABELS)]
    order = rng.permutation(LABELS)
    model = BundleModel(encoder=encoder, head=Head(DIM), tokenizer=tokenizer)
    labels = BundleLabels(uids=uids, texts=uids, order=order, vectors=[vectors])
    build = ShardBuild(spec=IndexSpec(factory="IVF64,SQfp16"))
    write_bundle(folder / "b", model, labels, build, {})
    shares = rng.random(LABELS)
    sets = [
        {"share": share, "side": "left" if share < 0.5 else "right"} for share in shares.tolist()
    ]
    annotate_labels(folder / "b", dict(zip(uids, sets, strict=True)))
    return Snapshot.load(str(folder / "b"), "a", threads=1)


@pytest.mark.parametrize(
    ("wanted", "share"),
    [
        (Filter(attributes={"side": "left"}), 0.5),
        (Filter(attributes={"side": ["left", "middle"], "share": Range(gte=0.1)}), 0.4),
        (Filter(attributes={"share": Range(lt=0.05)}), 0.05),
        (Filter(attributes={"share": Range(gte=0.5, lt=0.505)}), 0.005),
    ],
)
@pytest.mark.parametrize("queries", [1, 300])
def test_recall_and_violations(
    wanted: Filter,
    share: float,
    queries: int,
    snapshot: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Only the smallest share is compared exhaustively, the others are searched in the lists.
    monkeypatch.setattr(label_index, "FLAT_ROWS", 300)
    rng = np.random.default_rng(queries)
    retriever = snapshot.retriever
    query_BD = retriever.labels.vectors_of(
        rng.integers(LABELS, size=300)
    ) + 0.3 * rng.standard_normal((300, DIM))
    query_BD = query_BD.astype(np.float32)
    view = snapshot.view(wanted)
    parts = [view.top_labels(query_BD[i : i + queries], K).ids for i in range(0, 300, queries)]
    found = np.concatenate(parts)
    allowed = snapshot.attributes.mask(wanted.attributes)
    assert abs(allowed.mean() - share) < 0.01
    assert (found >= 0).all()
    assert allowed[found].all()
    rows = np.flatnonzero(allowed)
    scores = query_BD @ retriever.labels.vectors_of(rows).T
    best = rows[np.argsort(-scores, axis=1)[:, :K]]
    recall = np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(found, best, strict=True)])
    assert recall >= 0.95
    assert snapshot.view(wanted) is view, "views of the last filters are kept"


def test_a_bound_of_more_digits_than_a_float_holds_is_exact() -> None:
    """Such as a time in nanoseconds."""
    first = 1 << 53
    attributes = LabelAttributes(2).with_rows(2, {0: {"at": first}, 1: {"at": first + 1}})
    body = f'{{"attributes": {{"at": {{"gte": {first + 1}}}}}}}'
    wanted = Filter.model_validate_json(body)
    assert attributes.mask(wanted.attributes).tolist() == [False, True]


def adding(num_attributes: int) -> dict[str, object]:
    """An operation with attributes of wrong types."""
    attributes = {f"a{number}": [] for number in range(num_attributes)}
    return {"op": "add", "uid": "u", "text": "x", "attributes": attributes}


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (SearchRequest, {"texts": ["a"], "fields": [0] * 500_000}),
        (
            SearchRequest,
            {"texts": ["a"], "filter": {"attributes": dict.fromkeys(map(str, range(9)))}},
        ),
        (SearchRequest, {"texts": ["a"], "vectors": [["x"] * 60_000]}),
        (OperationsRequest, {"operations": [adding(80_000)]}),
        (OperationsRequest, {"operations": [adding(33)] * 1000}),
        (OperationsRequest, {"operations": [{"op": "add"}] * 1000}),
    ],
    ids=["fields", "filter", "vector", "attributes", "many operations", "operations"],
)
def test_a_long_list_of_mistakes_is_one_error(schema: type[Schema], body: object) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps(body))
    assert caught.value.error_count() == 1
