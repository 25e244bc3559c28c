"""A static encoder as a module of sentence-transformers. Exported folders have a copy of this file.

An exported folder is opened where only sentence-transformers is installed, so this file imports
nothing of xmcray. The folder is written where sentence-transformers may be missing, so xmcray
copies this file and does not import it. The encoder that xmcray itself uses is in nn/static.py.

A text's vector is x = sum_t w_t e_t / sqrt(sum_t w_t^2), plus W2 gelu(W1 x) if there is a network.
Each e_t is the row of a token, or of a pair of neighbouring tokens, in one table:

    tokens | pairs                                  if queries and labels share rows
    tokens | pairs | label tokens | label pairs     if labels have rows of their own

Letters of axes:

    B  texts                  T  tokens of all texts, one after another
    P  pairs of neighbours    R  tokens and, after them, pairs
    V  rows of the table      D  width of a vector
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules.input_module import InputModule
from tokenizers import Tokenizer
from torch import Tensor, nn

SETTINGS_FILES = ("static.json", "xmcray.json")
TOKENIZER_FILE = "tokenizer.json"
STATE_FILE = "model.safetensors"
HUB_OPTIONS = ("token", "cache_folder", "revision", "local_files_only")
# Tokens over which the extra weight of a text's first tokens falls by a factor e.
DECAY_TOKENS = 10.0


class StaticText(InputModule):  # type: ignore[misc]
    """Makes vectors of texts from the rows of their tokens and of pairs of neighbouring tokens.

    Args:
        settings: content of static.json and xmcray.json, which xmcray wrote.
        tokenizer: the tokenizer of the corpus.
        state: tensors of model.safetensors.
    """

    def __init__(
        self, settings: dict[str, Any], tokenizer: Tokenizer, state: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.settings = settings
        self.dim = int(settings["dim"])
        self.vocab_size = int(settings["vocab_size"])
        self.num_buckets = int(settings["bigram_buckets"])
        # Rows for queries. If labels have rows of their own, the table has as many again for them.
        self.side_rows = self.vocab_size + self.num_buckets
        self.tokenizer = tokenizer
        self.names = list(state)
        self.weights = nn.ParameterDict()
        for name, tensor in state.items():
            self.weights[_parameter_name(name)] = nn.Parameter(tensor, requires_grad=False)

    def preprocess(
        self,
        inputs: Sequence[str],
        prompt: str | None = None,
        task: str | None = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Token ids of all texts, and the number of tokens of each.

        Args:
            inputs: B texts.
            prompt: stands before each text that is not empty.
            task: "document" for label texts; anything else for queries.
        Returns:
            "input_ids" int64 [T] and "lengths" int64 [B].
        """
        is_label = task == "document"
        length_setting = "label_max_len" if is_label else "max_len"
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.settings[length_setting])
        prefix = prompt or ""
        texts = [prefix + text if text else "" for text in inputs]
        lengths = []
        tokens: list[int] = []
        for encoding in self.tokenizer.encode_batch(texts):
            lengths.append(len(encoding.ids))
            tokens += encoding.ids
        token_T = torch.tensor(tokens, dtype=torch.int64)
        length_B = torch.tensor(lengths, dtype=torch.int64)
        if is_label and self.settings["separate_labels"]:
            token_T += self.side_rows
        return {"input_ids": token_T, "lengths": length_B}

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        """Adds the vectors of the texts to the features: "sentence_embedding" [B, D]."""
        lengths_B = features["lengths"]
        row_R, weight_R, text_R = self._rows(features["input_ids"], lengths_B)
        table_VD = self.weights["embedding_weight"]
        num_texts = len(lengths_B)
        # `text_R` says to which text a token or pair belongs, so `index_add_` sums over each text.
        weighted_RD = weight_R[:, None] * table_VD[row_R]
        sum_BD = table_VD.new_zeros(num_texts, self.dim)
        sum_BD.index_add_(0, text_R, weighted_RD)
        square_B = table_VD.new_zeros(num_texts)
        square_B.index_add_(0, text_R, weight_R.square())
        # A text without tokens keeps the vector 0, because of the lower bound of the divisor.
        scale_B = square_B.clamp_min(1e-12).rsqrt()
        vector_BD = sum_BD * scale_B[:, None]
        if self.settings["residual"]:
            vector_BD = vector_BD + self._network(vector_BD)
        features["sentence_embedding"] = vector_BD
        return features

    def _network(self, vector_BD: Tensor) -> Tensor:
        """W2 gelu(W1 x) [B, D]."""
        hidden_BD = self._linear("hidden", vector_BD)
        return self._linear("out", F.gelu(hidden_BD))

    def _linear(self, name: str, input_BD: Tensor) -> Tensor:
        weight = self.weights[f"{name}_weight"]
        bias = self.weights[f"{name}_bias"]
        return F.linear(input_BD, weight, bias)

    def _rows(self, token_T: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Table row, weight and text of each token, then those of each pair of neighbours."""
        text_ids = torch.arange(len(lengths_B), device=lengths_B.device)
        text_T = text_ids.repeat_interleave(lengths_B)
        # There is one weight per token. A token of a label has that of the same token of a query.
        token_weight_T = self.weights["weight"][token_T % self.side_rows]
        weight_T = token_weight_T * self._position_factor(text_T, lengths_B)
        if not self.num_buckets:
            return token_T, weight_T, text_T
        # Each token but the last of its text makes a pair with the token to its right.
        has_right_T = text_T[1:] == text_T[:-1]
        left_P = torch.nonzero(has_right_T)[:, 0]
        right_P = left_P + 1
        weight_P = (weight_T[left_P] + weight_T[right_P]) / 2
        pair_row_P = self._pair_rows(token_T[left_P], token_T[right_P])
        row_R = torch.cat([token_T, pair_row_P])
        weight_R = torch.cat([weight_T, weight_P])
        text_R = torch.cat([text_T, text_T[left_P]])
        return row_R, weight_R, text_R

    def _pair_rows(self, left_P: Tensor, right_P: Tensor) -> Tensor:
        """The table row of each pair of neighbours, from the table rows of its two tokens."""
        left_id_P = left_P % self.side_rows
        right_id_P = right_P % self.side_rows
        bucket_P = self._buckets(left_id_P, right_id_P)
        # Where the rows of their side begin: 0 for tokens of queries, `side_rows` for those of labels.
        side_start_P = left_P - left_id_P
        return side_start_P + self.vocab_size + bucket_P

    def _buckets(self, left_P: Tensor, right_P: Tensor) -> Tensor:
        """The bucket of each pair of tokens: a hash, the same as in training."""
        mixed_P = left_P * 2_654_435_761 + right_P * 2_246_822_519
        # The mask also removes the sign of an overflow. The shift drops the lowest bits, which the
        # products mix least.
        hash_P = (mixed_P & 0xFFFFFFFFFFFF) >> 12
        return hash_P % self.num_buckets

    def _position_factor(self, text_T: Tensor, lengths_B: Tensor) -> Tensor:
        """The factor of each token's weight, which is largest for the first token of a text."""
        start_B = lengths_B.cumsum(0) - lengths_B
        token_ids = torch.arange(len(text_T), device=text_T.device)
        place_T = token_ids - start_B[text_T]
        distance_T = place_T.to(self.weights["weight"].dtype)
        extra_T = torch.exp(-distance_T / DECAY_TOKENS)
        factor_T: Tensor = 1 + self.settings["position_decay"] * extra_T
        return factor_T

    @property
    def max_seq_length(self) -> int:
        """Tokens kept of a query."""
        return int(self.settings["max_len"])

    def get_embedding_dimension(self) -> int:
        """D."""
        return self.dim

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Writes the settings, the tokenizer and the state."""
        folder = Path(output_path)
        settings = json.dumps(self.settings)
        for name in SETTINGS_FILES:
            (folder / name).write_text(settings, encoding="utf-8")
        self.tokenizer.save(str(folder / TOKENIZER_FILE))
        state = {}
        for name in self.names:
            weight = self.weights[_parameter_name(name)]
            state[name] = weight.data
        save_file(state, folder / STATE_FILE)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **options: Any) -> StaticText:
        """Reads what `save` wrote, from a folder or from a model on the hub."""
        hub_options = {name: options[name] for name in HUB_OPTIONS if name in options}

        def path_of(name: str) -> Path:
            """The local file, or else a downloaded one."""
            local = Path(model_name_or_path, subfolder, name)
            if local.is_file():
                return local
            downloaded = cls.load_file_path(model_name_or_path, name, subfolder, **hub_options)
            return Path(downloaded)

        settings: dict[str, Any] = {}
        for name in SETTINGS_FILES:
            text = path_of(name).read_text(encoding="utf-8")
            settings |= json.loads(text)
        tokenizer = Tokenizer.from_file(str(path_of(TOKENIZER_FILE)))
        state = load_file(path_of(STATE_FILE))
        return cls(settings, tokenizer, state)


def _parameter_name(name: str) -> str:
    """The parameter's name for a tensor of the file. Names of parameters must not contain dots."""
    return name.replace(".", "_")
