"""Any encoder of the transformers library; folders are those of sentence-transformers.

Only safetensors weights are read, and no code of a model's repository is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import huggingface_hub
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from xmcray.errors import BundleError, ConfigError, one_line
from xmcray.nn import lora, packed
from xmcray.nn.encoder import WEIGHTS, Encoder, EncoderConfig, principal_axes
from xmcray.nn.frozen import EncodedTexts
from xmcray.nn.module_files import save_settings, save_weights
from xmcray.parallel import collectives
from xmcray.parallel.transfers import to_device
from xmcray.storage import read_json
from xmcray.types import Int64Array, Ragged, offsets_of, spans, to_torch

if TYPE_CHECKING:
    from xmcray.data.tokens import TextTokenizer

# Prompts and similarity of a sentence-transformers folder; data/tokens.py reads the prompts too.
SENTENCE_SETTINGS = "config_sentence_transformers.json"
# Similarities that an inner product stands for, perhaps of normalised vectors.
SIMILARITIES = (None, "cosine", "dot", "dot_product")
# How sentence-transformers names the ways of pooling.
POOLINGS = {
    "mean": "mean",
    "cls": "cls",
    "last_token": "lasttoken",
    "weighted_mean": "weightedmean",
}
# How sentence-transformers 6 names the parts of a folder.
MODULES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.sentence_transformer.modules.normalize.Normalize",
}
HUB_FILES = [
    "*.json",
    "*.txt",
    "*.model",
    "model*.safetensors",
    "*/config.json",
    "*_Dense/model.safetensors",
]
# Texts whose vectors decide how the projection of a frozen transformer starts.
FITTED_TEXTS = 32_768
# Names of dropout rates in the settings of BERT and of DistilBERT.
DROPOUT_RATES = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
)


class TransformerEncoder(Encoder):
    """A transformer, its pooled last hidden states, and optionally a bias-free projection.

    Texts are sorted by length. If the model allows it they are packed one after another without
    padding (packed.py); else they run in padded micro-batches, cut where that costs least. The
    order is restored at the end. Pooling and projection are float32 also under autocast.

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
            return self.encoded_texts(tokens).to(lookup.weight)
        device: torch.device = lookup.weight.device
        call_tokens, max_tokens = self.call_costs(device)
        is_packed = self.packed and tokens.lengths.max(initial=0) <= self.longest_packed
        if is_packed:
            batches = token_batches(tokens.lengths, max_tokens)
        else:
            batches = micro_batches(tokens.lengths, call_tokens, max_tokens)
        hidden = lookup.weight.shape[1]
        if not batches:
            # A rank without texts still takes part in the step: its gradient is zero, not absent.
            nothing_BH = lookup.weight.new_zeros(len(tokens), hidden)
            weight = lookup.weight
            if self.adapted:
                weight = next(weight for weight in self.parameters() if weight.requires_grad)
            zero = weight[:0].sum()
            return _at_least_float32(zero + nothing_BH)
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
            pool = self._pooled_packed if is_packed else self._pooled_padded
            pooled.append(pool(token_TH[first:stop], lengths))
            first = stop
        pooled_BH = torch.cat(pooled)
        # Back to the caller's order; texts without tokens are in no batch and stay zero.
        zeros_BH = pooled_BH.new_zeros(len(tokens), hidden)
        return zeros_BH.index_copy(0, row_B, pooled_BH)

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
        with self._autocast(device):
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
        with quiet():
            self.model.save_pretrained(folder, max_shard_size="1TB", state_dict=state)
            self.tokenizer.save_pretrained(folder)
        hidden = int(self.model.config.hidden_size)
        output = {"method": "forward", "method_output_name": "last_hidden_state"}
        transformer = {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": output},
            "module_output_name": "token_embeddings",
        }
        save_settings(folder / "sentence_bert_config.json", transformer)
        # The transformer lies in the folder itself, the other parts in folders by number and kind.
        parts = [("Transformer", "")]

        def add_part(kind: str, settings: dict[str, Any]) -> Path:
            name = f"{len(parts)}_{kind}"
            parts.append((kind, name))
            (folder / name).mkdir(exist_ok=True)
            save_settings(folder / name / "config.json", settings)
            return folder / name

        pooling = {
            "embedding_dimension": hidden,
            "pooling_mode": POOLINGS[self.pooling],
            "include_prompt": True,
        }
        add_part("Pooling", pooling)
        if self.projection is not None:
            dense = {
                "in_features": hidden,
                "out_features": self.dim,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            }
            path = add_part("Dense", dense)
            save_weights(path / WEIGHTS, {"linear.weight": self.projection.weight})
        if self.normalize:
            add_part("Normalize", {})
        modules = []
        for number, (kind, name) in enumerate(parts):
            module = {"idx": number, "name": str(number), "path": name, "type": MODULES[kind]}
            modules.append(module)
        save_settings(folder / "modules.json", modules)
        sentence_settings: dict[str, Any] = {}
        if any(self.prompts.values()):
            sentence_settings["prompts"] = dict(self.prompts)
        if self.similarity is not None:
            sentence_settings["similarity_fn_name"] = self.similarity
        if sentence_settings:
            sentence_settings["model_type"] = "SentenceTransformer"
            save_settings(folder / SENTENCE_SETTINGS, sentence_settings)

    def restore(self, folder: Path) -> None:
        """As for other encoders; adapters are restored as they were, and not merged."""
        if not self.adapted:
            super().restore(folder)
            return
        saved = open_model(folder, BundleError)
        lora.restore_adapters(self.model, folder, saved.model.state_dict())
        if self.projection is not None and saved.projection is not None:
            self.projection.load_state_dict(saved.projection.state_dict())


