"""The label side: what makes the vector of a label that is added to a finished bundle.

It is saved in the bundle's folder, next to encoder and head.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from xmcray.nn.module_files import load_settings, reading, save_settings, save_weights
from xmcray.nn.prototypes import PrototypeNetwork

SETTINGS = "label_side.json"
WEIGHTS = "prototypes.safetensors"


class LabelSide:
    """How a method makes label vectors without training: of texts, of trained rows, or both.

    Args:
        row_columns: number of last columns that are a trained row. The other columns are made of
            the label's text, in the same way as a query's vector is made of the query's text.
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
        save_settings(folder / SETTINGS, {"row_columns": self.row_columns})
        if self.prototypes is not None:
            assert self.cluster_L is not None, "prototypes without the clusters of the labels"
            state = {**self.prototypes.state_dict(), "cluster_L": self.cluster_L}
            save_weights(folder / WEIGHTS, state)


def load_label_side(folder: Path) -> LabelSide:
    """What `save` wrote.

    Raises:
        BundleError: a file is missing, as in bundles of earlier releases, or damaged.
    """
    with reading("label side", folder):
        # Methods without prototypes write settings only.
        row_columns = int(load_settings(folder / SETTINGS)["row_columns"])
        if not (folder / WEIGHTS).is_file():
            return LabelSide(row_columns)
        state = load_file(folder / WEIGHTS)
        cluster_L = state.pop("cluster_L")
        num_vectors, dim = state["bank.weight"].shape
        are_rows = cluster_L.dtype == torch.int64 and cluster_L.dim() == 1
        if not are_rows or ((cluster_L < 0) | (cluster_L >= num_vectors)).any():
            raise ValueError(f"expected clusters as a list of integers from 0 to {num_vectors - 1}")
        feed_forward = len(state["up.weight"])
        # On the meta device nothing is allocated; `assign` then takes the loaded tensors as they
        # are.
        with torch.device("meta"):
            network = PrototypeNetwork(dim, feed_forward, num_vectors, seed=None)
        network.load_state_dict(state, assign=True)
        return LabelSide(row_columns, network.eval(), cluster_L)
