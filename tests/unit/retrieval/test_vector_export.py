"""Vectors for other systems: what they read back finds what the bundle finds.

Odd texts do not break a file.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
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

LABELS = 500
DIM = 12
K = 10
TEXTS = [f'label {number} of "{"abc"[number % 3]}"\n\\ ü' for number in range(LABELS)]
# Texts that some systems cannot hold: control characters, and one that is long.
ODD = {
    7: "a\0b\ufdd0c\U0001ffff",
    8: "\N{SNOWMAN}" * 30_000,
}
ATTRIBUTES = {
    "a price": 2.5,
    "a_price": True,
    "DIM": "d\x07e",
    "year": 1999,
}
UIDS = [f"u{number}" for number in range(LABELS)]
UIDS[7] = "uid 7%\x1b"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of vectors that are not normalised.

    One label joined later, with attributes, and two were removed.
    """
    path = tmp_path_factory.mktemp("export") / "bundle"
    tokenizer = train_wordpiece(iter(TEXTS), vocab_size=300, max_len=8)
    encoder = build_encoder(EncoderConfig(dim=DIM), tokenizer, None, seed=0).eval()
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((LABELS, DIM), np.float32)
    lengths = rng.uniform(0.1, 3, (LABELS, 1)).astype(np.float32)
    labels = BundleLabels(
        uids=UIDS,
        texts=[ODD.get(number, text) for number, text in enumerate(TEXTS)],
        order=rng.permutation(LABELS),
        vectors=[vectors * lengths],
    )
    write_bundle(
        path,
        BundleModel(
            encoder=encoder,
            head=Head(DIM),
            tokenizer=tokenizer,
        ),
        labels,
        ShardBuild(spec=IndexSpec(), shard_rows=190),
        {"by": "test"},
    )
    add_labels(path, [NewLabel("joined", "label 3 of b", ATTRIBUTES)])
    remove_labels(path, ["u0", "u499"])
    return path


@pytest.fixture(scope="module")
def queries() -> Float32Array:
    rng = np.random.default_rng(1)
    return rng.standard_normal((64, DIM), np.float32)


@pytest.fixture(scope="module")
def bundle_ids(bundle: Path, queries: Float32Array) -> Int64Array:
    """The labels that the bundle answers."""
    retriever = Retriever.load(bundle, threads=1)
    return retriever.top_labels(queries, K, exact=True).ids


def vector_of(bundle: Path, label_id: int) -> Float32Array:
    labels = Retriever.load(bundle).labels
    return labels.vectors_of(np.array([label_id]))[0]


def overlap(theirs: list[list[int]], ours: Int64Array) -> float:
    """The mean share of the bundle's answers that another system has found."""
    shares = []
    for their_ids, our_ids in zip(theirs, ours.tolist(), strict=True):
        shared = set(their_ids) & set(our_ids)
        shares.append(len(shared) / K)
    return float(np.mean(shares))


