"""Vectors of the texts that a frozen transformer is trained with.

Each vector is computed once, before training, and looked up by the tokens of its text.

    FOLDER/00000012.npy    float32 [8192, H], pooled states of texts 12 * 8192 and following, complete or absent

FOLDER belongs to one model and one corpus. Ranks share the work and read each other's files, and a
resumed run, or another run with the same folder, reuses them. Which texts are encoded together does
not depend on the ranks, so neither does a bit of the vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmcray.parallel import collectives
from xmcray.storage.path_errors import disk_errors
from xmcray.storage.whole_files import whole_file
from xmcray.types import Int64Array, Ragged, find_sorted, spans

FILE_ROWS = 8192
TEXTS_AT_ONCE = 1024


class EncodedTexts:
    """Vectors by tokens. Creation is collective: every rank makes one, with the same texts.

    Args:
        folder: of the files.
        num_texts: number of texts.
        tokens_of: tokens of texts by number, 0 .. num_texts - 1.
        encode: float [B, H] of a chunk of texts, without a graph.
    """

    def __init__(
        self,
        folder: Path,
        num_texts: int,
        tokens_of: Callable[[Int64Array], Ragged],
        encode: Callable[[Ragged], Tensor],
    ) -> None:
        keys: list[npt.NDArray[np.uint64]] = []
        paths: list[Path] = []
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for span in spans(num_texts, FILE_ROWS):
                tokens = tokens_of(np.arange(span.start, span.stop))
                # Every rank needs the keys of all texts, also of those that others encode.
                keys.append(text_keys(tokens))
                path = folder / f"{len(paths):08d}.npy"
                paths.append(path)
                # Ranks take turns, file by file.
                is_own = len(paths) % collectives.num_ranks() == collectives.rank()
                # A file that exists is complete: an interrupted run wrote it before.
                if is_own and not path.exists():
                    _write(path, tokens, encode)
        collectives.gather_objects(None)  # no rank reads before all have written
        # Mapped, because the vectors of all texts may be more than fit in memory.
        self._vectors = [np.load(path, mmap_mode="r") for path in paths]
        key_N = np.concatenate(keys)
        # Sorted keys are found by bisection; the order leads back to the number of the text.
        self._order = np.argsort(key_N)
        self._sorted_key_N = key_N[self._order]

    def sample(self, count: int) -> Tensor:
        """float64 [at most count, H], vectors of texts spread evenly over all of them."""
        num_texts = len(self._order)
        # Rounded up, so that there are not more than `count`.
        step = max(1, math.ceil(num_texts / count))
        rows = []
        for number, vectors in enumerate(self._vectors):
            # The first row of this file whose number among all texts is a multiple of the step.
            first = -number * FILE_ROWS % step
            rows.append(vectors[first::step])
        return torch.from_numpy(np.concatenate(rows)).double()

    def __call__(self, tokens: Ragged) -> Tensor:
        """float32 [B, H], vectors of texts that were encoded before, on the CPU."""
        key_B = text_keys(tokens)
        place_B, is_known_B = find_sorted(self._sorted_key_N, key_B)
        assert is_known_B.all(), "a text that is in no split of the training data"
        text_B = self._order[place_B]
        file_B, row_B = np.divmod(text_B, FILE_ROWS)
        hidden = self._vectors[0].shape[1]
        pooled_BH = np.empty((len(key_B), hidden), np.float32)
        # Each file is read once, for all of its texts.
        for file in np.unique(file_B):
            in_file = file_B == file
            file_rows = row_B[in_file]
            pooled_BH[in_file] = self._vectors[file][file_rows]
        return torch.from_numpy(pooled_BH)


def text_keys(tokens: Ragged) -> npt.NDArray[np.uint64]:
    """[B], a hash of each text's tokens and their order.

    Among n texts two share a hash with probability n^2 / 2^65.
    """
    # Token and place in one number, mixed by splitmix64 (a text has less than 2^20 tokens).
    numbers = tokens.values << 20 | tokens.places
    # 0 would be mixed into 0, as if the token were not there.
    mixed = numbers.astype(np.uint64) + np.uint64(1)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    # The hash of a text is the sum of its tokens' numbers: a difference of running sums, mod 2^64.
    no_tokens = np.zeros(1, np.uint64)
    sums = np.concatenate([no_tokens, np.cumsum(mixed)])
    sums_at_offsets = sums[tokens.offsets]
    keys: npt.NDArray[np.uint64] = np.diff(sums_at_offsets)
    return keys


def _write(path: Path, tokens: Ragged, encode: Callable[[Ragged], Tensor]) -> None:
    """Encodes the texts of a file, chunk by chunk, and writes their vectors."""
    vectors = [encode(chunk).float().cpu() for chunk in tokens.chunks(TEXTS_AT_ONCE)]
    pooled_BH = torch.cat(vectors).numpy()
    with whole_file(path) as temporary, temporary.open("wb") as file:
        np.save(file, pooled_BH)
