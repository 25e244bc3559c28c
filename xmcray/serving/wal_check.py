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
_BYTE_ORDERS = {0x377F0683: ">", 0x377F0682: "<"}  # by magic number


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
    # Everything from here on is zeros.
    num_used = len(data.rstrip(b"\0"))
    if len(data) < _HEADER_BYTES or not num_used:
        return
    magic, _, page_bytes, _, *salts, checksum_1, checksum_2 = struct.unpack_from(">8I", data)
    order = _BYTE_ORDERS.get(magic)
    checksum = (checksum_1, checksum_2)
    if order is None or _checksum(data[:24], (0, 0), order) != checksum:
        raise _damaged(path, 0, is_last=num_used <= _HEADER_BYTES)
    frame_bytes = _FRAME_HEADER_BYTES + page_bytes
    is_stale = False
    # Frames follow each other without a gap.
    for offset in range(_HEADER_BYTES, num_used, frame_bytes):
        frame = data[offset : offset + frame_bytes]
        if len(frame) < frame_bytes:
            return
        _, _, *frame_salts, checksum_1, checksum_2 = struct.unpack_from(">6I", frame)
        # Frames of an earlier turn of the file differ in both salts. No single flipped bit does
        # that.
        if frame_salts[0] != salts[0] and frame_salts[1] != salts[1]:
            is_stale = True
            continue
        # Each checksum continues the one before, over the page's number and size and its content.
        checksum = _checksum(frame[:8] + frame[_FRAME_HEADER_BYTES:], checksum, order)
        is_right = frame_salts == salts and checksum == (checksum_1, checksum_2)
        if is_stale or not is_right:
            raise _damaged(path, offset, is_last=num_used <= offset + frame_bytes)


def _checksum(data: bytes, start: tuple[int, int], order: str) -> tuple[int, int]:
    # Two sums modulo 2^32, as the format defines them; the byte order is the writer's.
    even, odd = start
    for even_word, odd_word in struct.iter_unpack(f"{order}2I", data):
        even = (even + even_word + odd) & 0xFFFFFFFF
        odd = (odd + odd_word + even) & 0xFFFFFFFF
    return even, odd


def _damaged(path: Path, offset: int, is_last: bool) -> StorageError:
    message = f"{path}, byte {offset}: the file is damaged (its checksum differs); restore the file"
    if is_last:
        message += (
            f"; if the machine lost power during this write, `truncate -s {offset} {path}` drops it,"
            " and it was never acknowledged"
        )
    return StorageError(message)
