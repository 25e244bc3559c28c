"""Text encoders: flat, ragged token ids in, one vector per text out.

`StaticEncoder` (static.py) is a bag of token embeddings: milliseconds per batch on a CPU, trained
from scratch. `TransformerEncoder` (transformer.py) wraps any encoder of the transformers library.
Both take texts without padding (`Ragged`), give a text the same vector whatever its neighbours, and
are saved without pickle.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmcray.config import check_choices, check_range, check_ranges
from xmcray.errors import BundleError, ConfigError
from xmcray.parallel import collectives
from xmcray.types import Int64Array, Ragged

if TYPE_CHECKING:
    from xmcray.data.tokens import TextTokenizer
    from xmcray.nn.side import MixedEncoder

SETTINGS = "static.json"
WEIGHTS = "model.safetensors"
# Settings that the other kind of encoder does not read.
_OF_STATIC = ("idf", "residual", "position_decay", "bigram_buckets")
_OF_TRANSFORMERS = ("pooling", "autocast")
# Of a checkpoint of a transformer with adapters, next to its merged weights.
ADAPTERS = "lora.safetensors"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Section `encoder`.

    Attributes:
        name: "static", the id of a model on the Hugging Face hub, or a folder: plain transformers,
            sentence-transformers, a saved encoder of ours, or a run or bundle whose encoder is the
            start.
        dim: width of the vectors. For a transformer 0 keeps its own width; any other width adds a
            bias-free projection.
        pooling: transformer only; "mean" over the tokens, "weighted_mean" by their place in the
            text, "cls" (the first token) or "last_token"; "auto" is what the folder declares, or
            the mean if it declares nothing.
        idf: static only; weigh tokens by inverse document frequency.
        residual: static only; a two-layer network added to the bag.
        position_decay: static only; the first token of a text weighs 1 + position_decay times as
            much, falling off over some ten tokens, because a text begins with its title.
        bigram_buckets: static only; rows for pairs of neighbouring tokens, which share them by a
            hash; 0 is a bag of tokens.
        separate_labels: static only; label texts have rows of their own. They start as those of
            queries. For methods that encode label texts.
        init_from: static only; a transformer that the rows of tokens start from ("" is from
            scratch). It runs once over the vocabulary, and not in training.
        init_vectors: static only; with `init_from`, tokens start as the vectors that the
            transformer gives each of them as a text ("distilled"), or as its input "embeddings",
            which need a corpus with its tokenizer.
        init_share: static only; with `init_from`, the share of these vectors in a row's squared
            length. The rest is random, by which tokens of like meaning differ from the start.
        autocast: transformer only; "auto" is bfloat16 on CUDA devices that have it.
        dropout: transformer only; replaces the model's own rates. None keeps them.
        frozen: transformer only; the projection to `dim` is all that learns. Each text is encoded
            once, into the run's folder.
        lora_rank: transformer only; low-rank adapters of this rank are all that learns, besides a
            projection; 0 trains the model itself. Needs the extra `lora`.
        lora_alpha: with `lora_rank`, adapters are scaled by lora_alpha / lora_rank.
        lora_targets: with `lora_rank`, names of the linear layers that get one, such as "q_proj";
            none is all of them.
        gradient_checkpointing: transformer only; states inside a layer are computed again in the
            backward pass instead of being kept: about a third more time for much less memory.
        matryoshka: widths below `dim` at which the first columns of a vector are trained to be good
            vectors too; a bundle is cut to one with `export --dim`. For astra, renee and dexml.
        side: of side vectors, if the corpus has them: "ignore", or "mix" adds them to the vector of the
            text, through a trained projection and a trained gate.
        vectors_folder: with `frozen`, an absolute path that all workers reach, where the texts'
            vectors stay for other runs on the same corpus; "" removes them with the end of the run.
    """

    RENAMED: ClassVar = {"lead": "position_decay", "pairs": "bigram_buckets"}

    name: str = "static"
    dim: int = 256
    pooling: Literal["auto", "mean", "cls", "last_token", "weighted_mean"] = "auto"
    idf: bool = True
    residual: bool = True
    position_decay: float = 0.0
    bigram_buckets: int = 0
    separate_labels: bool = False
    init_from: str = ""
    init_vectors: Literal["distilled", "embeddings"] = "distilled"
    init_share: float = 1.0
    autocast: Literal["auto", "bf16", "none"] = "auto"
    dropout: float | None = None
    frozen: bool = False
    lora_rank: int = 0
    lora_alpha: int = 16
    lora_targets: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    matryoshka: tuple[int, ...] = ()
    side: Literal["ignore", "mix"] = "ignore"
    vectors_folder: str = ""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "encoder",
            dim=1 if self.name == "static" else 0,
            position_decay=0,
            bigram_buckets=0,
            init_share=(0, 1),
            lora_rank=0,
            lora_alpha=0,
        )
        if self.dropout is not None:
            check_range("encoder.dropout", self.dropout, low=0, high=1)
        check_choices(self, "encoder")
        if self.name == "static":
            self._refuse("dropout", self.dropout is not None, "encoder.name to be a transformer")
            self._refuse("frozen", self.frozen, "encoder.name to be a transformer")
            self._refuse("lora_rank", self.lora_rank, "encoder.name to be a transformer")
            is_set = self.gradient_checkpointing
            self._refuse("gradient_checkpointing", is_set, "encoder.name to be a transformer")
        else:
            self._refuse("init_from", self.init_from, "encoder.name=static")
            self._refuse("separate_labels", self.separate_labels, "encoder.name=static")
        if self.frozen:
            # Nothing inside the transformer learns, and no graph goes through it.
            self._refuse("lora_rank", self.lora_rank, "encoder.frozen=false")
            is_set = self.gradient_checkpointing
            self._refuse("gradient_checkpointing", is_set, "encoder.frozen=false")
        if not self.lora_rank:
            self._refuse("lora_alpha", self.lora_alpha != 16, "encoder.lora_rank")
            self._refuse("lora_targets", self.lora_targets, "encoder.lora_rank")
        self._refuse("vectors_folder", self.vectors_folder and not self.frozen, "encoder.frozen")
        if self.vectors_folder and not Path(self.vectors_folder).is_absolute():
            raise ConfigError(
                f"encoder.vectors_folder is {self.vectors_folder!r}, expected an absolute path, which"
                " means the same folder to every worker"
            )
        if not self.init_from:
            is_set = self.init_vectors != "distilled"
            self._refuse("init_vectors", is_set, "encoder.init_from to name a transformer")
            is_set = self.init_share != 1
            self._refuse("init_share", is_set, "encoder.init_from to name a transformer")

    def without_effect(self) -> list[str]:
        """Names of settings that are set, and that this kind of encoder does not read."""
        names: tuple[str, ...] = ()
        if self.name == "static":
            names = _OF_TRANSFORMERS
        # An encoder of ours in a folder has the settings that it was trained with.
        elif self.name not in ENCODERS and _kind_of(start_folder(self.name)) is None:
            names = _OF_STATIC
        defaults = EncoderConfig()
        return [name for name in names if getattr(self, name) != getattr(defaults, name)]

    def _refuse(self, setting: str, is_set: object, needs: str) -> None:
        """Raises ConfigError for a setting that would have no effect."""
        if is_set:
            raise ConfigError(
                f"encoder.{setting} is set, which needs {needs} (found encoder.name={self.name!r});"
                f" leave out encoder.{setting} or set that too"
            )


