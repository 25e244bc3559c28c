"""Finds damage in the write-ahead log of an SQLite database.

SQLite stops reading its write-ahead log at the first frame whose checksum is wrong, because that is
how an unfinished write looks, and forgets all frames behind it. A flipped bit in the middle would
so take back commits that were acknowledged. This check tells the two apart. It is done before
SQLite opens the database.

Format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
from pathlib import Path

from xmcray.errors import StorageError

_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_BIG_ENDIAN_MAGIC = 0x377F0683
_LITTLE_ENDIAN_MAGIC = 0x377F0682


def check_wal(path: Path) -> None:
    """Checks every frame of a write-ahead log.

    A rest that is shorter than a frame, or only zeros, is what a crash leaves of a commit that was
    never acknowledged.

    Args:
        path: the write-ahead log; it may be missing.
    Raises:
        StorageError: a frame is damaged.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    if len(data) < _HEADER_BYTES or not any(data):
        return
    magic, _, page_bytes, _, salt_1, salt_2, *expected = struct.unpack_from(">8I", data)
    order = {_BIG_ENDIAN_MAGIC: ">", _LITTLE_ENDIAN_MAGIC: "<"}.get(magic)
    if order is None or _checksum(data[:24], (0, 0), order) != tuple(expected):
        raise _damaged(path, 0, is_last=not any(data[_HEADER_BYTES:]))
    frame_bytes = _FRAME_HEADER_BYTES + page_bytes
    checksum = (expected[0], expected[1])
    offset = _HEADER_BYTES
    stale = False
    while offset + frame_bytes <= len(data) and any(data[offset:]):
        frame = data[offset : offset + frame_bytes]
        _, _, frame_salt_1, frame_salt_2, *expected = struct.unpack_from(">6I", frame)
        # Frames of an earlier turn of the file differ in both salts. No single flipped bit does
        # that.
        if frame_salt_1 != salt_1 and frame_salt_2 != salt_2:
            stale = True
        else:
            # Each checksum continues the one before, over the page's number and size and its
            # content.
            checksum = _checksum(frame[:8] + frame[_FRAME_HEADER_BYTES:], checksum, order)
            if stale or (frame_salt_1, frame_salt_2, *checksum) != (salt_1, salt_2, *expected):
                raise _damaged(path, offset, is_last=not any(data[offset + frame_bytes :]))
        # Frames follow each other without a gap.
        offset += frame_bytes


def _checksum(data: bytes, start: tuple[int, int], order: str) -> tuple[int, int]:
    # Two sums modulo 2^32, as the format defines them; the byte order is the writer's.
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    even, odd = start
    for i in range(0, len(words), 2):
        even = (even + words[i] + odd) & 0xFFFFFFFF
        odd = (odd + words[i + 1] + even) & 0xFFFFFFFF
    return even, odd


def _damaged(path: Path, offset: int, is_last: bool) -> StorageError:
    advice = "restore the file"
    if is_last:
        advice += (
            "; if the machine lost power during this write, `truncate -s"
            f" {offset} {path}` drops it, and it was never acknowledged"
        )
    return StorageError(
        f"{path}, byte {offset}: the file is damaged (its checksum differs); {advice}"
    )
