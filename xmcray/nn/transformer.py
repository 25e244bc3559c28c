"""Any encoder of the transformers library; folders are those of sentence-transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from xmcray.errors import BundleError, ConfigError, XmcrayError, one_line
from xmcray.nn import lora, packed, pretrained, sentence_folder
from xmcray.nn.encoder import WEIGHTS, Encoder, EncoderConfig, principal_axes
from xmcray.nn.frozen import EncodedTexts
from xmcray.nn.matmul import attention_kernel
from xmcray.nn.micro_batches import micro_batches, token_batches
from xmcray.parallel import collectives
from xmcray.parallel.transfers import to_device
from xmcray.types import Int64Array, Ragged, to_torch

if TYPE_CHECKING:
    from xmcray.data.tokens import TextTokenizer

# Texts whose vectors decide how the projection of a frozen transformer starts.
FITTED_TEXTS = 32_768
# Similarities that an inner product stands for, perhaps of normalised vectors.
SIMILARITIES = (None, "cosine", "dot", "dot_product")
# Of the largest state: how far the states of a text may be from those of the same text with padding.
_TOLERANCE = 1e-4
# At least the rows that a table of positions keeps for padding; RoBERTa's keeps two.
RESERVED_POSITIONS = 8


class TransformerEncoder(Encoder):
    """A transformer, its pooled last hidden states, and optionally a bias-free projection.

    Texts are sorted by length. If the model allows it they are packed one after another without
    padding (packed.py); else they run in padded micro-batches, cut where that costs least. A model
    whose states depend on padding runs texts of one length at a time. The order is restored at the
    end. Pooling and projection are float32 also under autocast.

    Args:
        model: a transformers model with `last_hidden_state`, without pooler.
        tokenizer: the model's own tokenizer; only saved with it.
        pooling: "mean" over the text's tokens, "weighted_mean", in which the n-th token weighs n
            times as much as the first, "cls": the first token, or "last_token".
        projection: bias-free linear layer, or None.
        normalize: divide by the length, as a sentence-transformers folder may require.
        autocast: as in EncoderConfig.

    Attributes:
        frozen: only the projection learns.
        pads: texts of several lengths share a call.
        adapted: the model has low-rank adapters, which are all of it that learns.
        prompts: by name ("query", "document"), for other programs that read the saved folder; here
            the corpus' tokenizer puts them before the texts.
        similarity: by which vectors are meant to be compared; None is sentence-transformers'
            default, the cosine.
        projection_is_new: it was not loaded, so it may be fitted to the texts of the training.
        encoded_texts: of a frozen encoder, the vectors of the texts that are trained with.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        pooling: str = "mean",
        projection: nn.Linear | None = None,
        normalize: bool = False,
        autocast: str = "auto",
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.projection = projection
        self.pooling = pooling
        self.normalize = normalize
        self.autocast = autocast
        hidden = int(model.config.hidden_size)
        self.dim = hidden if projection is None else projection.out_features
        self.is_causal = packed.is_causal(model)
        if self.is_causal:
            # A text is read once, so keys and values need not be kept for tokens to come.
            model.config.use_cache = False
        self.packed = packed.try_on(model)
        self.longest_packed = packed.longest_text(model)
        self.pads = True
        self.prompts: Mapping[str, str] = {}
        self.similarity: str | None = None
        self.frozen = False
        self.adapted = False
        self.projection_is_new = False
        self.encoded_texts: EncodedTexts | None = None

    @property
    def num_embeddings(self) -> int:
        """Rows of the model's table, which may be more than the tokenizer has ids."""
        return len(self.model.get_input_embeddings().weight)

    def forward(self, tokens: Ragged) -> Tensor:
        """query_BD; a text without tokens is the zero vector."""
        query_BD = self.pooled(tokens)
        if self.projection is not None:
            query_BD = self.projection(query_BD)
        if self.normalize:
            query_BD = F.normalize(query_BD, dim=-1)
        return query_BD

    def freeze(self) -> None:
        """Only the projection learns from now on."""
        self.frozen = True
        self.model.requires_grad_(False)
        self.model.eval()

    def train(self, mode: bool = True) -> Self:
        """A frozen transformer has no dropout in training either."""
        super().train(mode)
        self.model.train(mode and not self.frozen)
        return self

    def remember(
        self,
        folder: Path,
        num_texts: int,
        tokens_of: Callable[[Int64Array], Ragged],
    ) -> None:
        """A frozen transformer encodes each text of the training once."""
        if self.frozen:
            # Another model, or another way to pool its states, has other vectors.
            own_folder = folder / self._fingerprint()
            self.encoded_texts = EncodedTexts(own_folder, num_texts, tokens_of, self.pooled)
            if self.projection_is_new:
                self._fit_projection(self.encoded_texts.sample(FITTED_TEXTS))

    def _fit_projection(self, pooled_NH: Tensor) -> None:
        """Starts the projection on the principal axes of the texts, with vectors of mean length 1.

        Methods are tuned for vectors of about this length; the pooled states of MiniLM are six
        times as long. Collective, because all ranks must start with the same bits.
        """
        assert self.projection is not None
        weight_DH = self.projection.weight.data
        dim, hidden = weight_DH.shape
        if dim <= hidden:
            centred_NH = pooled_NH - pooled_NH.mean(dim=0)
            weight_DH.copy_(principal_axes(centred_NH, dim).T)
        lengths_N = (pooled_NH @ weight_DH.cpu().double().T).norm(dim=1)
        weight_DH /= float(lengths_N.mean())
        collectives.broadcast(weight_DH)

    def _fingerprint(self) -> str:
        """A hash of all that the pooled states of a text depend on, in a folder's name."""
        digest = hashlib.sha256(f"{self.pooling} {self.autocast}".encode())
        digest.update(self.model.config.to_json_string().encode())
        for name, weights in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(weights.cpu().flatten().numpy())
        return digest.hexdigest()[:32]

    def pooled(self, tokens: Ragged) -> Tensor:
        """[B, H], pooled states of texts, before projection and normalisation."""
        lookup = self.model.get_input_embeddings()
        if self.encoded_texts is not None:
            (pooled_BH,) = to_device([self.encoded_texts(tokens)], lookup.weight.device)
            return pooled_BH.to(lookup.weight.dtype)
        device: torch.device = lookup.weight.device
        call_tokens, max_tokens = self.call_costs(device)
        is_packed = self.packed and tokens.lengths.max(initial=0) <= self.longest_packed
        if is_packed:
            batches = token_batches(tokens.lengths, max_tokens)
            pool = self._pooled_packed
        else:
            # If a call costs nothing, the cheapest calls have no padding.
            call_tokens = call_tokens if self.pads else 0
            batches = micro_batches(tokens.lengths, call_tokens, max_tokens)
            pool = self._pooled_padded
        if not batches:
            return self._pooled_without_tokens(len(tokens))
        # One lookup for all micro-batches: its backward fills a table of the whole vocabulary, so
        # once is enough.
        order = np.concatenate(batches)
        on_host = [to_torch(tokens.take(order).values), to_torch(order)]
        token_T, row_B = to_device(on_host, device)
        token_TH = lookup(token_T)
        pooled: list[Tensor] = []
        first = 0
        for rows in batches:
            # The tokens of a micro-batch lie one after another, as `order` put them.
            lengths = tokens.lengths[rows]
            stop = first + int(lengths.sum())
            pooled.append(pool(token_TH[first:stop], lengths))
            first = stop
        pooled_BH = torch.cat(pooled)
        # Back to the caller's order; texts without tokens are in no batch and stay zero.
        zeros_BH = pooled_BH.new_zeros(len(tokens), pooled_BH.shape[1])
        return zeros_BH.index_copy(0, row_B, pooled_BH)

    def _pooled_without_tokens(self, num_texts: int) -> Tensor:
        """[B, H], zeros, for texts of which none has a token.

        A rank with such texts still takes part in the step: its gradient is zero, not absent.
        """
        table_VH = self.model.get_input_embeddings().weight
        weight = table_VH
        if self.adapted:
            weight = next(weight for weight in self.parameters() if weight.requires_grad)
        zero = weight[:0].sum()
        # The table of ELECTRA and ALBERT is narrower than their states.
        hidden = int(self.model.config.hidden_size)
        zeros_BH = table_VH.new_zeros(num_texts, hidden)
        return _at_least_float32(zero + zeros_BH)

    def call_costs(self, device: torch.device) -> tuple[int, int]:
        """Cost of one more call, in tokens, and most tokens of a call (benchmarks/encoder_speed.py).

        It must not depend on whether there is a graph: gradient caching encodes a text twice and
        replays its dropout.
        """
        if device.type != "cpu":
            return 4096, 131072
        return (64, 8192) if self.training else (32, 2048)

    def _pooled_packed(self, token_TH: Tensor, lengths: Int64Array) -> Tensor:
        """[B, H], pooled states of one micro-batch of texts, each with a token."""
        with self._autocast(token_TH.device):
            state_TH = packed.run(self.model, token_TH, lengths, self.is_causal)
        state_TH = _at_least_float32(state_TH)
        if self.pooling in ("cls", "last_token"):
            ends = np.cumsum(lengths)
            places = ends - lengths if self.pooling == "cls" else ends - 1
            (place_B,) = to_device([to_torch(places)], token_TH.device)
            return state_TH[place_B]
        return packed.means(state_TH, lengths, weighted=self.pooling == "weighted_mean")

    def _pooled_padded(self, token_TH: Tensor, lengths: Int64Array) -> Tensor:
        """As `_pooled_packed`, with padding after each text, which a decoder never looks at."""
        device = token_TH.device
        # True where a text has a token: its first `length` cells.
        mask = np.arange(lengths.max()) < lengths[:, None]
        (mask_BT,) = to_device([to_torch(mask)], device)
        attention_BT: Tensor | None = None
        if mask.all():
            # Without padding no mask is passed: attention then takes its fastest path.
            padded_BTH = token_TH.view(*mask.shape, -1)
        else:
            attention_BT = mask_BT.long()
            # Cells of the padded table that hold a token, in the order of the tokens.
            (cell_T,) = to_device([to_torch(np.flatnonzero(mask))], device)
            cells = token_TH.new_zeros(mask.size, token_TH.shape[1])
            padded_BTH = cells.index_copy(0, cell_T, token_TH).view(*mask.shape, -1)
        with self._autocast(device), attention_kernel(device, int(lengths.max())):
            output = self.model(inputs_embeds=padded_BTH, attention_mask=attention_BT)
        state_BTH = _at_least_float32(output.last_hidden_state)
        if self.pooling == "cls":
            return state_BTH[:, 0]
        if self.pooling == "last_token":
            (last_B,) = to_device([to_torch(lengths - 1)], device)
            return state_BTH[torch.arange(len(lengths), device=device), last_B]
        if self.pooling == "weighted_mean":
            # Padding keeps the weight 0.
            weight_BT = mask_BT.to(state_BTH.dtype).cumsum(dim=1) * mask_BT
        elif attention_BT is None:
            return state_BTH.mean(dim=1)
        else:
            weight_BT = mask_BT
        sum_BH = (state_BTH * weight_BT[..., None]).sum(dim=1)
        return sum_BH / weight_BT.sum(dim=1, keepdim=True)

    def _autocast(self, device: torch.device) -> torch.autocast:
        enabled = self.autocast == "bf16"
        if self.autocast == "auto" and device.type == "cuda":
            enabled = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.autocast(device.type, torch.bfloat16, enabled=enabled)

    def save(self, folder: Path) -> None:
        """Writes a folder that sentence-transformers loads unchanged."""
        folder.mkdir(parents=True, exist_ok=True)
        state = None
        if self.adapted:
            state = lora.merged_state(self.model)
            lora.save_adapters(self.model, folder)
        with pretrained.quiet():
            self.model.save_pretrained(folder, max_shard_size="1TB", state_dict=state)
            self.tokenizer.save_pretrained(folder)
        hidden = int(self.model.config.hidden_size)
        sentence_folder.write_parts(folder, hidden, self.pooling, self.projection, self.normalize)
        sentence_folder.write_sentence_settings(folder, self.prompts, self.similarity)

    def restore(self, folder: Path) -> None:
        """As for other encoders; adapters are restored as they were, and not merged.

        Raises:
            RunError: the run started with another model than `encoder.name` is now.
        """
        saved = open_model(folder, BundleError)
        if not self.adapted:
            if self.encoded_texts is not None:
                self._check_same_model(folder, saved.model)
            self.load_state_dict(saved.state_dict())
            return
        lora.restore_adapters(self.model, folder, saved.model.state_dict())
        if self.projection is not None and saved.projection is not None:
            self.projection.load_state_dict(saved.projection.state_dict())

    def _check_same_model(self, folder: Path, saved_model: Any) -> None:
        """Raises RunError if the texts were encoded by another model than a checkpoint has."""
        saved = saved_model.state_dict()
        for name, weight in self.model.state_dict().items():
            if not torch.equal(saved[name].to(weight), weight):
                raise lora.another_model(folder, name)


