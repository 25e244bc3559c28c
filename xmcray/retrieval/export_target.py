"""What `vector_export` gives each system to write: blocks of labels, and a folder for its files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xmcray.types import Float32Array, Int64Array

FILE_ROWS = 100_000  # labels of one file


def label_block(
    label_ids: Int64Array, names: pa.Table, vectors: Float32Array, attributes: pa.Table | None
) -> pa.Table:
    """Labels that can be answered, in the order of the bundle: the rows that all systems get.

    Args:
        label_ids: int64 [n], source ids.
        names: uid and text of the same labels.
        vectors: float32 [n, D].
        attributes: a column per attribute, null where a label lacks it; None if no label has any.
    Returns:
        The columns label_id, uid, text, vector and, if any label has them, attributes.
    """
    num_labels, dim = vectors.shape
    ends = pa.array(np.arange(num_labels + 1) * dim, pa.int32())
    columns = {
        "label_id": pa.array(label_ids),
        "uid": names["uid"],
        "text": names["text"],
        "vector": pa.ListArray.from_arrays(ends, pa.array(vectors.ravel())),
    }
    if attributes is not None:
        columns["attributes"] = attributes.to_struct_array()
    return pa.table(columns)


@dataclass(slots=True)
class ExportTarget:
    """Where a system's files go.

    Attributes:
        folder: the folder to fill.
        dim: D.
        attributes: the attributes that labels have; None if no label has any.
        notes: what a reader of the README must know, a sentence each.
    """

    folder: Path
    dim: int
    attributes: pa.Schema | None
    notes: list[str]

    def write_lines(
        self, name: str, blocks: Iterable[pa.Table], to_lines: Callable[[pa.Table], Iterator[str]]
    ) -> None:
        """Writes lines of ASCII to files such as points-00000.jsonl."""

        def open_lines(path: Path, block: pa.Table) -> Any:
            return path.open("w", encoding="ascii")

        for file, block in self._files(name, blocks, open_lines):
            file.writelines(f"{line}\n" for line in to_lines(block))

    def write_tables(self, blocks: Iterable[pa.Table]) -> None:
        """Writes labels-00000.parquet and further files."""

        def open_table(path: Path, block: pa.Table) -> Any:
            # Vectors do not gain by dictionaries, and every reader knows snappy.
            return pq.ParquetWriter(path, block.schema, compression="snappy", use_dictionary=False)

        for file, block in self._files("labels-{}.parquet", blocks, open_table):
            file.write_table(block)

    def _files(
        self, name: str, blocks: Iterable[pa.Table], open_file: Callable[[Path, pa.Table], Any]
    ) -> Iterator[tuple[Any, pa.Table]]:
        """Yields each block with the file to write it to; a file gets about FILE_ROWS labels.

        Args:
            name: name of the files, with {} for the number.
            blocks: what to write.
            open_file: opens a file whose first block is given.
        """
        num_files = 0
        rows_in_file = FILE_ROWS
        file = None
        with contextlib.ExitStack() as stack:
            for block in blocks:
                if rows_in_file >= FILE_ROWS:
                    stack.close()
                    path = self.folder / name.format(f"{num_files:05d}")
                    file = stack.enter_context(open_file(path, block))
                    num_files += 1
                    rows_in_file = 0
                yield file, block
                rows_in_file += len(block)

    def write_text(self, name: str, text: str) -> None:
        """Writes a small file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def filled(self, template: str) -> str:
        """A template with the width of the vectors in place of DIM.

        Names of attributes come in afterwards, as they may contain DIM themselves.
        """
        return template.replace("DIM", str(self.dim))