class Encoder(nn.Module, abc.ABC):
    """A text encoder: the interface that all kinds share.

    Attributes:
        dim: D, the width of the vectors.
    """

    dim: int

    @abc.abstractmethod
    def forward(self, tokens: Ragged) -> Tensor:
        """query_BD for B texts, on the module's device; a text without tokens is legal."""

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Writes weights (safetensors) and settings (JSON) into `folder` for `load_encoder`."""

    def restore(self, folder: Path) -> None:
        """Takes the weights that an encoder with the same settings saved into `folder`.

        Those of a transformer are saved and read as float32.
        """
        self.load_state_dict(load_text_encoder(folder).state_dict())

    @property
    def side_width(self) -> int:
        """W, the width of the side vectors that change the vectors of texts; 0 if none do."""
        return 0

    @property
    def of_texts(self) -> Encoder:
        """The encoder without a mixer of side vectors."""
        return self

    @property
    def num_tokens(self) -> int | None:
        """Size of the only vocabulary that fits; None if the encoder says nothing about it."""
        return None

    @property
    def num_embeddings(self) -> int | None:
        """Token ids that have a vector, from 0; None if the encoder says nothing about it."""
        return self.num_tokens

    def as_labels(self, tokens: Ragged) -> Ragged:
        """Token ids by which `forward` knows label texts from queries; the same by default."""
        return tokens

    def sparse_parameters(self) -> list[str]:
        """Names of parameters with a sparse gradient, because a step touches few of their rows."""
        return []

    def remember(
        self,
        folder: Path,
        num_texts: int,
        tokens_of: Callable[[Int64Array], Ragged],
    ) -> None:
        """Passes the texts of the training to the encoder before the first step; collective.

        A frozen encoder computes their vectors once; others ignore this.

        Args:
            folder: for such vectors, shared by all ranks and kept over restarts; for one set of
                texts alone.
            num_texts: number of texts.
            tokens_of: tokens of texts by number, 0 .. num_texts - 1.
        """


@dataclass(frozen=True, kw_only=True)
class EncoderKind:
    """An encoder class of ours: how a run starts with it, and how its folders are recognised and read.

    Attributes:
        settings_file: file that `save` writes and no other encoder has.
        build: a new encoder; arguments as for `build_encoder`.
        load: reads a folder that `save` wrote; raises BundleError if it is damaged.
    """

    settings_file: str
    build: Callable[[EncoderConfig, TextTokenizer, Int64Array | None, int], Encoder]
    load: Callable[[Path], Encoder]


def build_encoder(
    config: EncoderConfig,
    tokenizer: TextTokenizer,
    token_counts: Int64Array | None,
    seed: int,
    side_width: int = 0,
) -> Encoder:
    """The encoder a training run starts from.

    Args:
        config: section `encoder`.
        tokenizer: of the corpus.
        token_counts: int64 [V], in how many texts of the corpus each token occurs; None gives all
            tokens the same weight.
        seed: of the initial parameters.
        side_width: W, the width of the corpus' side vectors; 0 if it has none.
    Raises:
        ConfigError: an unknown model, one that needs another tokenizer than the corpus has, or an
            unreachable hub; or the corpus lacks the side vectors to mix.
    """
    from xmcray.nn.side import load_mixer  # it is built on this file

    text = _build_text_encoder(config, tokenizer, token_counts, seed)
    if config.side == "ignore":
        return text
    encoder = with_mixer(text, side_width)
    mixer = encoder.mixer
    mixer.reset(seed)
    folder = start_folder(config.name)
    trained = load_mixer(folder, text.dim)
    if trained is not None:
        if trained.width != side_width:
            raise ConfigError(
                f"encoder {folder} mixes side vectors of width {trained.width}, the corpus has"
                f" {side_width}; prepare it with vectors of the same kind, or leave out encoder.side"
            )
        mixer.load_state_dict(trained.state_dict())
    return encoder


def with_mixer(text: Encoder, side_width: int) -> MixedEncoder:
    """A text encoder with a mixer of side vectors, whose weights are not set yet.

    Args:
        text: the text encoder.
        side_width: W, the width of the corpus' side vectors; 0 if it has none.
    Raises:
        ConfigError: there are no side vectors.
    """
    from xmcray.nn.side import MixedEncoder, SideMixer  # it is built on this file

    if not side_width:
        raise ConfigError(
            "encoder.side is mix, but the corpus has no side vectors; put train.vectors.npy and"
            " test.vectors.npy next to its raw files and prepare it again, or leave out encoder.side"
        )
    return MixedEncoder(text, SideMixer(side_width, text.dim))


def _build_text_encoder(
    config: EncoderConfig,
    tokenizer: TextTokenizer,
    token_counts: Int64Array | None,
    seed: int,
) -> Encoder:
    kind = ENCODERS.get(config.name)
    if kind is not None:
        return kind.build(config, tokenizer, token_counts, seed)
    folder = start_folder(config.name)
    kind = _kind_of(folder)
    if kind is None:
        from xmcray.nn import transformer  # its library takes seconds to import

        name = str(folder) if folder.is_dir() else config.name
        return transformer.build(dataclasses.replace(config, name=name), tokenizer, seed)
    encoder = kind.load(folder)
    for setting in ("frozen", "lora_rank", "gradient_checkpointing", "dropout"):
        if getattr(config, setting):
            raise ConfigError(
                f"encoder {config.name} is no transformer, which encoder.{setting} needs;"
                " drop that setting"
            )
    _check_start(encoder, config, tokenizer)
    return encoder.train()


def start_folder(name: str) -> Path:
    """The encoder's folder in a run (its newest checkpoint) or a bundle; else `name` itself."""
    # By length first, because step-100000000 comes after step-99999999.
    checkpoints = sorted(
        Path(name).glob("checkpoints/step-*/encoder"),
        key=lambda path: (len(path.parent.name), path.parent.name),
    )
    for folder in [*checkpoints[-1:], Path(name) / "encoder"]:
        if folder.is_dir():
            return folder
    return Path(name)


