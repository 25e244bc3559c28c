"""The label side: what makes the vector of a label that joins a finished bundle. Saved beside encoder and head."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from xmcray.errors import BundleError
from xmcray.nn.prototypes import PrototypeNetwork

SETTINGS, WEIGHTS = "label_side.json", "prototypes.safetensors"


class LabelSide:
    """How a method makes label vectors, without its training: of texts alone, of trained rows, or of both.

    Args:
        row_columns: so many of the last columns are a trained row; the others are made of the label's text, as a
            query's vector is of the query's.
        prototypes: PRIME's network, if vectors are prototypes.
        cluster_L: int64 [L], the row of the network's bank that each label shares with its
            cluster. Needed with `prototypes`.
    """

    def __init__(
        self,
        row_columns: int = 0,
        prototypes: PrototypeNetwork | None = None,
        cluster_L: Tensor | None = None,
    ) -> None:
        self.row_columns = row_columns
        self.prototypes = prototypes
        self.cluster_L = cluster_L

    def save(self, folder: Path) -> None:
        """Writes label_side.json, and prototypes.safetensors if there is a network."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SETTINGS).write_text(
            json.dumps({"row_columns": self.row_columns}), encoding="utf-8"
        )
        if self.prototypes is not None:
            assert self.cluster_L is not None, "prototypes without the clusters of the labels"
            state = {**self.prototypes.state_dict(), "cluster_L": self.cluster_L}
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in state.items()},
                folder / WEIGHTS,
            )


def load_label_side(folder: Path) -> LabelSide:
    """What `save` wrote.

    Raises:
        BundleError: a file is missing, as in bundles of earlier releases, or damaged.
    """
    try:
        row_columns = int(
            json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["row_columns"]
        )
        if not (folder / WEIGHTS).is_file():
            return LabelSide(row_columns)
        state = load_file(folder / WEIGHTS)
        cluster_L = state.pop("cluster_L")
        num_vectors, dim = state["bank.weight"].shape
        with torch.device("meta"):
            network = PrototypeNetwork(dim, len(state["up.weight"]), num_vectors, None)
        network.load_state_dict(state, assign=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        found = " ".join(str(error).split())[:200]
        raise BundleError(
            f"label side in {folder} cannot be read ({found}); export it again"
        ) from None
    return LabelSide(row_columns, network.eval(), cluster_L)
