"""Vectors for other systems: what they read back finds what the bundle finds, and odd texts do not break a file."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from bundles import write_memory
from shell import run_command

from xmcray.api import VECTOR_SYSTEMS
from xmcray.data.tokens import train_wordpiece
from xmcray.errors import BundleError, StorageError
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import Head
from xmcray.retrieval import export_target, vector_export, vector_systems
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.labels import NewLabel, add_labels, remove_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.retrieval.vector_export import export_vectors
from xmcray.retrieval.vector_systems import SYSTEMS
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.artifact import open_artifact
from xmcray.types import Float32Array, Int64Array

LABELS, DIM, K = 500, 12, 10
TEXTS = [f'label {number} of "{"abc"[number % 3]}"\n\\ ü' for number in range(LABELS)]
ODD = {7: "a\0b\ufdd0c\U0001ffff", 8: "\N{SNOWMAN}" * 30_000}
ATTRIBUTES = {"a price": 2.5, "a_price": True, "lang": "d\x07e", "year": 1999}
UIDS = [f"uid {number}%\x1b" if number == 7 else f"u{number}" for number in range(LABELS)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, one label that joined later, with attributes, and two removed; vectors are not normalised."""
    path = tmp_path_factory.mktemp("export") / "bundle"
    texts = [ODD.get(number, text) for number, text in enumerate(TEXTS)]
    tokenizer = train_wordpiece(iter(TEXTS), vocab_size=300, max_len=8)
    encoder = build_encoder(EncoderConfig(dim=DIM), tokenizer, None, seed=0).eval()
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((LABELS, DIM), np.float32) * rng.uniform(
        0.1, 3, (LABELS, 1)
    ).astype(np.float32)
    model = BundleModel(encoder=encoder, head=Head(DIM), tokenizer=tokenizer)
    order = rng.permutation(LABELS)
    labels = BundleLabels(uids=UIDS, texts=texts, order=order, vectors=[vectors])
    build = ShardBuild(spec=IndexSpec(), shard_rows=190)
    write_bundle(path, model, labels, build, {"by": "test"})
    add_labels(path, [NewLabel("joined", "label 3 of b", ATTRIBUTES)])
    remove_labels(path, ["u0", "u499"])
    return path


def found(bundle: Path) -> tuple[Float32Array, Int64Array]:
    """Query vectors and the labels that the bundle answers."""
    query_BD = np.random.default_rng(1).standard_normal((64, DIM), np.float32)
    return query_BD, Retriever.load(bundle, threads=1).top_labels(query_BD, K, exact=True).ids


def overlap(theirs: list[list[int]], ours: Int64Array) -> float:
    return float(
        np.mean([len(set(a) & set(b)) / K for a, b in zip(theirs, ours.tolist(), strict=True)])
    )


def records(folder: Path, pattern: str) -> list[dict]:
    return [
        json.loads(line)
        for path in sorted(folder.glob(pattern))
        for line in path.read_text("ascii").splitlines()
    ]


def test_parquet_finds_the_same_by_exact_search(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_export, "BLOCK_BYTES", 4 * DIM * 60)
    monkeypatch.setattr(export_target, "FILE_ROWS", 150)
    assert export_vectors(bundle, tmp_path / "out", "parquet") == LABELS - 1
    open_artifact(tmp_path / "out", "vectors")
    files = sorted((tmp_path / "out").glob("labels-*.parquet"))
    assert len(files) > 2
    tables = [pq.read_table(path).to_pydict() for path in files]
    rows = [
        row
        for t in tables
        for row in zip(t["label_id"], t["uid"], t["text"], t["vector"], strict=True)
    ]
    retriever = Retriever.load(bundle)
    assert {uid: label_id for label_id, uid, _, _ in rows} == retriever.labels.ids_by_uid()
    ids = np.array([row[0] for row in rows])
    assert [row[2] for row in rows] == retriever.labels.texts(ids)
    vectors = np.array([row[3] for row in rows], np.float32)
    np.testing.assert_array_equal(vectors, retriever.labels.vectors_of(ids))
    more = dict(
        zip(ids.tolist(), [value for t in tables for value in t["attributes"]], strict=True)
    )
    assert more[LABELS] == ATTRIBUTES
    assert set(more[1].values()) == {None}
    query_BD, expected = found(bundle)
    theirs = ids[np.argsort(-(query_BD @ vectors.T), axis=1)[:, :K]]
    assert overlap(theirs.tolist(), expected) >= 0.99