def load_encoder(folder: Path) -> Encoder:
    """An encoder from a folder: ours, of sentence-transformers, or a plain transformer.

    Raises:
        BundleError: the folder holds no encoder, or a damaged one.
    """
    from xmcray.nn.side import MixedEncoder, load_mixer  # it is built on this file

    text = load_text_encoder(folder)
    mixer = load_mixer(folder, text.dim)
    return text if mixer is None else MixedEncoder(text, mixer).eval()


def load_text_encoder(folder: Path) -> Encoder:
    """As `load_encoder`, without a mixer of side vectors."""
    kind = _kind_of(folder)
    if kind is not None:
        return kind.load(folder)
    if not (folder / "config.json").is_file():
        raise BundleError(
            f"{folder} holds no encoder: expected {SETTINGS} or a transformer's config.json"
        )
    from xmcray.nn import transformer

    return transformer.load(folder)


def fit_width(table_VH: Tensor, dim: int) -> Tensor:
    """Centred rows on their `dim` principal axes, scaled so that their mean length is 1.

    If H < dim the further columns are zero.
    """
    centred = table_VH.double() - table_VH.double().mean(dim=0)
    if table_VH.shape[1] > dim:
        centred = centred @ principal_axes(centred, dim)
    fitted: Tensor = F.pad(centred, (0, dim - centred.shape[1]))
    fitted /= fitted.norm(dim=1).mean()
    return fitted


