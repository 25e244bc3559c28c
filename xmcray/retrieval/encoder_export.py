"""The query encoder of a bundle as a folder that sentence-transformers opens, with equal vectors.

A transformer is written as such models are published. A static encoder has parts that
sentence-transformers does not have (pairs of tokens, weights by position), so its folder holds the
code of one module, which its readers have to trust (`trust_remote_code`).
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from xmcray.data.tokens import TextTokenizer
from xmcray.errors import ConfigError
from xmcray.nn.encoder import load_encoder
from xmcray.nn.heads import Head, NormalisedHead, load_head
from xmcray.nn.module_files import save_settings
from xmcray.nn.static import StaticEncoder
from xmcray.retrieval.bundle import KIND as BUNDLE
from xmcray.retrieval.bundle import read_settings
from xmcray.storage.artifact import new_artifact, open_artifact

logger = logging.getLogger(__name__)

KIND = "sentence-transformers"
# Code for sentence-transformers, which has to be installed where it is imported.
MODULE = Path(__file__).with_name("static_module.py")
MODULE_FILE = "xmcray_static.py"
NORMALIZE = "sentence_transformers.models.Normalize"


def export_encoder(bundle: str | Path, out: str | Path) -> bool:
    """Writes the encoder of a bundle for sentence-transformers; on failure nothing is left at `out`.

    Args:
        bundle: folder or URL.
        out: folder or URL that does not exist yet.

    Returns:
        Whether the folder holds code, which its reader has to trust.

    Raises:
        ConfigError: the method's head or a mixer of side vectors has no counterpart there.
        StorageError: the bundle is damaged, `out` exists, or the disk is full.
    """
    folder, manifest = open_artifact(bundle, BUNDLE)
    settings = read_settings(folder)
    encoder = load_encoder(folder / "encoder")
    if encoder.side_width:
        raise ConfigError(
            f"{bundle} mixes side vectors into its vectors, which sentence-transformers cannot do,"
            " expected an encoder of texts alone; train with encoder.side=ignore"
        )
    head = load_head(folder / "head")
    tokenizer = TextTokenizer.load(folder / "tokenizer")
    if type(head) not in (Head, NormalisedHead):
        raise ConfigError(
            f"{bundle} has a head of kind {head.kind!r}, expected one that at most normalises; export"
            " a bundle of another method, or one that is not cut"
        )
    normalised = settings.normalises or isinstance(head, NormalisedHead)
    about = {"command": "export", "to": KIND, "bundle": manifest.sha256, "dim": encoder.dim}
    with new_artifact(out, KIND, about) as made:
        if isinstance(encoder, StaticEncoder):
            _write_static(made, encoder, tokenizer, normalised)
            return True
        from xmcray.nn.transformer import TransformerEncoder  # its library takes seconds to import

        assert isinstance(encoder, TransformerEncoder)
        if tokenizer.label_max_len < tokenizer.max_len:
            # The folder has one length for both kinds of texts.
            logger.warning(
                "sentence-transformers cuts label texts at %d tokens, as it does queries; the bundle cuts"
                " them at %d, so vectors of longer label texts differ; set max_seq_length = %d while you"
                " encode label texts",
                tokenizer.max_len,
                tokenizer.label_max_len,
                tokenizer.label_max_len,
            )
        encoder.prompts = {"query": tokenizer.query_prompt, "document": tokenizer.label_prompt}
        encoder.normalize = encoder.normalize or normalised
        encoder.save(made)
    return False


def _write_static(
    folder: Path, encoder: StaticEncoder, tokenizer: TextTokenizer, normalised: bool
) -> None:
    encoder.save(folder)
    tokenizer.save(folder)
    shutil.copyfile(MODULE, folder / MODULE_FILE)
    types = [f"{Path(MODULE_FILE).stem}.StaticText"]
    if normalised:
        types.append(NORMALIZE)
    modules = []
    for number, module_type in enumerate(types):
        path = f"{number}_Normalize" if number else ""
        (folder / path).mkdir(exist_ok=True)
        modules.append({"idx": number, "name": str(number), "path": path, "type": module_type})
    save_settings(folder / "modules.json", modules)
    prompts = {"query": tokenizer.query_prompt, "document": tokenizer.label_prompt}
    if any(prompts.values()):
        # sentence-transformers puts them before the texts.
        save_settings(folder / "config_sentence_transformers.json", {"prompts": prompts})
