"""Heads: what makes an encoder's output the vector that is searched. Saved next to the encoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from xmcray.config import check_range
from xmcray.errors import BundleError
from xmcray.nn.module_files import load_settings, reading, save_settings, save_weights

SETTINGS = "head.json"
WEIGHTS = "head.safetensors"


class Head(nn.Module):
    """The encoder's output as it is.

    Args:
        dim: D, width of the encoder's output.

    Attributes:
        out_dim: width of the vectors that are searched.
    """

    kind: ClassVar[str] = "plain"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.out_dim = dim

    def forward(self, vector_BD: Tensor) -> Tensor:
        """Search vectors [B, out_dim]."""
        return vector_BD

    def label_vectors(self, vector_BD: Tensor) -> Tensor:
        """Vectors of label texts as an index has them, [B, out_dim]."""
        vectors: Tensor = self(vector_BD)
        return vectors

    def settings(self) -> dict[str, Any]:
        """Arguments that make such a head again."""
        return {"dim": self.dim}

    def save(self, folder: Path) -> None:
        """Writes head.json, and head.safetensors if there are weights."""
        folder.mkdir(parents=True, exist_ok=True)
        save_settings(folder / SETTINGS, {"kind": self.kind, **self.settings()})
        state = self.state_dict()
        if state:
            save_weights(folder / WEIGHTS, state)


def unit_length(vector_BD: Tensor) -> Tensor:
    """vector / |vector|; a vector of zeros stays as it is.

    `F.normalize` divides the gradient of such a vector by 1e-12. One text without a token then makes
    Adam's second moment of a bias so large that the bias learns nothing more.
    """
    length_B1 = torch.linalg.vector_norm(vector_BD, dim=-1, keepdim=True)
    # 1 for a vector of zeros.
    divisor_B1: Tensor = length_B1 + (length_B1 == 0)
    return vector_BD / divisor_B1


class NormalisedHead(Head):
    """Vectors of length 1, so that inner products are cosines."""

    kind = "normalised"

    def forward(self, vector_BD: Tensor) -> Tensor:
        """vector / |vector|."""
        return unit_length(vector_BD)


class PrefixHead(Head):
    """The first columns of the encoder's output, for bundles that were cut to them.

    Args:
        dim: D.
        out_dim: columns that are kept.
        is_normalised: whether they get length 1.
    """

    kind = "prefix"

    def __init__(self, dim: int, out_dim: int, is_normalised: bool) -> None:
        super().__init__(dim)
        self.out_dim = out_dim
        self.is_normalised = is_normalised

    def forward(self, vector_BD: Tensor) -> Tensor:
        """The columns, perhaps divided by their length."""
        prefix_BE = vector_BD[:, : self.out_dim]
        return F.normalize(prefix_BE, dim=-1) if self.is_normalised else prefix_BE

    def settings(self) -> dict[str, Any]:
        """Arguments that make such a head again."""
        return {
            "dim": self.dim,
            "out_dim": self.out_dim,
            "is_normalised": self.is_normalised,
        }


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Section `fusion`: how UniDEC's two cosines are added.

    Attributes:
        text_weight: of the cosine with the label text; that of the cosine with the classifier row
            is 1 - text_weight. 0.5 is the paper's concatenation.
    """

    RENAMED: ClassVar = {"text": "text_weight"}

    text_weight: float = 0.5

    def __post_init__(self) -> None:
        check_range("fusion.text_weight", self.text_weight, 0, 1)