def principal_axes(centred_VH: Tensor, dim: int) -> Tensor:
    """[H, dim], the orthonormal directions in which centred rows vary most; needs dim <= H."""
    # eigh sorts eigenvalues in ascending order, so the principal axes are the last ones.
    covariance_HH = centred_VH.T @ centred_VH
    axes: Tensor = torch.linalg.eigh(covariance_HH).eigenvectors[:, -dim:]
    # An axis has no sign of its own: the entry of largest magnitude is made positive, so that
    # every machine has the same axes.
    largest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    return axes * largest.sign()


def _build_static(
    config: EncoderConfig,
    tokenizer: TextTokenizer,
    token_counts: Int64Array | None,
    seed: int,
) -> Encoder:
    from xmcray.nn.static import StaticEncoder  # it is built on this file

    weight_V = np.ones(tokenizer.vocab_size)
    if config.idf and token_counts is not None:
        assert len(token_counts) == tokenizer.vocab_size, "counts of another vocabulary"
        # The count of the most frequent token replaces the number of texts: it is in nearly all.
        weight_V += np.log((1 + token_counts.max()) / (1 + token_counts))
    encoder = StaticEncoder(
        torch.from_numpy(weight_V),
        config.dim,
        config.residual,
        config.position_decay,
        config.bigram_buckets,
        config.separate_labels,
    )
    encoder.reset(seed)
    if config.init_from:
        encoder.start_from(_start_table(config, tokenizer), config.init_share)
    return encoder


def _start_table(config: EncoderConfig, tokenizer: TextTokenizer) -> Tensor:
    """[V, D], rows of tokens from a transformer; collective.

    Rank 0 alone makes them: another kind of processor may round otherwise, and all ranks must start
    with the same bits.
    """
    table_VD = torch.empty(tokenizer.vocab_size, config.dim)
    if collectives.rank() == 0:
        from xmcray.nn import distilled, transformer  # their library takes seconds to import

        if config.init_vectors == "distilled":
            table_VH = distilled.distilled_tokens(config.init_from, tokenizer)
        else:
            table_VH = transformer.input_embeddings(config.init_from, tokenizer)
        table_VD.copy_(fit_width(table_VH, config.dim))
    return collectives.broadcast(table_VD)


def _load_static(folder: Path) -> Encoder:
    from xmcray.nn.static import StaticEncoder

    return StaticEncoder.load(folder)


def _kind_of(folder: Path) -> EncoderKind | None:
    """The kind whose settings file is in the folder; None for transformers and other folders."""
    for kind in ENCODERS.values():
        if (folder / kind.settings_file).is_file():
            return kind
    return None


def _check_start(encoder: Encoder, config: EncoderConfig, tokenizer: Any) -> None:
    num_tokens = tokenizer.vocab_size if encoder.num_tokens is None else encoder.num_tokens
    if num_tokens != tokenizer.vocab_size or encoder.dim != config.dim:
        raise ConfigError(
            f"encoder {config.name} has {num_tokens} tokens and width {encoder.dim}, the run needs {tokenizer.vocab_size}"
            f" and {config.dim}; set encoder.dim={encoder.dim} and prepare the corpus with that encoder's tokenizer"
        )


# By `encoder.name`; any other name is a transformer or a folder.
ENCODERS: dict[str, EncoderKind] = {
    "static": EncoderKind(settings_file=SETTINGS, build=_build_static, load=_load_static),
}