def _at_least_float32(states: Tensor) -> Tensor:
    return states.float() if states.dtype == torch.bfloat16 else states


def build(config: EncoderConfig, tokenizer: TextTokenizer, seed: int) -> TransformerEncoder:
    """The transformer `config.name`, with the configured projection and pooling.

    Raises:
        ConfigError: no such model, or the corpus has another tokenizer or longer texts.
    """
    encoder = open_model(pretrained.find(config.name), ConfigError, config.dropout)
    _check_vocabulary(encoder.model, config.name, tokenizer)
    _check_length(encoder, config.name, tokenizer.max_len)
    hidden = int(encoder.model.config.hidden_size)
    # All that a frozen encoder can learn is a projection.
    needs_projection = config.frozen and config.dim > 0 and encoder.projection is None
    # A projection to another width is given up for the transformer's own; one of this width stays.
    if config.dim == hidden != encoder.dim and not config.frozen:
        encoder.projection = None
    elif config.dim not in (0, encoder.dim) or needs_projection:
        encoder.projection = nn.Linear(hidden, config.dim, bias=False)
        encoder.projection_is_new = True
        # Orthogonal rows preserve inner products best while nothing is learned yet.
        generator = torch.Generator().manual_seed(seed)
        nn.init.orthogonal_(encoder.projection.weight, generator=generator)
    if config.dim:
        encoder.dim = config.dim
    if config.pooling != "auto":
        encoder.pooling = config.pooling
    encoder.autocast = config.autocast
    encoder.normalize = False  # the method decides whether vectors have length 1
    encoder.tokenizer.model_max_length = tokenizer.max_len
    # What the corpus was prepared with, which need not be what the model's folder declares.
    encoder.prompts = {"query": tokenizer.query_prompt, "document": tokenizer.label_prompt}
    if config.frozen:
        encoder.freeze()
    prepare_training(encoder, config, seed)
    return encoder.train()


