"""A damaged folder of a transformer leads to one line, never to a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import as_sentence_transformer, write_bert
from safetensors.torch import save_file

from xmcray.data.tokens import from_transformer
from xmcray.errors import BundleError, ConfigError
from xmcray.nn.encoder import EncoderConfig, build_encoder, load_encoder
from xmcray.nn.module_files import save_settings

WORDS = ["sort", "an", "array", "of", "numbers"]
MODULES = "modules.json"
SENTENCE_SETTINGS = "config_sentence_transformers.json"

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers folder with a dense layer."""
    published = write_bert(tmp_path_factory.mktemp("bert"), WORDS)
    as_sentence_transformer(published, "mean_tokens", {"query": "sort "})
    tokenizer = from_transformer(str(published), max_len=16)
    config = EncoderConfig(name=str(published), dim=8)
    saved = tmp_path_factory.mktemp("saved")
    build_encoder(config, tokenizer, None, seed=0).save(saved)
    return saved


def text(name: str, body: str) -> Damage:
    return lambda folder: (folder / name).write_text(body)


def cut(name: str, num_bytes: int) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:num_bytes])

    return damage


def dense(weight: torch.Tensor) -> Damage:
    return lambda folder: save_file(
        {"linear.weight": weight}, folder / "2_Dense" / "model.safetensors"
    )


def setting(name: str, key: str, value: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        settings = json.loads(path.read_text())
        save_settings(path, {**settings, key: value})

    return damage


DAMAGES: dict[str, Damage] = {
    "cut weights": cut("model.safetensors", 200),
    "empty weights": cut("model.safetensors", 0),
    "cut dense layer": cut("2_Dense/model.safetensors", 20),
    "dense layer of another width": dense(torch.ones(8, 5)),
    "dense layer with one axis": dense(torch.ones(8)),
    "width that is text": setting("config.json", "hidden_size", "x"),
    "parts by name": text(MODULES, "{}"),
    "parts that are numbers": text(MODULES, "[1]"),
    "part without type": text(MODULES, '[{"path": ""}]'),
    "part with a number for a path": text(MODULES, '[{"path": 3, "type": "x.Pooling"}]'),
    "deep parts": text(MODULES, "[" * 100_000),
    "list of prompts": setting(SENTENCE_SETTINGS, "prompts", ["a"]),
    "prompt that is a number": setting(SENTENCE_SETTINGS, "prompts", {"query": 3}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_one_line(whole: Path, tmp_path: Path, damage: Damage) -> None:
    tokenizer = from_transformer(str(whole), max_len=16)
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    assert load_encoder(folder).dim == 8
    damage(folder)
    with pytest.raises(BundleError, match="cannot be loaded") as loaded:
        load_encoder(folder)
    with pytest.raises(ConfigError, match="cannot be loaded") as built:
        build_encoder(EncoderConfig(name=str(folder), dim=8), tokenizer, None, seed=0)
    for error in (loaded, built):
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompts", [["a"], {"query": 3}])
def test_prompts_that_are_no_texts_are_one_line(
    whole: Path, tmp_path: Path, prompts: object
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    setting(SENTENCE_SETTINGS, "prompts", prompts)(folder)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(prompts in .* no texts"):
        from_transformer(str(folder), max_len=16)
