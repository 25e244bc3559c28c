"""CONTRIBUTING's recipe for a new encoder: one class, one entry in ENCODERS; from training to search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import planted_corpus
from safetensors.torch import load_file, save_file
from shell import Shell
from torch import Tensor, nn

from xmcray.nn.encoder import ENCODERS, Encoder, EncoderConfig, EncoderKind, load_encoder
from xmcray.types import Ragged

SETTINGS_FILE = "projected.json"


class ProjectedEncoder(Encoder):
    """Token counts under a fixed random projection, then a trained linear layer."""

    def __init__(self, num_tokens: int, dim: int, seed: int) -> None:
        super().__init__()
        self.dim = dim
        self.settings = {"num_tokens": num_tokens, "dim": dim, "seed": seed}
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("table_VD", torch.randn(num_tokens, dim, generator=generator))
        self.layer = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.layer.weight)

    @property
    def num_tokens(self) -> int:
        return self.settings["num_tokens"]

    def forward(self, tokens: Ragged) -> Tensor:
        sum_BD = torch.zeros(len(tokens), self.dim)
        text_T = torch.from_numpy(np.asarray(tokens.row_ids, np.int64))
        token_T = torch.from_numpy(np.asarray(tokens.values, np.int64))
        sum_BD = sum_BD.index_add(0, text_T, self.table_VD[token_T])
        vector_BD: Tensor = self.layer(sum_BD)
        return vector_BD

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / "model.safetensors")
        (folder / SETTINGS_FILE).write_text(json.dumps(self.settings), encoding="utf-8")


def build(config: EncoderConfig, tokenizer: Any, token_counts: Any, seed: int) -> Encoder:
    return ProjectedEncoder(tokenizer.vocab_size, config.dim, seed)


def load(folder: Path) -> Encoder:
    settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    encoder = ProjectedEncoder(**settings)
    encoder.load_state_dict(load_file(folder / "model.safetensors"))
    return encoder.eval()


def test_a_new_encoder_trains_is_saved_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    kind = EncoderKind(settings_file=SETTINGS_FILE, build=build, load=load)
    monkeypatch.setitem(ENCODERS, "projected", kind)
    planted_corpus(tmp_path)
    run = tmp_path / "run"
    train = (
        f"train dexml --data {tmp_path}/corpus --workers 0 --set encoder.name=projected"
        " --set encoder.dim=16 --set optim.batch_size=32 --set optim.epochs=2"
        " --set cluster.threads_per_process=1"
    )
    shell.run(f"{train} --out {run}")
    encoder = load_encoder(run / "bundle" / "encoder")
    assert isinstance(encoder, ProjectedEncoder)
    assert not torch.equal(encoder.layer.weight, torch.eye(16))  # it was trained
    found = json.loads(shell.run(f"search {run} 'w0x0 w0x1' -k 1 --json"))
    assert found[0]["answers"][0]["uid"] == "label0"

    # The encoder of a run can start another one.
    shell.run(f"{train} --out {tmp_path}/two --set encoder.name={run}")