def _at_least_float32(states: Tensor) -> Tensor:
    return states.float() if states.dtype == torch.bfloat16 else states


def token_batches(lengths: Int64Array, max_tokens: int) -> list[Int64Array]:
    """Rows of texts, shortest first, cut into batches of about `max_tokens` tokens.

    Empty texts are left out.

    Args:
        lengths: int64 [B], tokens per text.
    """
    order = _by_length(lengths)
    if len(order) == 0:
        return []
    # A text belongs to the batch in which its last token falls.
    batch = (np.cumsum(lengths[order]) - 1) // max_tokens
    # A cut lies where the number of the batch changes.
    cuts = np.flatnonzero(np.diff(batch)) + 1
    return np.split(order, cuts)


def _by_length(lengths: Int64Array) -> Int64Array:
    """Rows of the texts that have a token, shortest first."""
    order = np.argsort(lengths, kind="stable")
    return order[lengths[order] > 0]


def micro_batches(lengths: Int64Array, call_tokens: int, max_tokens: int) -> list[Int64Array]:
    """Rows of texts grouped so that padded tokens plus `call_tokens` per group are fewest.

    Empty texts are left out.

    Args:
        lengths: int64 [B], tokens per text.
        call_tokens: what one more call of the model costs, in tokens.
        max_tokens: padded tokens of one group at most (a longer text stands alone).

    Returns:
        Row numbers of each group, shortest texts first.
    """
    order = _by_length(lengths)
    if len(order) == 0:
        return []
    widths, counts = np.unique(lengths[order], return_counts=True)
    num_widths = len(widths)
    ends = offsets_of(counts)
    # Dynamic programming. cheapest[j]: cost of the texts of the j smallest widths, split best.
    # Their last group holds the widths first_width[j] .. j - 1, each padded to the largest of them.
    cheapest = np.zeros(num_widths + 1)
    first_width = np.zeros(num_widths + 1, np.int64)
    for j in range(1, num_widths + 1):
        # For each possible first width i of the last group: the texts of widths i .. j - 1.
        group_sizes = ends[j] - ends[:j]
        costs = cheapest[:j] + widths[j - 1] * group_sizes + call_tokens
        first_width[j] = np.argmin(costs)
        cheapest[j] = costs[first_width[j]]
    # Read the best split from its end, so the groups are found in the opposite order.
    groups: list[Int64Array] = []
    j = num_widths
    while j:
        i = int(first_width[j])
        rows = order[ends[i] : ends[j]]
        # A group that is too large for one call is cut.
        size = max(1, int(max_tokens // widths[j - 1]))
        parts = [rows[span] for span in spans(len(rows), size)]
        groups += reversed(parts)
        j = i
    return groups[::-1]


def build(config: EncoderConfig, tokenizer: TextTokenizer, seed: int) -> TransformerEncoder:
    """The transformer `config.name`, with the configured projection and pooling.

    Raises:
        ConfigError: no such model, or the corpus has another tokenizer.
    """
    encoder = open_model(find(config.name), ConfigError, config.dropout)
    _check_vocabulary(encoder.model, config.name, tokenizer)
    hidden = int(encoder.model.config.hidden_size)
    # All that a frozen encoder can learn is a projection.
    needs_projection = config.frozen and config.dim > 0 and encoder.projection is None
    if config.dim == hidden and not config.frozen:
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
    model = open_model(find(name), ConfigError).model
    _check_vocabulary(model, name, tokenizer)
    table_VH: Tensor = model.get_input_embeddings().weight.detach()
    return table_VH[: tokenizer.vocab_size]


def find(
    name: str, kind: str = "encoder", example: str = "sentence-transformers/all-MiniLM-L6-v2"
) -> Path:
    """The folder of a model: a local one, the hub's cache, or freshly downloaded.

    Args:
        name: folder or hub id.
        kind: of model, for messages.
        example: a hub id of that kind.
    Raises:
        ConfigError: none of the three; without a network within seconds.
    """
    if Path(name).is_dir():
        return Path(name)
    advice = f"give a local folder or a hub id such as {example}"
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=HUB_FILES, local_files_only=True
        )
        if any(Path(folder).glob("model*.safetensors")):
            return Path(folder)
    except ValueError:
        raise ConfigError(
            f"{kind} {name!r} is neither an existing folder nor a hub id; {advice}"
        ) from None
    except OSError:
        pass  # not in the cache
    try:
        # One request with a short time limit first: the download itself would retry for minutes
        # without a network.
        huggingface_hub.HfApi().model_info(name, timeout=10)
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{kind} {name!r} is not on the hub, or it is private; {advice}"
        ) from None
    except Exception as error:  # the hub's client raises errors of its network library too
        fault = type(error).__name__
        raise ConfigError(
            f"{kind} {name!r} is no folder here, is not in the cache and the hub cannot be reached ({fault}); {advice}"
        ) from None


