"""Texts of `vector_export`: READMEs, collections of Qdrant and Milvus, and a Vespa application."""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = (
    "The bundle has a memory of training queries that vote; these are the vectors of its labels alone, so answers are"
    " those of `xmcray search --set memory.weight=0`, not those of the bundle's own settings."
)

FUSED = (
    "The bundle adds up several parts; these are the vectors of its labels alone, so answers are those of its label"
    " vectors, not those of the bundle."
)

SEVERAL = (
    "The bundle has several members, and these are the label vectors of the first. A query's vector is the vectors of all"
    " members, one after another: search with its first DIM numbers."
)

_HEAD = """# LABELS label vectors of width DIM

A label's score is the inner product of its vector with the query's. A query's vector is made by the bundle:

    from xmcray.retrieval.retriever import Retriever
    Retriever.load("BUNDLE").encode(["a query"])[0].tolist()

or by a server of it (`xmcray serve BUNDLE`): `POST /v1/encode`. Do not normalise it.
"""

_SYSTEMS = {
    "parquet": """
`labels-*.parquet`: `label_id` (the label's line in the files of the corpus), `uid`, `text`, `vector` (list of DIM
float32), and `attributes` (a struct) where labels have any. Exact search with DuckDB:

    SELECT label_id, uid, text, list_inner_product(vector, QUERY::FLOAT[]) AS score
    FROM 'labels-*.parquet' ORDER BY score DESC LIMIT 10;
""",
    "qdrant": """
Distance: `Dot`. A point's id is the label's source id; uid, text and attributes are its payload. Each line of
`points-*.jsonl` is the body of one upsert.

    curl -X PUT localhost:6333/collections/labels -H 'Content-Type: application/json' --data-binary @collection.json
    cat points-*.jsonl | split -l 1 --filter="curl -sS --fail-with-body -X PUT -H 'Content-Type: application/json' \\
      --data-binary @- 'localhost:6333/collections/labels/points?wait=true'"

Search: `POST /collections/labels/points/query` with `{"query": [...], "limit": 10, "with_payload": true}`.
""",
    "milvus": """
Metric: `IP`. `collection.json` makes the collection with its index, `import.json` names the files of the bulk import.
Their paths are keys in the bucket of your Milvus; `minio` is the alias of its MinIO and `a-bucket` the bucket here.

    curl -X POST localhost:19530/v2/vectordb/collections/create -H 'Content-Type: application/json' -d @collection.json
    mc cp labels-*.parquet minio/a-bucket/labels/
    curl -X POST localhost:19530/v2/vectordb/jobs/import/create -H 'Content-Type: application/json' -d @import.json
    curl -X POST localhost:19530/v2/vectordb/jobs/import/describe -H 'Content-Type: application/json' \\
      -d '{"jobId": "ID"}'
    curl -X POST localhost:19530/v2/vectordb/collections/load -H 'Content-Type: application/json' \\
      -d '{"collectionName": "labels"}'
""",
    "vespa": """
Distance: `dotproduct` (Vespa 8.170 or newer). Documents are `id:xmcray:label::UID`; a character that Vespa accepts
nowhere is percent-encoded in the id, as is `%`, and a blank in the fields. Attributes are fields `attribute_NAME`.

    vespa deploy --wait 300 application
    vespa feed documents-*.jsonl
    vespa query 'yql=select label_id, uid, text from label where {targetHits: 10}nearestNeighbor(vector, q)' \\
      ranking=inner_product 'input.query(q)=[...]'

`application/services.xml` is for one node; set redundancy and nodes for more.
""",
    "lancedb": """
Distance: `dot`. Columns are those of plain Parquet, with vectors of a fixed width.

    import glob, lancedb, pyarrow.dataset
    files = pyarrow.dataset.dataset(sorted(glob.glob("labels-*.parquet")))
    table = lancedb.connect("DATABASE").create_table("labels", files.to_batches(), schema=files.schema)
    table.search(QUERY).distance_type("dot").limit(10).to_list()

`_distance` of an answer is 1 - score.
""",
    "weaviate": """
Distance: `dot`. An object's id is a UUID of the label's source id; label_id, uid and text are its properties, and
attributes are `attribute_NAME`. Each line of `objects-*.jsonl` is the body of one batch.

    curl -X POST localhost:8080/v1/schema -H 'Content-Type: application/json' -d @collection.json
    cat objects-*.jsonl | split -l 1 --filter="curl -sS --fail-with-body -X POST -H 'Content-Type: application/json' \\
      --data-binary @- localhost:8080/v1/batch/objects"

Search: `client.collections.get("Label").query.near_vector([...], limit=10)` in its Python client. The reply of a batch has a
result for each object: look for `errors` there.
""",
}

QDRANT_COLLECTION = """{
 "vectors": {
  "size": DIM,
  "distance": "Dot"
 }
}
"""

MILVUS_COLLECTION = """{
 "collectionName": "labels",
 "schema": {
  "fields": [
   {
    "fieldName": "label_id",
    "dataType": "Int64",
    "isPrimary": true
   },
   {
    "fieldName": "uid",
    "dataType": "VarChar",
    "elementTypeParams": {
     "max_length": 65535
    }
   },
   {
    "fieldName": "text",
    "dataType": "VarChar",
    "elementTypeParams": {
     "max_length": 65535
    }
   },
   {
    "fieldName": "vector",
    "dataType": "FloatVector",
    "elementTypeParams": {
     "dim": DIM
    }
   }ATTRIBUTES
  ]
 },
 "indexParams": [
  {
   "fieldName": "vector",
   "indexName": "vector",
   "metricType": "IP",
   "indexType": "AUTOINDEX"
  }
 ]
}
"""

MILVUS_ATTRIBUTES = """,
   {
    "fieldName": "attributes",
    "dataType": "JSON"
   }"""

VESPA_SCHEMA = """schema label {
    document label {
        field label_id type long {
            indexing: summary | attribute
        }
        field uid type string {
            indexing: summary | attribute
        }
        field text type string {
            indexing: summary | index
            index: enable-bm25
        }
        field vector type tensor<float>(x[DIM]) {
            indexing: attribute | index
            attribute {
                distance-metric: dotproduct
            }
        }
ATTRIBUTES    }
    rank-profile inner_product {
        inputs {
            query(q) tensor<float>(x[DIM])
        }
        first-phase {
            expression: sum(query(q) * attribute(vector))
        }
    }
}
"""

VESPA_SERVICES = """<?xml version="1.0" encoding="utf-8" ?>
<services version="1.0">
  <container id="default" version="1.0">
    <document-api/>
    <search/>
    <nodes>
      <node hostalias="node1"/>
    </nodes>
  </container>
  <content id="labels" version="1.0">
    <min-redundancy>1</min-redundancy>
    <documents>
      <document type="label" mode="index"/>
    </documents>
    <nodes>
      <node hostalias="node1" distribution-key="0"/>
    </nodes>
  </content>
</services>
"""


def vespa_field(name: str, kind: str) -> str:
    """The lines of a schema for an attribute of labels."""
    return f"        field {name} type {kind} {{\n            indexing: summary | attribute\n        }}\n"


def readme(system: str, labels: int, dim: int, notes: Sequence[str]) -> str:
    """The README.md of an export."""
    text = (_HEAD + _SYSTEMS[system]).replace("DIM", str(dim)).replace("LABELS", f"{labels:,}")
    return "\n".join([text, *(f"{note}\n" for note in notes)])
