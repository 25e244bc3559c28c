"""A transformer that reads a query and a label's text together and gives one score.

Folders are those of transformers and of sentence-transformers' CrossEncoder. Only safetensors weights
are read, and no code of a model's repository is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from xmcray.errors import BundleError, one_line
from xmcray.nn import pretrained
from xmcray.types import Float32Array, spans

MAX_LEN = 128
BATCH = 64  # pairs that are scored at once

Pair = tuple[str, str]


class CrossEncoder:
    """Scores pairs of texts.

    Attributes:
        model: a transformer with one output.
        tokenizer: its tokenizer.
        max_len: tokens of a pair that are read.
    """

    def __init__(self, model: Any, tokenizer: Any, max_len: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_len = max_len

    @classmethod
    def load(cls, name: str, max_len: int = MAX_LEN, new_head: bool = False) -> CrossEncoder:
        """Opens a model.

        Args:
            name: folder or hub id.
            max_len: tokens of a pair that are read.
            new_head: give an encoder an output with random weights, to be trained.
        Raises:
            BundleError: no such model, damaged, or one with several outputs.
            ConfigError: neither a folder nor on the hub.
        """
        folder = pretrained.find(name, "cross-encoder", "cross-encoder/ms-marco-MiniLM-L6-v2")
        try:
            options = {"num_labels": 1} if new_head else {}
            with pretrained.quiet():
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    folder, trust_remote_code=False
                )
                model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
                    folder,
                    trust_remote_code=False,
                    use_safetensors=True,
                    dtype=torch.float32,
                    output_loading_info=True,
                    **options,
                )
        except Exception as error:  # transformers raises errors of many kinds
            raise BundleError(
                f"{name} cannot be read as a cross-encoder ({one_line(str(error))[:200]}); give a"
                " model for pairs of texts"
            ) from error
        pretrained.fill_constants(model)
        if model.config.num_labels != 1 or (info["missing_keys"] and not new_head):
            raise BundleError(
                f"{name} has {model.config.num_labels} outputs and {len(info['missing_keys'])} missing"
                " weights, expected a cross-encoder with one output; train one with"
                " `xmcray train-reranker`"
            )
        return cls(model.eval(), tokenizer, min(max_len, tokenizer.model_max_length))

    def forward(self, pairs: Sequence[Pair]) -> Tensor:
        """Scores, float32 [P], with gradients if the model trains."""
        queries = [query for query, _ in pairs]
        labels = [label for _, label in pairs]
        inputs = self.tokenizer(
            queries,
            labels,
            truncation="longest_first",
            max_length=self.max_len,
            padding=True,
            return_tensors="pt",
        )
        device = next(self.model.parameters()).device
        score_P: Tensor = self.model(**inputs.to(device)).logits[:, 0].float()
        return score_P

    def score(self, pairs: Sequence[Pair]) -> Float32Array:
        """Scores, float32 [P], in batches of about equal lengths."""
        scores = np.empty(len(pairs), np.float32)
        # Texts of one length need no padding.
        lengths = [len(query) + len(label) for query, label in pairs]
        order = np.argsort(lengths, kind="stable")
        with torch.inference_mode():
            for span in spans(len(pairs), BATCH):
                places = order[span]
                score_P = self.forward([pairs[place] for place in places])
                scores[places] = score_P.cpu().numpy()
        return scores

    def save(self, folder: Path) -> None:
        """Writes a folder that `load`, transformers and sentence-transformers open."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