def open_model(
    folder: Path,
    error_type: type[ConfigError | BundleError],
    dropout: float | None = None,
) -> TransformerEncoder:
    """Reads the model and the sentence-transformers parts of a folder.

    Args:
        folder: as `find` returns it.
        error_type: raised if the folder is damaged.
        dropout: replaces the model's own rates; None keeps them.
    """
    try:
        parts = _read_parts(folder, error_type)
        sentence_settings = {}
        if (folder / SENTENCE_SETTINGS).is_file():
            sentence_settings = read_json(folder / SENTENCE_SETTINGS)
        model = _load_model(folder, dropout)
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        projection = None
        if "Dense" in parts:
            weight_DH = load_file(folder / parts["Dense"]["path"] / WEIGHTS)["linear.weight"]
            dim, hidden = weight_DH.shape
            projection = nn.Linear(hidden, dim, bias=False)
            projection.load_state_dict({"weight": weight_DH})
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise error_type(
            f"encoder in {folder} cannot be loaded ({one_line(error)}); it needs config.json and {WEIGHTS}"
        ) from None
    by_name = {name: pooling for pooling, name in POOLINGS.items()}
    pooling = by_name[parts["Pooling"]["pooling_mode"]]
    encoder = TransformerEncoder(model, tokenizer, pooling, projection, "Normalize" in parts)
    encoder.prompts = sentence_settings.get("prompts") or {}
    encoder.similarity = sentence_settings.get("similarity_fn_name")
    if encoder.similarity not in SIMILARITIES:
        raise error_type(
            f"encoder in {folder} compares vectors by {encoder.similarity}, expected cosine or dot;"
            " choose another model"
        )
    return encoder


