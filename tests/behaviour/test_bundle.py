"""A bundle is what it was when it was written, or it is refused by the name of the file that changed."""

import shutil

import numpy as np
import pytest

from xmcray.data.tokens import train_wordpiece
from xmcray.errors import StorageError
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import NormalisedHead
from xmcray.retrieval.bundle import write_bundle
from xmcray.retrieval.index import IndexSpec
from xmcray.retrieval.retriever import Retriever

WORDS = "matrix vector norm solve inverse trace rank eigen sparse dense random sample mean median sort".split()  # noqa: SIM905
TEXTS = [f"{a} of a {b}" for a in WORDS for b in WORDS]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A dual encoder without training: a label's vector is its text's, so a label's text finds the label."""
    path = tmp_path_factory.mktemp("bundle") / "b"
    tokenizer = train_wordpiece(iter(TEXTS), vocab_size=400, max_len=16)
    encoder = build_encoder(EncoderConfig(dim=32), tokenizer, None, seed=0).eval()
    vectors = encoder(tokenizer.encode(TEXTS)).detach().numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    spec = IndexSpec(factory="IVF8,PQ16x4fs")
    uids = [f"u{number}" for number in range(len(TEXTS))]
    write_bundle(
        path,
        encoder,
        NormalisedHead(encoder.dim),
        tokenizer,
        uids,
        TEXTS,
        order,
        [vectors[order]],
        spec,
        {},
    )
    return path


def test_a_known_query_finds_its_label_after_saving_and_loading(bundle):
    answers = Retriever.load(bundle, threads=1).search(TEXTS, k=2)
    for number, (best, _) in enumerate(answers):
        same = sorted(TEXTS[number].split()) == sorted(
            best.text.split()
        )  # a bag does not know the order of words
        assert same, (TEXTS[number], best)
        assert best.score == pytest.approx(1, abs=1e-5)


def test_the_same_parts_make_the_same_bundle(bundle, tmp_path):
    answers = Retriever.load(bundle).search(TEXTS[:50], k=5)
    shutil.copytree(bundle, tmp_path / "copy")
    assert Retriever.load(tmp_path / "copy").search(TEXTS[:50], k=5) == answers


def test_one_changed_byte_is_refused_by_name(bundle, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    files = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file())
    assert {
        "index/00000.faiss",
        "vectors/00000.safetensors",
        "labels.parquet",
        "manifest.json",
    } <= set(files)
    rng = np.random.default_rng(0)
    for name in files:
        original = (copy / name).read_bytes()
        for place in rng.integers(len(original), size=3):
            changed = bytearray(original)
            changed[place] ^= 1 << rng.integers(8)
            (copy / name).write_bytes(changed)
            with pytest.raises(StorageError, match=name) as error:
                Retriever.load(copy)
            assert "\n" not in str(error.value)
        (copy / name).write_bytes(original)
    Retriever.load(copy)


def test_a_malformed_index_never_reaches_faiss(bundle, tmp_path, monkeypatch):
    """200 alterations of the index file: each is refused by its hash, before FAISS reads a byte of it."""
    import faiss

    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    monkeypatch.setattr(
        faiss, "read_index", lambda path: pytest.fail(f"{path} was read although it was altered")
    )
    original, rng = (copy / "index/00000.faiss").read_bytes(), np.random.default_rng(1)
    for trial in range(200):
        changed = bytearray(original)
        if trial % 3 == 0:
            changed = changed[: rng.integers(len(changed))]
        else:
            place = rng.integers(len(changed) if trial % 3 == 1 else 100)
            changed[place : place + 4] = bytes(255 - byte for byte in changed[place : place + 4])
        (copy / "index/00000.faiss").write_bytes(changed)
        with pytest.raises(StorageError, match=r"index/00000\.faiss"):
            Retriever.load(copy)


def test_a_missing_file_is_named(bundle, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    (copy / "label_order.npy").unlink()
    with pytest.raises(StorageError, match=r"label_order\.npy is missing"):
        Retriever.load(copy)