def test_qdrant_finds_the_same(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import qdrant_client  # here, because it is slow to import

    monkeypatch.setattr(vector_systems, "POINTS", 40)
    export_vectors(bundle, tmp_path / "out", "qdrant")
    client, models = qdrant_client.QdrantClient(":memory:"), qdrant_client.models
    settings = json.loads((tmp_path / "out" / "collection.json").read_text())
    client.create_collection("labels", models.VectorParams(**settings["vectors"]))
    for body in records(tmp_path / "out", "points-*.jsonl"):
        upsert = models.PointsList(**body)
        assert len(upsert.points) <= 40
        client.upsert("labels", upsert.points)
    assert client.count("labels").count == LABELS - 1
    (odd,) = client.retrieve("labels", [7], with_vectors=True)
    assert odd.payload == {"uid": UIDS[7], "text": ODD[7]}
    assert client.retrieve("labels", [LABELS])[0].payload["attributes"] == ATTRIBUTES
    np.testing.assert_array_equal(
        np.array(odd.vector, np.float32), Retriever.load(bundle).labels.vectors_of(np.array([7]))[0]
    )
    query_BD, expected = found(bundle)
    answers = [
        client.query_points("labels", query=query.tolist(), limit=K).points for query in query_BD
    ]
    assert overlap([[point.id for point in points] for points in answers], expected) >= 0.99


def test_lancedb_finds_the_same(bundle: Path, tmp_path: Path) -> None:
    export_vectors(bundle, tmp_path / "out", "lancedb")
    files = pyarrow.dataset.dataset(sorted(map(str, (tmp_path / "out").glob("labels-*.parquet"))))
    assert str(files.schema.field("vector").type) == f"fixed_size_list<element: float>[{DIM}]"
    import lancedb  # here, because it is slow to import

    database = lancedb.connect(tmp_path / "database")
    table = database.create_table("labels", files.to_batches(), schema=files.schema)
    assert table.count_rows() == LABELS - 1
    query_BD, expected = found(bundle)
    answers = []
    for query in query_BD:
        rows = table.search(query).distance_type("dot").limit(K).to_list()
        answers.append([row["label_id"] for row in rows])
    assert overlap(answers, expected) >= 0.99


def test_weaviate_objects(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_systems, "POINTS", 40)
    export_vectors(bundle, tmp_path / "out", "weaviate")
    bodies = records(tmp_path / "out", "objects-*.jsonl")
    assert max(len(body["objects"]) for body in bodies) == 40
    objects = [one for body in bodies for one in body["objects"]]
    assert len({uuid.UUID(one["id"]) for one in objects}) == LABELS - 1
    by_id = {one["properties"]["label_id"]: one for one in objects}
    assert by_id[7]["class"] == "Label"
    assert by_id[7]["properties"] == {"label_id": 7, "uid": UIDS[7], "text": ODD[7]}
    np.testing.assert_array_equal(
        np.array(by_id[7]["vector"], np.float32),
        Retriever.load(bundle).labels.vectors_of(np.array([7]))[0],
    )
    collection = json.loads((tmp_path / "out" / "collection.json").read_text())
    assert collection["vectorIndexConfig"]["distance"] == "dot"
    kinds = {each["name"]: each["dataType"][0] for each in collection["properties"]}
    values = {
        "attribute_a_price": ("number", 2.5),
        "attribute_a_price_": ("boolean", True),
        "attribute_lang": ("text", "d\x07e"),
        "attribute_year": ("int", 1999),
    }
    for name, (kind, value) in values.items():
        assert kinds[name] == kind
        assert by_id[LABELS]["properties"][name] == value


def test_vespa_puts(bundle: Path, tmp_path: Path) -> None:
    export_vectors(bundle, tmp_path / "out", "vespa")
    puts = records(tmp_path / "out", "documents-*.jsonl")
    assert len({put["put"] for put in puts}) == LABELS - 1
    by_id = {put["fields"]["label_id"]: put for put in puts}
    fields = {"label_id": 3, "uid": "u3", "text": TEXTS[3]}
    vector = np.array(by_id[3]["fields"].pop("vector")["values"], np.float32)
    np.testing.assert_array_equal(
        vector, Retriever.load(bundle).labels.vectors_of(np.array([3]))[0]
    )
    assert by_id[3] == {"put": "id:xmcray:label::u3", "fields": fields}
    odd = by_id[7]
    assert odd["put"] == "id:xmcray:label::uid 7%25%1B"
    assert (odd["fields"]["uid"], odd["fields"]["text"]) == ("uid 7% ", "a b c ")
    known = {
        "attribute_a_price": 2.5,
        "attribute_a_price_": True,
        "attribute_lang": "d e",
        "attribute_year": 1999,
    }
    assert by_id[LABELS]["fields"].items() >= known.items()
    schema = (tmp_path / "out" / "application" / "schemas" / "label.sd").read_text()
    kinds = zip(known, ("double", "bool", "string", "long"), strict=True)
    assert all(f"field {name} type {kind} {{\n" in schema for name, kind in kinds)
    assert schema.count(f"tensor<float>(x[{DIM}])") == 2
    assert schema.count("{") == schema.count("}")


def test_milvus_takes_no_longer_strings(bundle: Path, tmp_path: Path) -> None:
    export_vectors(bundle, tmp_path / "out", "milvus")
    table = pq.read_table(tmp_path / "out" / "labels-00000.parquet")
    kinds = ["int64", "string", "string", "list<element: float>", "string"]
    assert list(map(str, table.schema.types)) == kinds
    attributes = dict(
        zip(table["label_id"].to_pylist(), table["attributes"].to_pylist(), strict=True)
    )
    assert (json.loads(attributes[LABELS]), attributes[1]) == (ATTRIBUTES, "{}")
    cut = table["text"].to_pylist()[table["label_id"].to_pylist().index(8)]
    assert cut == ODD[8][: 65_535 // 3]
    assert "1 texts were cut to 65,535 bytes" in (tmp_path / "out" / "README.md").read_text()
    collection = json.loads((tmp_path / "out" / "collection.json").read_text())
    assert [field["fieldName"] for field in collection["schema"]["fields"]] == table.column_names
    assert collection["indexParams"][0]["metricType"] == "IP"
    assert json.loads((tmp_path / "out" / "import.json").read_text())["files"] == [
        ["labels/labels-00000.parquet"]
    ]


def test_a_memory_gives_its_labels_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = write_memory(tmp_path)
    for system in SYSTEMS:
        assert run_command(f"export {memory} --to {system} --out {tmp_path}/{system}") == 0
        assert "47 label vectors" in capsys.readouterr().out
        assert "memory of training queries" in (tmp_path / system / "README.md").read_text()
    assert tuple(SYSTEMS) == VECTOR_SYSTEMS
    table = pq.read_table(tmp_path / "parquet" / "labels-00000.parquet")
    retriever = Retriever.load(memory)
    query_BD = retriever.encode([f"w{number}x1 w{number}x2" for number in range(20)])
    ours = retriever.top_labels(query_BD, 5, memory=MemoryConfig(weight=0)).ids
    order = np.argsort(-(query_BD @ np.array(table["vector"].to_pylist(), np.float32).T), axis=1)[
        :, :5
    ]
    np.testing.assert_array_equal(np.sort(np.array(table["label_id"])[order]), np.sort(ours))


def test_mistakes(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(f"export {bundle} --to qdrnt --out {tmp_path}/x") == 2
    assert run_command(f"export {tmp_path}/none --to qdrant --out {tmp_path}/x") == 2
    assert capsys.readouterr().err.count("\n") == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(StorageError, match="exists and is not empty"):
        export_vectors(bundle, tmp_path / "mine", "parquet")


def test_a_number_that_is_not_finite_is_no_json(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        vector_export,
        "_read_rows",
        lambda path, start, rows: np.full((rows, DIM), np.inf, np.float32),
    )
    with pytest.raises(BundleError, match="not finite"):
        export_vectors(bundle, tmp_path / "x", "vespa")
    assert list(tmp_path.iterdir()) == []
