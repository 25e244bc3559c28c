"""Any encoder of the transformers library as a text encoder; folders are those of sentence-transformers.

Only safetensors weights are read and no code of a model's repository is run.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import huggingface_hub
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from xmcray.errors import BundleError, ConfigError
from xmcray.nn import packed
from xmcray.nn.encoder import WEIGHTS, Encoder, EncoderConfig
from xmcray.nn.frozen import EncodedTexts
from xmcray.types import Int64Array, Ragged, to_torch

if TYPE_CHECKING:
    from xmcray.data.tokens import TextTokenizer

MODULES = {  # how sentence-transformers 6 names the parts of a folder
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


class TransformerEncoder(Encoder):
    """A transformer, its pooled last hidden states, and optionally a bias-free projection to fewer dimensions.

    Texts are sorted by length and run one after another without padding (packed.py) where the model can, and in padded
    micro-batches cut where that costs least where it cannot; the order is restored at the end. Pooling and projection
    are float32 also under autocast.

    Args:
        model: a transformers model with `last_hidden_state`, without pooler.
        tokenizer: the model's own tokenizer; only saved with it.
        pooling: "mean" over the text's tokens, or "cls": the first token.
        projection: bias-free linear layer, or None.
        normalize: divide by the length, as a sentence-transformers folder may ask for.
        autocast: as in EncoderConfig.
    Attributes:
        frozen: only the projection learns. known: then, vectors of the texts that are trained with.
    """

    known: EncodedTexts | None = None

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
        self.model, self.tokenizer, self.projection = model, tokenizer, projection
        self.pooling, self.normalize, self.autocast = pooling, normalize, autocast
        self.dim = (
            projection.out_features if projection is not None else int(model.config.hidden_size)
        )
        self.packed = packed.try_on(model)
        self.frozen = False

    def forward(self, tokens: Ragged) -> Tensor:
        """query_BD; a text without tokens is the zero vector."""
        pooled_BH = self.pooled(tokens)
        query_BD = pooled_BH if self.projection is None else self.projection(pooled_BH)
        return F.normalize(query_BD, dim=-1) if self.normalize else query_BD

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
        self, folder: Path, num_texts: int, tokens_of: Callable[[Int64Array], Ragged]
    ) -> None:
        """A frozen transformer runs once over each text that training asks for."""
        if self.frozen:
            self.known = EncodedTexts(folder, num_texts, tokens_of, self.pooled)

    def pooled(self, tokens: Ragged) -> Tensor:
        """[B, H], pooled states of texts, before projection and normalisation."""
        lookup = self.model.get_input_embeddings()
        if self.known is not None:
            return self.known(tokens).to(lookup.weight)
        device: torch.device = lookup.weight.device
        call_tokens, max_tokens = _costs(device, self.training)
        batches = (
            token_batches(tokens.lengths, max_tokens)
            if self.packed
            else micro_batches(tokens.lengths, call_tokens, max_tokens)
        )
        if (
            not batches
        ):  # a rank without texts still takes part in the step: its gradient is zero, not absent
            nothing = lookup.weight[:0].sum() + lookup.weight.new_zeros(
                len(tokens), lookup.weight.shape[1]
            )
            return cast(Tensor, nothing.float())
        # One lookup for all micro-batches: its backward fills a table of the whole vocabulary, so once is enough.
        sorted_tokens = tokens.take(np.concatenate(batches))
        token_TH = lookup(to_torch(sorted_tokens.values).to(device))
        pooled: list[Tensor] = []
        first = 0
        for rows in batches:
            lengths = tokens.lengths[rows]
            pooled.append(self._pooled(token_TH[first : first + int(lengths.sum())], lengths))
            first += int(lengths.sum())
        pooled_BH = torch.cat(pooled)
        row_B = to_torch(np.concatenate(batches)).to(device)
        return pooled_BH.new_zeros(len(tokens), pooled_BH.shape[1]).index_copy(0, row_B, pooled_BH)

    def _pooled(self, token_TH: Tensor, lengths: Int64Array) -> Tensor:
        """One micro-batch of texts, none of them empty, through the transformer: pooled_BH."""
        device = token_TH.device
        if self.packed:
            with self._autocast(device):
                state_TH = packed.run(self.model, token_TH, lengths)
            if state_TH.dtype == torch.bfloat16:
                state_TH = state_TH.float()
            if self.pooling == "cls":
                return state_TH[to_torch(np.cumsum(lengths) - lengths).to(device)]
            return packed.means(state_TH, lengths)
        mask = np.arange(lengths.max()) < lengths[:, None]
        mask_BT = to_torch(mask).to(device)
        attention_BT: Tensor | None = mask_BT.long()
        if mask.all():  # without padding no mask is passed: attention then takes its fastest path
            attention_BT, padded_BTH = None, token_TH.view(*mask.shape, -1)
        else:
            cell_T = to_torch(np.flatnonzero(mask)).to(device)
            padded_BTH = token_TH.new_zeros(mask.size, token_TH.shape[1]).index_copy(
                0, cell_T, token_TH
            )
            padded_BTH = padded_BTH.view(*mask.shape, -1)
        with self._autocast(device):
            output = self.model(inputs_embeds=padded_BTH, attention_mask=attention_BT)
        state_BTH: Tensor = output.last_hidden_state
        if state_BTH.dtype == torch.bfloat16:
            state_BTH = state_BTH.float()
        if self.pooling == "cls":
            return state_BTH[:, 0]
        if attention_BT is None:
            return state_BTH.mean(dim=1)
        return (state_BTH * mask_BT[..., None]).sum(dim=1) / mask_BT.sum(dim=1, keepdim=True)

    def _autocast(self, device: torch.device) -> torch.autocast:
        supported = device.type == "cuda" and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        bf16 = self.autocast == "bf16" or (self.autocast == "auto" and supported)
        return torch.autocast(device.type, torch.bfloat16, enabled=bf16)

    def save(self, folder: Path) -> None:
        """Writes a folder that sentence-transformers loads unchanged."""
        folder.mkdir(parents=True, exist_ok=True)
        with _quiet():
            self.model.save_pretrained(folder, max_shard_size="1TB")
            self.tokenizer.save_pretrained(folder)
        hidden = int(self.model.config.hidden_size)
        reads = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
        task = {"transformer_task": "feature-extraction", "modality_config": reads}
        parts: list[tuple[str, dict[str, Any]]] = [
            ("Transformer", {**task, "module_output_name": "token_embeddings"}),
            (
                "Pooling",
                {
                    "embedding_dimension": hidden,
                    "pooling_mode": self.pooling,
                    "include_prompt": True,
                },
            ),
        ]
        if self.projection is not None:
            width = {"in_features": hidden, "out_features": self.dim, "bias": False}
            parts.append(
                ("Dense", {**width, "activation_function": "torch.nn.modules.linear.Identity"})
            )
        if self.normalize:
            parts.append(("Normalize", {}))
        paths = ["", *(f"{i}_{kind}" for i, (kind, _) in enumerate(parts) if i)]
        for (kind, settings), path in zip(parts, paths, strict=True):
            (folder / path).mkdir(exist_ok=True)
            _write(
                folder / path / ("config.json" if path else "sentence_bert_config.json"), settings
            )
            if kind == "Dense" and self.projection is not None:
                weight = self.projection.weight.detach().cpu().contiguous()
                save_file({"linear.weight": weight}, folder / path / WEIGHTS)
        _write(
            folder / "modules.json",
            [
                {"idx": i, "name": str(i), "path": paths[i], "type": MODULES[kind]}
                for i, (kind, _) in enumerate(parts)
            ],
        )


def _costs(device: torch.device, training: bool) -> tuple[int, int]:
    """What one more call costs, in tokens, and the most tokens of a call (benchmarks/encoder_speed.py).

    It must not depend on whether there is a graph: gradient caching encodes a text twice and replays its dropout.
    """
    if device.type != "cpu":
        return 4096, 131072
    return (64, 8192) if training else (32, 2048)


def token_batches(lengths: Int64Array, max_tokens: int) -> list[Int64Array]:
    """Rows of texts, shortest first, in runs of about `max_tokens` tokens; empty texts are left out."""
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    run = (np.cumsum(lengths[order]) - 1) // max_tokens
    return np.split(order, np.flatnonzero(np.diff(run)) + 1) if len(order) else []


def micro_batches(lengths: Int64Array, call_tokens: int, max_tokens: int) -> list[Int64Array]:
    """Rows of texts grouped so that padded tokens plus `call_tokens` per group are fewest; empty texts are left out.

    Args:
        lengths: int64 [B], tokens per text.
        call_tokens: what one more call of the model costs, in tokens.
        max_tokens: padded tokens of one group at most (a longer text stands alone).
    Returns:
        Row numbers of each group, shortest texts first.
    """
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    if len(order) == 0:
        return []
    widths, counts = np.unique(lengths[order], return_counts=True)
    ends = np.concatenate([[0], np.cumsum(counts)])
    # cheapest[j]: the texts of the j smallest widths, split best; the last group holds widths start[j] .. j - 1.
    cheapest, start = np.zeros(len(widths) + 1), np.zeros(len(widths) + 1, np.int64)
    for j in range(1, len(widths) + 1):
        costs = cheapest[:j] + widths[j - 1] * (ends[j] - ends[:j]) + call_tokens
        start[j] = np.argmin(costs)
        cheapest[j] = costs[start[j]]
    groups: list[Int64Array] = []
    j = len(widths)
    while j:
        rows, fit = order[ends[start[j]] : ends[j]], max(1, int(max_tokens // widths[j - 1]))
        groups += [rows[i : i + fit] for i in range(0, len(rows), fit)][::-1]
        j = int(start[j])
    return groups[::-1]


def build(config: EncoderConfig, tokenizer: TextTokenizer, seed: int) -> TransformerEncoder:
    """The transformer `config.name`, with the projection and pooling the configuration asks for.

    Raises:
        ConfigError: no such model, or the corpus has another tokenizer.
    """
    encoder = _open(find(config.name), ConfigError, config.dropout)
    _check_vocabulary(encoder.model, config.name, tokenizer)
    hidden = int(encoder.model.config.hidden_size)
    untrained = config.frozen and config.dim > 0 and encoder.projection is None
    if config.dim == hidden and not config.frozen:
        encoder.projection = None
    elif config.dim not in (0, encoder.dim) or untrained:
        encoder.projection = nn.Linear(hidden, config.dim, bias=False)
        # Orthogonal rows keep inner products best while nothing is learned yet.
        nn.init.orthogonal_(
            encoder.projection.weight, generator=torch.Generator().manual_seed(seed)
        )
    encoder.dim = config.dim or encoder.dim
    encoder.pooling = encoder.pooling if config.pooling == "auto" else config.pooling
    encoder.autocast = config.autocast
    encoder.normalize = False  # the method decides whether vectors have length 1
    encoder.tokenizer.model_max_length = tokenizer.max_len
    if config.frozen:
        encoder.freeze()
    return encoder.train()


def load(folder: Path) -> TransformerEncoder:
    """The encoder of a folder of ours, of sentence-transformers, or a plain transformer (mean pooling).

    Raises:
        BundleError: the folder is damaged, or uses parts that this encoder does not have.
    """
    return _open(folder, BundleError).eval()


def input_embeddings(name: str, tokenizer: TextTokenizer) -> Tensor:
    """Input embeddings of a transformer, float32 [V, H], for a corpus with that transformer's tokenizer."""
    model = _open(find(name), ConfigError).model
    _check_vocabulary(model, name, tokenizer)
    table_VH: Tensor = model.get_input_embeddings().weight.detach()
    return table_VH[: tokenizer.vocab_size]