def prepare_training(encoder: TransformerEncoder, config: EncoderConfig, seed: int) -> None:
    """Adds adapters to the model and lets it compute states twice, as the settings say.

    Raises:
        ConfigError: the model cannot.
    """
    if config.lora_rank:
        lora.add_adapters(encoder.model, config, seed)
        encoder.adapted = True
    if config.gradient_checkpointing:
        model = encoder.model
        # Older releases of transformers have the second name alone.
        enable = getattr(model, "activation_checkpointing_enable", None)
        try:
            # The other kind loses the gradient where a layer's input has none, as below adapters.
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        except ValueError:
            raise ConfigError(
                f"encoder.gradient_checkpointing is set, which {type(model).__name__} does"
                " not have; leave it out, or lower optim.micro_batch"
            ) from None


def load(folder: Path) -> TransformerEncoder:
    """The encoder of a folder: ours, of sentence-transformers, or a plain transformer.

    Raises:
        BundleError: the folder is damaged, or uses parts that this encoder does not have.
    """
    return open_model(folder, BundleError).eval()


def input_embeddings(name: str, tokenizer: TextTokenizer) -> Tensor:
    """Input embeddings of a transformer, float32 [V, H], for a corpus with its tokenizer."""
    model = open_model(pretrained.find(name), ConfigError).model
    _check_vocabulary(model, name, tokenizer)
    table_VH: Tensor = model.get_input_embeddings().weight.detach()
    return table_VH[: tokenizer.vocab_size]