class TwoHeads(Head):
    """UniDEC's two heads: one for products with label texts, one for those with classifier rows.

    Both start as the same orthogonal map, so that classifier rows that start as vectors of label
    texts fit.

    Args:
        dim: D.
        head_dim: width E of each head.
        answer_by: which vectors answer: "text", "classifier", or "both", one after the other.
        text_share: with "both", the share of the cosine with the label text in the sum; 0.5 is the
            plain sum of both.
    """

    kind = "unidec"

    def __init__(
        self,
        dim: int,
        head_dim: int,
        answer_by: str = "both",
        text_share: float = 0.5,
    ) -> None:
        super().__init__(dim)
        self.head_dim = head_dim
        self.answer_by = answer_by
        self.text_share = text_share
        self.out_dim = head_dim * (2 if answer_by == "both" else 1)
        self.text_layer = nn.Linear(dim, head_dim)
        self.classifier_layer = nn.Linear(dim, head_dim)

    def reset(self, seed: int) -> None:
        """Draws the initial parameters from `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        nn.init.orthogonal_(self.text_layer.weight, generator=generator)
        nn.init.zeros_(self.text_layer.bias)
        # The same map: a classifier row that starts as a text's vector fits its head.
        self.classifier_layer.load_state_dict(self.text_layer.state_dict())

    def text(self, vector_BD: Tensor, keep_BE: Tensor | None = None) -> Tensor:
        """Phi_D [B, E], of length 1: l2norm(dropout(tanh(A1 vector))).

        Args:
            keep_BE: dropout's factors, 0 or 1 / (1 - rate); None is no dropout.
        """
        text_BE = torch.tanh(self.text_layer(vector_BD))
        if keep_BE is not None:
            text_BE = text_BE * keep_BE
        return unit_length(text_BE)

    def classifier(self, vector_BD: Tensor, keep_BE: Tensor | None = None) -> Tensor:
        """Phi_C [B, E], of any length: dropout(A2 vector).

        Args:
            keep_BE: as for `text`.
        """
        row_BE: Tensor = self.classifier_layer(vector_BD)
        return row_BE if keep_BE is None else row_BE * keep_BE

    def forward(self, vector_BD: Tensor) -> Tensor:
        """Search vectors, without dropout: Phi_D, l2norm(Phi_C), or both, weighted."""
        vectors_BD = self.label_vectors(vector_BD)
        if self.answer_by != "both":
            return vectors_BD
        text_BE, row_BE = vectors_BD.split(self.head_dim, dim=1)
        # The weights sum to 2, so that equal shares give the plain sum of both cosines.
        return torch.cat([2 * self.text_share * text_BE, 2 * (1 - self.text_share) * row_BE], dim=1)

    def label_vectors(self, vector_BD: Tensor) -> Tensor:
        """As `forward`, but with the weights of queries left out."""
        if self.answer_by == "text":
            return self.text(vector_BD)
        row_BE = F.normalize(self.classifier(vector_BD), dim=-1)
        if self.answer_by == "classifier":
            return row_BE
        return torch.cat([self.text(vector_BD), row_BE], dim=1)

    def settings(self) -> dict[str, Any]:
        """Arguments that make such a head again."""
        return {
            "dim": self.dim,
            "head_dim": self.head_dim,
            "answer_by": self.answer_by,
            "text_share": self.text_share,
        }


_KINDS: dict[str, type[Head]] = {
    head.kind: head for head in (Head, NormalisedHead, PrefixHead, TwoHeads)
}


def load_head(folder: Path) -> Head:
    """What `save` wrote, ready to answer.

    Raises:
        BundleError: a file is missing or damaged, or of a kind that this release does not know.
    """
    with reading("head", folder):
        # What is left after the kind are the arguments of the class.
        settings = load_settings(folder / SETTINGS)
        kind = settings.pop("kind")
        if kind not in _KINDS:
            raise BundleError(
                f"{folder} holds a head of kind {kind!r}, this release knows {', '.join(_KINDS)}"
            )
        head = _KINDS[kind](**settings)
        if (folder / WEIGHTS).is_file():
            state = load_file(folder / WEIGHTS)
            # The head has the precision that it was saved with.
            dtype = next(iter(state.values())).dtype
            head.to(dtype).load_state_dict(state)
        else:
            head.load_state_dict({})
        return head.eval()
