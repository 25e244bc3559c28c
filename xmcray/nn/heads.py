"""Heads: what makes an encoder's output the vector that answers are searched with. Saved beside the encoder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from xmcray.config import check_range
from xmcray.errors import BundleError

SETTINGS, WEIGHTS = "head.json", "head.safetensors"


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
        self.dim = self.out_dim = dim

    def forward(self, vector_BD: Tensor) -> Tensor:
        """Search vectors [B, out_dim]."""
        return vector_BD

    def settings(self) -> dict[str, Any]:
        """Arguments that make such a head again."""
        return {"dim": self.dim}

    def save(self, folder: Path) -> None:
        """Writes head.json, and head.safetensors if there are weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SETTINGS).write_text(
            json.dumps({"kind": self.kind, **self.settings()}), encoding="utf-8"
        )
        state = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()
        }
        if state:
            save_file(state, folder / WEIGHTS)


class NormalisedHead(Head):
    """Length 1: inner products are cosines."""

    kind = "normalised"

    def forward(self, vector_BD: Tensor) -> Tensor:
        """vector / |vector|."""
        return F.normalize(vector_BD, dim=-1)


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Section `fusion`: how UniDEC's two cosines are added.

    Attributes:
        text_weight: of the cosine with the label text; that of the cosine with the classifier row is
            1 - text_weight. 0.5 is the paper's concatenation.
    """

    RENAMED: ClassVar = {"text": "text_weight"}

    text_weight: float = 0.5

    def __post_init__(self) -> None:
        check_range("fusion.text_weight", self.text_weight, 0, 1)


class TwoHeads(Head):
    """UniDEC's heads: one makes the vectors that meet label texts, the other those that meet classifier rows.

    Both start as the same orthogonal map, so that rows which start as vectors of label texts fit.

    Args:
        dim: D. head_dim: width E of either head.
        answer_by: which vectors answer: "text", "classifier", or "both", one beside the other.
        text_share: of "both", share of the cosine with the label text in the sum; 0.5 is the plain sum of both.
    """

    kind = "unidec"

    def __init__(
        self, dim: int, head_dim: int, answer_by: str = "both", text_share: float = 0.5
    ) -> None:
        super().__init__(dim)
        self.head_dim, self.answer_by, self.text_share = head_dim, answer_by, text_share
        self.out_dim = head_dim * (2 if answer_by == "both" else 1)
        self.text_layer, self.classifier_layer = nn.Linear(dim, head_dim), nn.Linear(dim, head_dim)

    def reset(self, seed: int) -> None:
        """Draws the initial parameters from `seed` alone."""
        nn.init.orthogonal_(self.text_layer.weight, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.text_layer.bias)
        self.classifier_layer.load_state_dict(self.text_layer.state_dict())

    def text(self, vector_BD: Tensor, keep_BE: Tensor | None = None) -> Tensor:
        """Phi_D [B, E], of length 1: l2norm(dropout(tanh(A1 vector))).

        Args:
            keep_BE: dropout's factors, 0 or 1 / (1 - rate); None is no dropout.
        """
        text_BE = torch.tanh(self.text_layer(vector_BD))
        return F.normalize(text_BE if keep_BE is None else text_BE * keep_BE, dim=-1)

    def classifier(self, vector_BD: Tensor, keep_BE: Tensor | None = None) -> Tensor:
        """Phi_C [B, E], of any length: dropout(A2 vector)."""
        row_BE: Tensor = self.classifier_layer(vector_BD)
        return row_BE if keep_BE is None else row_BE * keep_BE

    def forward(self, vector_BD: Tensor) -> Tensor:
        """Search vectors: Phi_D, l2norm(Phi_C), or both, weighed and beside each other; never with dropout."""
        if self.answer_by == "text":
            return self.text(vector_BD)
        row_BE = F.normalize(self.classifier(vector_BD), dim=-1)
        if self.answer_by == "classifier":
            return row_BE
        return torch.cat(
            [2 * self.text_share * self.text(vector_BD), 2 * (1 - self.text_share) * row_BE], dim=1
        )

    def settings(self) -> dict[str, Any]:
        """Arguments that make such a head again."""
        return {
            **super().settings(),
            "head_dim": self.head_dim,
            "answer_by": self.answer_by,
            "text_share": self.text_share,
        }


_KINDS: dict[str, type[Head]] = {head.kind: head for head in (Head, NormalisedHead, TwoHeads)}


def load_head(folder: Path) -> Head:
    """What `save` wrote, ready to answer.

    Raises:
        BundleError: a file is missing or damaged, or of a kind that this release does not know.
    """
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        kind = settings.pop("kind")
        if kind not in _KINDS:
            raise BundleError(
                f"{folder} holds a head of kind {kind!r}, this release knows {', '.join(_KINDS)}"
            )
        head = _KINDS[kind](**settings)
        state = load_file(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else {}
        head.to(next(iter(state.values()), torch.zeros(0)).dtype).load_state_dict(state)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        SafetensorError,
    ) as error:
        found = " ".join(str(error).split())[:200]
        raise BundleError(f"head in {folder} cannot be read ({found}); export it again") from None
    return head.eval()