def open_model(
    folder: Path,
    error_type: type[ConfigError | BundleError],
    dropout: float | None = None,
) -> TransformerEncoder:
    """Reads the model and the sentence-transformers parts of a folder.

    Args:
        folder: as `pretrained.find` returns it.
        error_type: raised if the folder is damaged.
        dropout: replaces the model's own rates; None keeps them.
    """
    try:
        parts = sentence_folder.read_parts(folder, error_type)
        sentence_settings = sentence_folder.read_sentence_settings(folder)
        model = pretrained.load_model(folder, dropout)
        with pretrained.quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if sentence_folder.lower_cases(folder) and not _ignores_case(tokenizer):
            raise error_type(
                f"encoder in {folder} lower-cases texts (do_lower_case), which its tokenizer does not;"
                " choose another model"
            )
        hidden = int(model.config.hidden_size)
        projection = sentence_folder.read_projection(folder, parts, hidden)
        pooling = sentence_folder.pooling_of(parts)
        encoder = TransformerEncoder(model, tokenizer, pooling, projection, "Normalize" in parts)
        encoder.pads = _ignores_padding(encoder)
    except (XmcrayError, MemoryError):
        raise
    except Exception as error:  # transformers and safetensors raise errors of many kinds
        raise error_type(
            f"encoder in {folder} cannot be loaded ({one_line(error)}); it needs config.json and {WEIGHTS}"
        ) from None
    encoder.prompts = sentence_settings.get("prompts") or {}
    encoder.similarity = sentence_settings.get("similarity_fn_name")
    if encoder.similarity not in SIMILARITIES:
        raise error_type(
            f"encoder in {folder} compares vectors by {encoder.similarity}, expected cosine or dot;"
            " choose another model"
        )
    return encoder


