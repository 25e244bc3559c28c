"""A static encoder as a module of sentence-transformers; exported folders carry a copy of this file.

So it imports nothing of xmcray, whose own encoder is nn/static.py: where a folder is opened, only
sentence-transformers is installed. A text's vector is x = sum_t w_t e_t / sqrt(sum_t w_t^2), plus
W2 gelu(W1 x) if there is a network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

try:
    from sentence_transformers.base.modules.input_module import InputModule
except ImportError:  # in tests of xmcray
    InputModule = nn.Module

SETTINGS_FILES = ("static.json", "xmcray.json")
TOKENIZER_FILE = "tokenizer.json"
STATE_FILE = "model.safetensors"
FILES = (*SETTINGS_FILES, TOKENIZER_FILE, STATE_FILE)
# Tokens over which the extra weight of a text's first tokens falls by a factor e.
DECAY_TOKENS = 10.0


class StaticText(InputModule):  # type: ignore[misc]
    """Texts to vectors by the rows of their tokens, and of pairs of neighbouring ones.

    Args:
        settings: of static.json and xmcray.json, which xmcray wrote.
        tokenizer: of the corpus.
        state: of model.safetensors.
    """

    def __init__(
        self, settings: dict[str, Any], tokenizer: Tokenizer, state: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.settings = settings
        self.tokenizer = tokenizer
        # Parameters of a sentence-transformers model are found by their names in the file.
        self.weights = nn.ParameterDict()
        for name, tensor in state.items():
            self.weights[name.replace(".", "_")] = nn.Parameter(tensor, requires_grad=False)
        self.names = list(state)

    def preprocess(
        self,
        inputs: Sequence[str],
        prompt: str | None = None,
        task: str | None = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Token ids of texts, one text after another; label texts are those of the task "document"."""
        settings = self.settings
        is_label = task == "document"
        max_len = settings["label_max_len"] if is_label else settings["max_len"]
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_len)
        texts = [(prompt or "") + text for text in inputs]
        lengths = []
        tokens: list[int] = []
        for encoding in self.tokenizer.encode_batch(texts):
            lengths.append(len(encoding.ids))
            tokens += encoding.ids
        token_T = torch.tensor(tokens, dtype=torch.int64)
        if is_label and settings["separate_labels"]:
            # Rows of labels follow those of queries, and their pairs.
            token_T += settings["vocab_size"] + settings["bigram_buckets"]
        return {"input_ids": token_T, "lengths": torch.tensor(lengths, dtype=torch.int64)}

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        """Adds `sentence_embedding` [B, D]."""
        lengths_B = features["lengths"]
        row_R, weight_R, text_R = self._rows(features["input_ids"], lengths_B)
        table_VD = self.weights["embedding_weight"]
        sum_BD = table_VD.new_zeros(len(lengths_B), self.settings["dim"])
        sum_BD.index_add_(0, text_R, weight_R[:, None] * table_VD[row_R])
        square_B = table_VD.new_zeros(len(lengths_B))
        square_B.index_add_(0, text_R, weight_R.square())
        # A text without tokens is the zero vector.
        scale_B = square_B.clamp_min(1e-12).rsqrt()
        vector_BD = sum_BD * scale_B[:, None]
        if self.settings["residual"]:
            vector_BD = vector_BD + self._network(vector_BD)
        features["sentence_embedding"] = vector_BD
        return features

    def _network(self, vector_BD: Tensor) -> Tensor:
        """W2 gelu(W1 x) [B, D]."""
        weights = self.weights
        hidden_BD = F.linear(vector_BD, weights["hidden_weight"], weights["hidden_bias"])
        added_BD: Tensor = F.linear(F.gelu(hidden_BD), weights["out_weight"], weights["out_bias"])
        return added_BD

    def _rows(self, token_T: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Table row, weight and text of each token, and after them of each pair of neighbours."""
        num_tokens = self.settings["vocab_size"]
        num_pairs = self.settings["bigram_buckets"]
        text_ids = torch.arange(len(lengths_B), device=lengths_B.device)
        text_T = text_ids.repeat_interleave(lengths_B)
        # A token of a label counts as the query's token of the same number.
        own_T = token_T % (num_tokens + num_pairs)
        weight_T = self.weights["weight"][own_T] * self._decay(text_T, lengths_B)
        if not num_pairs:
            return token_T, weight_T, text_T
        # Each token but the last of its text, with the token to its right.
        left_P = torch.nonzero(text_T[1:] == text_T[:-1])[:, 0]
        right_P = left_P + 1
        mixed_P = own_T[left_P] * 2_654_435_761 + own_T[right_P] * 2_246_822_519
        bucket_P = ((mixed_P & 0xFFFFFFFFFFFF) >> 12) % num_pairs
        # Rows of pairs follow those of the tokens, on the side of queries or of labels.
        side_P = token_T[left_P] - own_T[left_P]
        row_P = side_P + num_tokens + bucket_P
        weight_P = (weight_T[left_P] + weight_T[right_P]) / 2
        row_R = torch.cat([token_T, row_P])
        weight_R = torch.cat([weight_T, weight_P])
        text_R = torch.cat([text_T, text_T[left_P]])
        return row_R, weight_R, text_R

    def _decay(self, text_T: Tensor, lengths_B: Tensor) -> Tensor:
        """The factor of each token's weight for its place in its text."""
        start_B = lengths_B.cumsum(0) - lengths_B
        place_T = torch.arange(len(text_T), device=text_T.device) - start_B[text_T]
        extra_T = torch.exp(place_T.to(self.weights["weight"].dtype) / -DECAY_TOKENS)
        factor_T: Tensor = 1 + self.settings["position_decay"] * extra_T
        return factor_T

    @property
    def max_seq_length(self) -> int:
        """Tokens kept of a query."""
        return int(self.settings["max_len"])

    def get_embedding_dimension(self) -> int:
        """D."""
        return int(self.settings["dim"])

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Writes `FILES`."""
        folder = Path(output_path)
        settings = json.dumps(self.settings)
        for name in SETTINGS_FILES:
            (folder / name).write_text(settings, encoding="utf-8")
        self.tokenizer.save(str(folder / TOKENIZER_FILE))
        state = {}
        for name in self.names:
            state[name] = self.weights[name.replace(".", "_")].data
        save_file(state, folder / STATE_FILE)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **options: Any) -> StaticText:
        """Reads `FILES` of a folder, or of a model on the hub."""
        hub_options = ("token", "cache_folder", "revision", "local_files_only")
        hub = {name: options[name] for name in hub_options if name in options}
        paths = {}
        for name in FILES:
            path = Path(model_name_or_path, subfolder, name)
            if not path.is_file():
                path = Path(cls.load_file_path(model_name_or_path, name, subfolder, **hub))
            paths[name] = path
        settings: dict[str, Any] = {}
        for name in SETTINGS_FILES:
            settings |= json.loads(paths[name].read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(paths[TOKENIZER_FILE]))
        return cls(settings, tokenizer, load_file(paths[STATE_FILE]))
