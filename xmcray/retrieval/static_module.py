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

FILES = ("static.json", "xmcray.json", "tokenizer.json", "model.safetensors")
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
        is_label = task == "document"
        max_len = self.settings["label_max_len" if is_label else "max_len"]
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_len)
        texts = [(prompt or "") + text for text in inputs]
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        ids = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        if is_label and self.settings["separate_labels"]:
            # Rows of labels follow those of queries, and their pairs.
            ids += self.settings["vocab_size"] + self.settings["bigram_buckets"]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return {"input_ids": ids, "lengths": lengths}

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        """Adds `sentence_embedding` [B, D]."""
        row_T, weight_T, text_T = self._rows(features["input_ids"], features["lengths"])
        table_VD = self.weights["embedding_weight"]
        sum_BD = table_VD.new_zeros(len(features["lengths"]), self.settings["dim"])
        square_B = sum_BD.new_zeros(len(sum_BD))
        sum_BD.index_add_(0, text_T, weight_T[:, None] * table_VD[row_T])
        square_B.index_add_(0, text_T, weight_T.square())
        vector_BD = sum_BD * square_B.clamp_min(1e-12).rsqrt()[:, None]
        if self.settings["residual"]:
            hidden_BD = F.linear(
                vector_BD, self.weights["hidden_weight"], self.weights["hidden_bias"]
            )
            added_BD = F.linear(
                F.gelu(hidden_BD), self.weights["out_weight"], self.weights["out_bias"]
            )
            vector_BD = vector_BD + added_BD
        features["sentence_embedding"] = vector_BD
        return features

    def _rows(self, token_T: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Table row, weight and text of each token, and after them of each pair of tokens."""
        num_tokens = self.settings["vocab_size"]
        buckets = self.settings["bigram_buckets"]
        texts = torch.arange(len(lengths_B), device=lengths_B.device)
        text_T = texts.repeat_interleave(lengths_B)
        start_B = lengths_B.cumsum(0) - lengths_B
        place_T = torch.arange(len(token_T), device=token_T.device) - start_B[text_T]
        own_T = token_T % (num_tokens + buckets)
        weight_T = self.weights["weight"][own_T]
        decay_T = torch.exp(place_T.to(weight_T.dtype) / -DECAY_TOKENS)
        weight_T = weight_T * (1 + self.settings["position_decay"] * decay_T)
        if not buckets:
            return token_T, weight_T, text_T
        # Each token but the last of its text, with the token to its right.
        left_P = torch.nonzero(text_T[1:] == text_T[:-1])[:, 0]
        right_P = left_P + 1
        mixed_P = own_T[left_P] * 2_654_435_761 + own_T[right_P] * 2_246_822_519
        bucket_P = ((mixed_P & 0xFFFFFFFFFFFF) >> 12) % buckets
        # Rows of pairs follow those of the tokens, on the side of queries or of labels.
        side_P = token_T[left_P] - own_T[left_P]
        pair_weight_P = (weight_T[left_P] + weight_T[right_P]) / 2
        row_T = torch.cat([token_T, side_P + num_tokens + bucket_P])
        return row_T, torch.cat([weight_T, pair_weight_P]), torch.cat([text_T, text_T[left_P]])

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
        for name in FILES[:2]:
            (folder / name).write_text(json.dumps(self.settings), encoding="utf-8")
        self.tokenizer.save(str(folder / FILES[2]))
        state = {name: self.weights[name.replace(".", "_")].data for name in self.names}
        save_file(state, folder / FILES[3])

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **options: Any) -> StaticText:
        """Reads `FILES` of a folder, or of a model on the hub."""
        known = ("token", "cache_folder", "revision", "local_files_only")
        hub = {name: options[name] for name in known if name in options}
        paths = []
        for name in FILES:
            path = Path(model_name_or_path, subfolder, name)
            if not path.is_file():
                path = Path(cls.load_file_path(model_name_or_path, name, subfolder, **hub))
            paths.append(path)
        settings: dict[str, Any] = {}
        for path in paths[:2]:
            settings |= json.loads(path.read_text(encoding="utf-8"))
        return cls(settings, Tokenizer.from_file(str(paths[2])), load_file(paths[3]))