def _ignores_padding(encoder: TransformerEncoder) -> bool:
    """Whether a text has the same states alone and with padding after it.

    That is tried, because some models take a mask and still mix padding into the states.

    Raises:
        ValueError: the model does not give each token a state of its width.
    """
    model = encoder.model
    table_VH = model.get_input_embeddings().weight
    # A text of 3 tokens, which are the first of the table, and 5 cells of padding.
    text_1TH = table_VH[torch.arange(3) % len(table_VH)].detach()[None]
    with torch.no_grad():
        alone = model(inputs_embeds=text_1TH).last_hidden_state
        expected = [1, 3, int(model.config.hidden_size)]
        if list(alone.shape) != expected:
            raise ValueError(
                f"the states of a text of 3 tokens are {list(alone.shape)}, and only {expected} is"
                " supported: config.hidden_size numbers for each token"
            )
        if encoder.packed and encoder.longest_packed == packed.ANY_LENGTH:
            return True  # it meets no padding
        padded_1TH = F.pad(text_1TH, (0, 0, 0, 5))
        mask_1T = (torch.arange(8) < 3).long()[None]
        try:
            output = model(inputs_embeds=padded_1TH, attention_mask=mask_1T)
        except Exception:  # models without a mask refuse it in many ways
            return False
    difference = (output.last_hidden_state[:, :3] - alone).abs().max()
    return bool(difference <= _TOLERANCE * alone.abs().max())


def _ignores_case(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = None if backend is None else backend.normalizer
    if normalizer is None:
        return False
    return bool(normalizer.normalize_str("A") == normalizer.normalize_str("a"))


def _check_vocabulary(model: Any, name: str, tokenizer: TextTokenizer) -> None:
    num_rows = len(model.get_input_embeddings().weight)
    if tokenizer.kind != "transformer" or tokenizer.vocab_size > num_rows:
        raise ConfigError(
            f"the corpus was prepared with a {tokenizer.kind} tokenizer of {tokenizer.vocab_size} tokens, encoder"
            f" {name!r} needs its own ({num_rows} rows); prepare the corpus again with --tokenizer {name}"
        )


def _check_length(encoder: TransformerEncoder, name: str, max_len: int) -> None:
    """Refuses texts that are longer than the model's table of positions.

    Which length fits is tried, because the settings alone do not say it.
    """
    limit = pretrained.stated_limit(encoder.model)
    if limit is None:
        return
    longest = min(max_len, limit + 1)
    shortest = limit - RESERVED_POSITIONS
    for num_tokens in range(longest, shortest, -1):
        if not _reads(encoder, num_tokens):
            continue
        if num_tokens < longest:
            raise ConfigError(
                f"the corpus keeps up to {max_len} tokens of a text (max_len), {name} reads at most {num_tokens};"
                f" prepare it again with --max-len {num_tokens}"
            )
        return


def _reads(encoder: TransformerEncoder, num_tokens: int) -> bool:
    """Whether the transformer encodes a text of so many tokens."""
    text = np.zeros(num_tokens, np.int64)
    encoder.eval()
    try:
        with torch.no_grad():
            encoder.pooled(Ragged.from_rows([text]))
    except (IndexError, RuntimeError):  # a position without a row; a buffer that is too short
        return False
    return True
