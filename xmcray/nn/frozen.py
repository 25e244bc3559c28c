"""Vectors of the texts that a frozen transformer is trained with: each is computed once and found again by its tokens.

    FOLDER/00000012.npy    float32 [8192, H], pooled states of texts 12 * 8192 and following, complete or absent

Ranks share the work and read each other's files; a run that is resumed finds them. Which texts are encoded together
does not depend on the ranks, so neither does a bit of the vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmcray import storage
from xmcray.parallel import collectives
from xmcray.types import Int64Array, Ragged

_FILE_ROWS = 8192
_ROWS = 1024  # texts encoded at once
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64


class KnownTexts:
    """Vectors by tokens. Collective: every rank makes one, with the same texts.

    Args:
        folder: of the files. num_texts: N. tokens_of: tokens of texts by number, 0 .. N - 1.
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
        with storage.disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for first in range(0, num_texts, _FILE_ROWS):
                tokens = tokens_of(np.arange(first, min(first + _FILE_ROWS, num_texts)))
                keys.append(text_keys(tokens))
                paths.append(folder / f"{len(paths):08d}.npy")
                if (
                    len(paths) % collectives.num_ranks() == collectives.rank()
                    and not paths[-1].exists()
                ):
                    _write(paths[-1], tokens, encode)
        collectives.gather_objects(None)  # nobody reads before all have written
        self._vectors = [np.load(path, mmap_mode="r") for path in paths]
        key_N = np.concatenate(keys)
        self._order = np.argsort(key_N)
        self._key_N = key_N[self._order]

    def __call__(self, tokens: Ragged) -> Tensor:
        """float32 [B, H] of texts that are known, on the CPU."""
        key_B = text_keys(tokens)
        place_B = np.minimum(np.searchsorted(self._key_N, key_B), len(self._key_N) - 1)
        assert (self._key_N[place_B] == key_B).all(), (
            "a text that is in no split of the training data"
        )
        file_B, row_B = np.divmod(self._order[place_B], _FILE_ROWS)
        found_BH = np.empty((len(key_B), self._vectors[0].shape[1]), np.float32)
        for file in np.unique(file_B):
            found_BH[file_B == file] = self._vectors[file][row_B[file_B == file]]
        return torch.from_numpy(found_BH)


def text_keys(tokens: Ragged) -> npt.NDArray[np.uint64]:
    """[B], a hash of each text's tokens and their order: of n texts two share one with probability n^2 / 2^65."""
    place = np.arange(len(tokens.values)) - np.repeat(tokens.offsets[:-1], tokens.lengths)
    mixed = (tokens.values << 20 | place).astype(np.uint64) + np.uint64(1)
    for factor, shift in zip(_MIX, (30, 27), strict=True):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * factor
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed ^ mixed >> np.uint64(31))])
    found: npt.NDArray[np.uint64] = sums[tokens.offsets[1:]] - sums[tokens.offsets[:-1]]
    return found


def _write(path: Path, tokens: Ragged, encode: Callable[[Ragged], Tensor]) -> None:
    chunks = (tokens.slice(i, min(i + _ROWS, len(tokens))) for i in range(0, len(tokens), _ROWS))
    vectors = torch.cat([encode(chunk).float().cpu() for chunk in chunks]).numpy()
    aside = storage.aside(path)
    with aside.open("wb") as file:
        np.save(file, vectors)
    storage.fsync(aside)
    aside.replace(path)