def _load_model(folder: Path, dropout: float | None) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if dropout is not None:
        for rate in DROPOUT_RATES:
            if hasattr(config, rate):
                setattr(config, rate, dropout)
    options: dict[str, Any] = {}
    model_class: Any = transformers.MODEL_MAPPING.get(type(config), None)
    # An unused pooler would have parameters without a gradient.
    if model_class and "add_pooling_layer" in inspect.signature(model_class).parameters:
        options["add_pooling_layer"] = False
    supports_sdpa = getattr(model_class, "_supports_sdpa", True)
    with quiet():
        model = transformers.AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="sdpa" if supports_sdpa else "eager",
            **options,
        )
    fill_constants(model)
    return model


def fill_constants(model: nn.Module) -> None:
    """Writes the buffers that no file has: positions 0, 1, 2, ..., token types 0, and rotations.

    transformers leaves them without values in a process where device contexts do not work on
    `torch.tensor`, because it then takes them for initialised.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
        elif name.endswith("token_type_ids"):
            buffer.zero_()
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__ and hasattr(module, "config"):
            # Its buffers follow from the model's settings alone.
            for name, buffer in type(module)(module.config).named_buffers():
                module.get_buffer(name).copy_(buffer)


def _read_parts(
    folder: Path, error_type: type[ConfigError | BundleError]
) -> dict[str, dict[str, Any]]:
    """Settings of the parts of a sentence-transformers folder by kind, with the part's path.

    Releases before 6 had another form of the pooling's settings, which is translated.
    """
    parts: dict[str, dict[str, Any]] = {"Pooling": {"pooling_mode": "mean"}}
    modules_file = folder / "modules.json"
    if not modules_file.is_file():
        return parts
    for module in json.loads(modules_file.read_text(encoding="utf-8")):
        # The class alone: its module has moved between releases.
        kind = module["type"].rsplit(".", 1)[-1]
        settings: dict[str, Any] = {}
        path = folder / module["path"] / "config.json"
        # The config.json of the transformer itself is that of the model.
        if kind != "Transformer" and path.is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
        if kind == "Pooling" and not settings.get("pooling_mode"):
            settings["pooling_mode"] = _old_pooling_mode(settings)
        if kind not in MODULES or not _is_supported(kind, settings):
            raise error_type(
                f"encoder in {folder} has a part {kind} {settings.get('pooling_mode', '')} that is not supported;"
                f" expected pooling by {', '.join(POOLINGS.values())} with the prompt's tokens, and at most a"
                " bias-free dense layer without activation and a normalisation"
            )
        parts[kind] = {**settings, "path": module["path"]}
    return parts


def _old_pooling_mode(settings: dict[str, Any]) -> str:
    """The pooling of older folders, which have a switch per mode; several may be on."""
    modes = []
    for key, is_on in settings.items():
        prefix, _, mode = key.partition("pooling_mode_")
        if mode and not prefix and is_on:
            modes.append(mode.removesuffix("_tokens").removesuffix("_token"))
    return "+".join(modes)


def _is_supported(kind: str, settings: dict[str, Any]) -> bool:
    if kind == "Pooling":
        # Without `include_prompt`, the tokens of the prompt would be left out of the mean.
        return settings["pooling_mode"] in POOLINGS.values() and settings.get(
            "include_prompt", True
        )
    if kind == "Dense":
        is_linear = str(settings.get("activation_function", "")).endswith("Identity")
        return is_linear and not settings.get("bias", True)
    return True


def _check_vocabulary(model: Any, name: str, tokenizer: TextTokenizer) -> None:
    num_rows = len(model.get_input_embeddings().weight)
    if tokenizer.kind != "transformer" or tokenizer.vocab_size > num_rows:
        raise ConfigError(
            f"the corpus was prepared with a {tokenizer.kind} tokenizer of {tokenizer.vocab_size} tokens, encoder"
            f" {name!r} needs its own ({num_rows} rows); prepare the corpus again with --tokenizer {name}"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides the library's progress bars, which would break our own bar into pieces."""
    logging = transformers.utils.logging
    bar_was_enabled = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar_was_enabled:
            logging.enable_progress_bar()
