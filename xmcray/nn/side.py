"""An encoder of texts with side vectors: a text encoder, and a small mixer after it.

ViXML (Ortego et al., AAAI 2026) gives PRIME one precomputed embedding per image, as a token of the
encoder's input. Here a linear layer and a gate add it to the encoder's output, for any method and
any encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from xmcray.errors import ConfigError
from xmcray.nn.encoder import Encoder
from xmcray.nn.module_files import load_settings, reading, save_settings, save_weights
from xmcray.parallel.transfers import to_device
from xmcray.types import Int64Array, Ragged, side_vectors_of

SETTINGS = "side.json"
WEIGHTS = "side.safetensors"
START = 0.3  # of the gate: the share of the side vector next to the text's
# Adam moves every weight by about the learning rate in a step. These factors make the gate move
# faster than that and the projection slower. The gate is one number for all texts, so it opens only
# for vectors that are worth it for most of them. The projection could learn vectors by heart.
GATE_SPEED = 4.0
PROJECTION_SPEED = 0.1


class SideMixer(nn.Module):
    """text + gate |text| projection(side / |side|), which is nearly the text's vector at the start.

    The projection starts as an orthogonal map, so that side vectors are as similar after it as
    before. A row of zeros is no side vector: it leaves the text's vector as it is at all times.

    Args:
        width: W.
        dim: D.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.width = width
        self.projection = nn.Linear(width, dim, bias=False)
        self.gate = nn.Parameter(torch.full((1,), START / GATE_SPEED))

    def reset(self, seed: int) -> None:
        """Draws the initial projection from `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        dim, width = self.projection.weight.shape
        # If columns are lost, what is left has length 1 on average.
        length = max(1.0, width / dim) ** 0.5
        weight = self.projection.weight
        nn.init.orthogonal_(weight, gain=length / PROJECTION_SPEED, generator=generator)

    def close(self) -> None:
        """Texts keep their vectors from now on, and nothing of the mixer is trained."""
        nn.init.zeros_(self.gate)
        self.requires_grad_(False)

    @property
    def is_closed(self) -> bool:
        """Whether texts keep their vectors."""
        return not bool(self.gate.any())

    def forward(self, text_BD: Tensor, side_BW: Tensor) -> Tensor:
        """The vectors of texts with their side vectors, [B, D]."""
        direction_BD = PROJECTION_SPEED * self.projection(F.normalize(side_BW, dim=-1))
        # Encoders differ in the lengths of their vectors, and the gate means a share of them.
        length_B1 = text_BD.detach().norm(dim=-1, keepdim=True)
        mixed_BD: Tensor = text_BD + GATE_SPEED * self.gate * length_B1 * direction_BD
        return mixed_BD

    def save(self, folder: Path) -> None:
        """Writes side.json and side.safetensors."""
        save_settings(folder / SETTINGS, {"width": self.width})
        save_weights(folder / WEIGHTS, self.state_dict())


class MixedEncoder(Encoder):
    """A text encoder and the mixer of its texts' side vectors.

    Its folder is that of the text encoder, with two files more.

    Args:
        text: the text encoder.
        mixer: from side vectors to the text encoder's width.
    """

    def __init__(self, text: Encoder, mixer: SideMixer) -> None:
        super().__init__()
        self.text = text
        self.mixer = mixer
        self.dim = text.dim

    def forward(self, tokens: Ragged) -> Tensor:
        """query_BD; texts without side vectors have the vectors of the text encoder.

        Raises:
            ConfigError: the side vectors have another width than those of the training.
        """
        weight = self.mixer.projection.weight
        side = torch.from_numpy(side_vectors_of(tokens, self.mixer.width))
        if side.shape[1] != self.mixer.width:
            raise ConfigError(
                f"found side vectors of width {side.shape[1]}, expected {self.mixer.width}; give the"
                " encoder vectors of the kind that it was trained with"
            )
        (side_BW,) = to_device([side], weight.device)
        mixed_BD: Tensor = self.mixer(self.text(tokens), side_BW.to(weight.dtype))
        return mixed_BD

    def save(self, folder: Path) -> None:
        """Writes the text encoder, and the mixer next to it."""
        self.text.save(folder)
        self.mixer.save(folder)

    def restore(self, folder: Path) -> None:
        """As for other encoders: the text encoder restores itself."""
        self.text.restore(folder)
        with reading("mixer of side vectors", folder):
            self.mixer.load_state_dict(load_file(folder / WEIGHTS))

    @property
    def side_width(self) -> int:
        """W."""
        return self.mixer.width

    @property
    def of_texts(self) -> Encoder:
        """The text encoder."""
        return self.text

    @property
    def num_tokens(self) -> int | None:
        """That of the text encoder."""
        return self.text.num_tokens

    @property
    def num_embeddings(self) -> int | None:
        """That of the text encoder."""
        return self.text.num_embeddings

    def as_labels(self, tokens: Ragged) -> Ragged:
        """Token ids as the text encoder knows those of labels, with the same side vectors."""
        vectors = side_vectors_of(tokens, self.mixer.width)
        return self.text.as_labels(tokens).with_vectors(vectors)

    def sparse_parameters(self) -> list[str]:
        """Those of the text encoder."""
        return [f"text.{name}" for name in self.text.sparse_parameters()]

    def remember(
        self,
        folder: Path,
        num_texts: int,
        tokens_of: Callable[[Int64Array], Ragged],
    ) -> None:
        """As the text encoder does: the mixer learns, so what follows it is not kept."""
        self.text.remember(folder, num_texts, tokens_of)


def load_mixer(folder: Path, dim: int) -> SideMixer | None:
    """The mixer of a folder that a MixedEncoder wrote; None if there is none.

    Args:
        folder: of the encoder.
        dim: D, the width of its text encoder.

    Raises:
        BundleError: a file is missing or damaged.
    """
    if not (folder / SETTINGS).is_file():
        return None
    with reading("mixer of side vectors", folder):
        width = int(load_settings(folder / SETTINGS)["width"])
        state = load_file(folder / WEIGHTS)
        mixer = SideMixer(width, dim).to(state["projection.weight"].dtype)
        mixer.load_state_dict(state)
    return mixer