def find(name: str) -> Path:
    """The folder of a model: a local one, the hub's cache, or freshly downloaded.

    Raises:
        ConfigError: none of the three; without a network within seconds.
    """
    if Path(name).is_dir():
        return Path(name)
    advice = "give a local folder or a hub id such as sentence-transformers/all-MiniLM-L6-v2"
    try:
        cached = Path(
            huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True)
        )
        if any(cached.glob("model*.safetensors")):
            return cached
    except ValueError:
        raise ConfigError(
            f"encoder {name!r} is neither an existing folder nor a hub id; {advice}"
        ) from None
    except OSError:
        pass  # not in the cache
    try:
        # One request with a short time limit first: the download itself would retry for minutes without a network.
        huggingface_hub.HfApi().model_info(name, timeout=10)
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise ConfigError(
            f"encoder {name!r} is not on the hub, or it is private; {advice}"
        ) from None
    except Exception as error:  # the hub's client lets errors of its network library through
        found = type(error).__name__
        raise ConfigError(
            f"encoder {name!r} is no folder here, is not in the cache and the hub cannot be reached ({found}); {advice}"
        ) from None


def _open(
    folder: Path, kind: type[ConfigError] | type[BundleError], dropout: float | None = None
) -> TransformerEncoder:
    """Reads the model and the sentence-transformers parts of a folder; mistakes in it raise `kind`."""
    try:
        parts = _parts(folder, kind)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for rate in (
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "dropout",
            "attention_dropout",
        ):
            if dropout is not None and hasattr(config, rate):
                setattr(config, rate, dropout)
        options: dict[str, Any] = {
            "use_safetensors": True,
            "trust_remote_code": False,
            "attn_implementation": "sdpa",
        }
        family: Any = transformers.MODEL_MAPPING.get(type(config), None)
        if family is not None and "add_pooling_layer" in inspect.signature(family).parameters:
            options["add_pooling_layer"] = (
                False  # an unused pooler would have parameters without a gradient
            )
        with _quiet():
            model = transformers.AutoModel.from_pretrained(
                folder, config=config, dtype=torch.float32, **options
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        projection = None
        if "Dense" in parts:
            weight_DH = load_file(folder / parts["Dense"]["path"] / WEIGHTS)["linear.weight"]
            projection = nn.Linear(weight_DH.shape[1], weight_DH.shape[0], bias=False)
            projection.load_state_dict({"weight": weight_DH})
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        found = " ".join(str(error).split())[:200]
        raise kind(
            f"encoder in {folder} cannot be loaded ({found}); it needs config.json and {WEIGHTS}"
        ) from None
    return TransformerEncoder(
        model, tokenizer, parts["Pooling"]["mode"], projection, "Normalize" in parts
    )


def _parts(folder: Path, error: type[ConfigError] | type[BundleError]) -> dict[str, dict[str, Any]]:
    """The modules of a sentence-transformers folder by kind, in the present and in the older form."""
    if not (folder / "modules.json").is_file():
        return {"Pooling": {"mode": "mean"}}
    parts = {}
    for module in json.loads((folder / "modules.json").read_text(encoding="utf-8")):
        kind = module["type"].rsplit(".", 1)[-1]
        settings = folder / module["path"] / "config.json"
        part = (
            json.loads(settings.read_text(encoding="utf-8"))
            if settings.is_file() and kind != "Transformer"
            else {}
        )
        if kind == "Pooling":
            old = [
                name
                for name in ("cls_token", "mean_tokens", "max_tokens")
                if part.get(f"pooling_mode_{name}")
            ]
            part["mode"] = part.get("pooling_mode") or "+".join(old).split("_")[0]
        linear = str(part.get("activation_function", "")).endswith("Identity") and not part.get(
            "bias", True
        )
        if (
            kind not in MODULES
            or (kind == "Dense" and not linear)
            or part.get("mode", "mean") not in ("mean", "cls")
        ):
            raise error(
                f"encoder in {folder} has a part {kind} {part.get('mode', '')} that is not supported; expected mean or"
                " cls pooling, and at most a bias-free dense layer without activation and a normalisation"
            )
        parts[kind] = {**part, "path": module["path"]}
    return {"Pooling": {"mode": "mean"}, **parts}


def _check_vocabulary(model: Any, name: str, tokenizer: TextTokenizer) -> None:
    rows = len(model.get_input_embeddings().weight)
    if tokenizer.kind != "transformer" or tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the corpus was prepared with a {tokenizer.kind} tokenizer of {tokenizer.vocab_size} tokens, encoder"
            f" {name!r} needs its own ({rows} rows); prepare the corpus again with --tokenizer {name}"
        )


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's progress bars: reading six megabytes needs none, and they would tear our own."""
    logging = transformers.utils.logging
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