def records(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The JSON objects of all lines of some files."""
    objects = []
    for path in sorted(folder.glob(pattern)):
        lines = path.read_text("ascii").splitlines()
        objects += [json.loads(line) for line in lines]
    return objects


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_parquet_finds_the_same_by_exact_search(
    bundle: Path,
    queries: Float32Array,
    bundle_ids: Int64Array,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vector_export, "BLOCK_BYTES", 4 * DIM * 60)
    monkeypatch.setattr(export_target, "FILE_ROWS", 150)
    out = tmp_path / "out"

    assert export_vectors(bundle, out, "parquet") == LABELS - 1

    open_artifact(out, "vectors")
    files = sorted(out.glob("labels-*.parquet"))
    assert len(files) > 2
    tables = [pq.read_table(path) for path in files]
    columns = pa.concat_tables(tables).to_pydict()

    labels = Retriever.load(bundle).labels
    ids = np.array(columns["label_id"])
    vectors = np.array(columns["vector"], np.float32)
    id_of_uid = dict(zip(columns["uid"], columns["label_id"], strict=True))
    assert id_of_uid == labels.ids_by_uid()
    assert columns["text"] == labels.texts(ids)
    np.testing.assert_array_equal(vectors, labels.vectors_of(ids))

    attributes = dict(zip(columns["label_id"], columns["attributes"], strict=True))
    assert attributes[LABELS] == ATTRIBUTES
    assert set(attributes[1].values()) == {None}

    order = np.argsort(-(queries @ vectors.T), axis=1)
    theirs = ids[order[:, :K]]
    assert overlap(theirs.tolist(), bundle_ids) >= 0.99


def test_qdrant_finds_the_same(
    bundle: Path,
    queries: Float32Array,
    bundle_ids: Int64Array,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import qdrant_client  # here, because it is slow to import

    monkeypatch.setattr(vector_systems, "REQUEST_ITEMS", 40)
    out = tmp_path / "out"

    export_vectors(bundle, out, "qdrant")

    models = qdrant_client.models
    client = qdrant_client.QdrantClient(":memory:")
    settings = read_json(out / "collection.json")
    client.create_collection("labels", models.VectorParams(**settings["vectors"]))
    for body in records(out, "points-*.jsonl"):
        upsert = models.PointsList(**body)
        assert len(upsert.points) <= 40
        client.upsert("labels", upsert.points)
    assert client.count("labels").count == LABELS - 1

    (odd,) = client.retrieve("labels", [7], with_vectors=True)
    assert odd.payload == {"uid": UIDS[7], "text": ODD[7]}
    odd_vector = np.array(odd.vector, np.float32)
    np.testing.assert_array_equal(odd_vector, vector_of(bundle, 7))
    (joined,) = client.retrieve("labels", [LABELS])
    assert joined.payload["attributes"] == ATTRIBUTES

    theirs = []
    for query in queries.tolist():
        points = client.query_points("labels", query=query, limit=K).points
        theirs.append([point.id for point in points])
    assert overlap(theirs, bundle_ids) >= 0.99


def test_lancedb_finds_the_same(
    bundle: Path,
    queries: Float32Array,
    bundle_ids: Int64Array,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"

    export_vectors(bundle, out, "lancedb")

    paths = [str(path) for path in out.glob("labels-*.parquet")]
    files = pyarrow.dataset.dataset(sorted(paths))
    vector_type = files.schema.field("vector").type
    assert str(vector_type) == f"fixed_size_list<element: float>[{DIM}]"

    import lancedb  # here, because it is slow to import

    database = lancedb.connect(tmp_path / "database")
    table = database.create_table("labels", files.to_batches(), schema=files.schema)
    assert table.count_rows() == LABELS - 1

    theirs = []
    for query in queries:
        search = table.search(query).distance_type("dot").limit(K)
        theirs.append([row["label_id"] for row in search.to_list()])
    assert overlap(theirs, bundle_ids) >= 0.99


def test_weaviate_objects(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vector_systems, "REQUEST_ITEMS", 40)
    out = tmp_path / "out"

    export_vectors(bundle, out, "weaviate")

    objects = []
    sizes = []
    for body in records(out, "objects-*.jsonl"):
        objects += body["objects"]
        sizes.append(len(body["objects"]))
    assert max(sizes) == 40
    # UUID() refuses what is not one.
    ids = {uuid.UUID(each["id"]) for each in objects}
    assert len(ids) == LABELS - 1

    by_label = {each["properties"]["label_id"]: each for each in objects}
    odd = by_label[7]
    assert odd["class"] == "Label"
    assert odd["properties"] == {
        "label_id": 7,
        "uid": UIDS[7],
        "text": ODD[7],
    }
    odd_vector = np.array(odd["vector"], np.float32)
    np.testing.assert_array_equal(odd_vector, vector_of(bundle, 7))

    collection = read_json(out / "collection.json")
    assert collection["vectorIndexConfig"]["distance"] == "dot"
    kinds = {each["name"]: each["dataType"][0] for each in collection["properties"]}
    expected = {
        "attribute_a_price": ("number", 2.5),
        "attribute_a_price_": ("boolean", True),
        "attribute_DIM": ("text", "d\x07e"),
        "attribute_year": ("int", 1999),
    }
    joined = by_label[LABELS]["properties"]
    for name, (kind, value) in expected.items():
        assert kinds[name] == kind
        assert joined[name] == value


def test_vespa_puts(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    export_vectors(bundle, out, "vespa")

    puts = records(out, "documents-*.jsonl")
    document_ids = {put["put"] for put in puts}
    assert len(document_ids) == LABELS - 1
    by_label = {put["fields"]["label_id"]: put for put in puts}

    plain = by_label[3]
    vector = plain["fields"].pop("vector")
    values = np.array(vector["values"], np.float32)
    np.testing.assert_array_equal(values, vector_of(bundle, 3))
    assert plain == {
        "put": "id:xmcray:label::u3",
        "fields": {
            "label_id": 3,
            "uid": "u3",
            "text": TEXTS[3],
        },
    }

    # Vespa takes no control characters in a string.
    odd = by_label[7]
    assert odd["put"] == "id:xmcray:label::uid 7%25%1B"
    assert odd["fields"]["uid"] == "uid 7% "
    assert odd["fields"]["text"] == "a b c "

    schema_path = out / "application" / "schemas" / "label.sd"
    schema = schema_path.read_text()
    expected = {
        "attribute_a_price": ("double", 2.5),
        "attribute_a_price_": ("bool", True),
        "attribute_DIM": ("string", "d e"),
        "attribute_year": ("long", 1999),
    }
    joined = by_label[LABELS]["fields"]
    for name, (kind, value) in expected.items():
        assert joined[name] == value
        assert f"field {name} type {kind} {{\n" in schema
    assert schema.count(f"tensor<float>(x[{DIM}])") == 2
    assert schema.count("{") == schema.count("}")


def test_attributes_that_milvus_does_not_take_are_refused(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_systems, "MAX_JSON", 10)
    with pytest.raises(BundleError, match="attributes of a label have more than 10 bytes"):
        export_vectors(bundle, tmp_path / "out", "milvus")
    assert not (tmp_path / "out").exists()


def test_milvus_takes_no_longer_strings(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    export_vectors(bundle, out, "milvus")

    table = pq.read_table(out / "labels-00000.parquet")
    assert [str(each) for each in table.schema.types] == [
        "int64",
        "string",
        "string",
        "list<element: float>",
        "string",
    ]
    row_of = {row["label_id"]: row for row in table.to_pylist()}
    assert json.loads(row_of[LABELS]["attributes"]) == ATTRIBUTES
    assert row_of[1]["attributes"] == "{}"

    # Milvus takes at most 65,535 bytes, and the character has three.
    assert row_of[8]["text"] == ODD[8][: 65_535 // 3]
    readme = (out / "README.md").read_text()
    assert "1 texts were cut to 65,535 bytes" in readme

    collection = read_json(out / "collection.json")
    fields = collection["schema"]["fields"]
    assert [field["fieldName"] for field in fields] == table.column_names
    assert collection["indexParams"][0]["metricType"] == "IP"
    import_request = read_json(out / "import.json")
    assert import_request["files"] == [["labels/labels-00000.parquet"]]


def test_a_memory_gives_its_labels_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = write_memory(tmp_path)
    assert tuple(SYSTEMS) == VECTOR_SYSTEMS

    for system in SYSTEMS:
        out = tmp_path / system
        assert run_command(f"export {memory} --to {system} --out {out}") == 0
        assert "47 label vectors" in capsys.readouterr().out
        readme = (out / "README.md").read_text()
        assert "memory of training queries" in readme

    table = pq.read_table(tmp_path / "parquet" / "labels-00000.parquet")
    label_ids = np.array(table["label_id"])
    vectors = np.array(table["vector"].to_pylist(), np.float32)
    retriever = Retriever.load(memory)
    query_BD = retriever.encode([f"w{number}x1 w{number}x2" for number in range(20)])
    order = np.argsort(-(query_BD @ vectors.T), axis=1)
    theirs = label_ids[order[:, :5]]
    # Without the votes of training queries.
    ours = retriever.top_labels(query_BD, 5, memory=MemoryConfig(weight=0)).ids
    np.testing.assert_array_equal(np.sort(theirs), np.sort(ours))


def test_mistakes(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "x"
    assert run_command(f"export {bundle} --to qdrnt --out {out}") == 2
    assert run_command(f"export {tmp_path}/none --to qdrant --out {out}") == 2
    assert capsys.readouterr().err.count("\n") == 2
    assert list(tmp_path.iterdir()) == []

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes").write_text("mine")
    with pytest.raises(StorageError, match="exists and is not empty"):
        export_vectors(bundle, mine, "parquet")


def test_a_number_that_is_not_finite_is_no_json(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def infinite_rows(
        path: Path,
        start: int,
        rows: int,
    ) -> Float32Array:
        return np.full((rows, DIM), np.inf, np.float32)

    monkeypatch.setattr(vector_export, "_read_rows", infinite_rows)

    with pytest.raises(BundleError, match="not finite"):
        export_vectors(bundle, tmp_path / "x", "vespa")

    assert list(tmp_path.iterdir()) == []
