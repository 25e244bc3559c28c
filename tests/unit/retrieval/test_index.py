import subprocess
import sys
import textwrap
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

import xmcray.retrieval.index as index_module
from xmcray.errors import BundleError, ConfigError, ResourceError
from xmcray.retrieval import ann, ann_create, index_spec, inverted_lists
from xmcray.retrieval.exact import exact_search
from xmcray.retrieval.index import Index
from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import IndexSpec, resolve_factory
from xmcray.types import Ragged

FACTORIES = [
    "Flat",
    "IVF16,Flat",
    "IVF16,SQfp16",
    "IVF16,PQ8x4fs",
    "RR16,IVF16,Flat",
    "HNSW16",
    "SQ8",
]


@pytest.fixture(scope="module")
def clustered():
    """Rows of a classifier in miniature: clusters, lengths that differ, queries near rows."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((40, 16), dtype=np.float32)
    rows = centres[rng.integers(40, size=3000)] + 0.5 * rng.standard_normal(
        (3000, 16), dtype=np.float32
    )
    queries = rows[rng.integers(3000, size=200)] + 0.2 * rng.standard_normal(
        (200, 16), dtype=np.float32
    )
    return rows * rng.lognormal(0, 0.3, (3000, 1)).astype(np.float32), queries


def recall(found, wanted):
    return np.mean([len(np.intersect1d(a, b)) / len(b) for a, b in zip(found, wanted, strict=True)])


def assert_same(one, other):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_array_equal(one.scores, other.scores)


@pytest.fixture(params=[1, 10**9], ids=["many queries", "few queries"])
def both_ways(request, monkeypatch):
    """Lists are scanned with matrix products, or FAISS is asked."""
    monkeypatch.setattr(index_module, "BATCH_QUERIES", request.param)
    monkeypatch.setattr(index_module, "MANY_QUERIES", request.param)
    monkeypatch.setattr(index_module, "FEW_LISTS", 1)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("factory", FACTORIES)
def test_recall_scores_and_order(clustered, factory):
    rows, queries = clustered
    found = build_index(rows, IndexSpec(factory=factory, seed=1)).search(queries, 50)
    wanted = exact_search(rows, queries, 50)
    assert recall(found.ids, wanted.ids) >= (1 if factory == "Flat" else 0.9)
    products = np.take_along_axis(queries @ rows.T, found.ids, 1)
    np.testing.assert_allclose(found.scores, products, rtol=1e-5, atol=1e-5)
    assert (np.diff(found.scores, axis=1) <= 0).all()
    assert (found.scores <= wanted.scores + 1e-5).all()


@pytest.mark.parametrize("factory", ["IVF16,PQ8x4fs", "HNSW16"])
def test_same_arguments_same_index(clustered, factory, tmp_path):
    rows, queries = clustered
    one, two = (
        build_index(rows, IndexSpec(factory=factory, seed=3), threads=threads) for threads in (1, 2)
    )
    assert_same(one.search(queries, 9), two.search(queries, 9))
    assert (one.nprobe, one.candidates) == (two.nprobe, two.candidates)
    one.save(tmp_path / "one")
    two.save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("factory", FACTORIES[1:])
def test_saved_index_answers_alike(clustered, factory, tmp_path):
    rows, queries = clustered
    index = build_index(rows, IndexSpec(factory=factory, seed=1))
    index.save(tmp_path / "i.faiss")
    loaded = Index.load(tmp_path / "i.faiss", torch.from_numpy(rows), index.candidates)
    assert_same(index.search(queries, 7), loaded.search(queries, 7))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("factory", FACTORIES)
def test_hidden_rows_are_masked_before_the_top_k(clustered, factory):
    rows, queries = clustered
    index = build_index(rows, IndexSpec(factory=factory, seed=1))
    first = index.search(queries, 20).ids
    hidden = Ragged.from_rows(list(first[:, :5]))
    second = index.search(queries, 15, hidden=hidden).ids
    assert (second >= 0).all()
    assert recall(second, first[:, 5:]) >= (1 if factory == "Flat" else 0.97), (
        "the places of hidden rows are refilled"
    )
    assert not any(np.isin(a, b).any() for a, b in zip(second, first[:, :5], strict=True))


def test_more_answers_than_the_visited_lists_hold_are_found_exhaustively(clustered):
    rows, queries = clustered
    index = build_index(rows, IndexSpec(factory="IVF256,Flat", nprobe=1, candidates=1))
    assert (index.search(queries, 60).ids >= 0).all()


@pytest.mark.parametrize("with_hidden_rows", [False, True])
@pytest.mark.parametrize("nprobe", [1, 2, 5, 9, 16])
def test_both_ways_visit_the_same_rows(clustered, monkeypatch, nprobe, with_hidden_rows):
    rows, queries = clustered
    index = build_index(rows, IndexSpec(factory="IVF64,Flat", nprobe=nprobe))
    names = np.random.default_rng(0).permutation(len(rows))
    hidden = None
    if with_hidden_rows:
        hidden = Ragged.from_rows([np.arange(row, row + 300) for row in range(len(queries))])
    few = index.search(queries, 20, names, hidden)
    monkeypatch.setattr(index_module, "BATCH_QUERIES", 1)
    limits = inverted_lists.Limits(queries=70, visits=500, scores=5000, hits=2000, keys=900)
    monkeypatch.setattr(inverted_lists, "CPU", limits)
    many = index.search(queries, 20, names, hidden)
    np.testing.assert_array_equal(few.ids, many.ids)
    np.testing.assert_allclose(few.scores, many.scores, rtol=1e-6)


def test_an_index_of_two_lists_is_tuned():
    rows = np.random.default_rng(0).standard_normal((200, 8), dtype=np.float32)
    index = build_index(rows, IndexSpec(factory="IVF2,Flat"))
    assert recall(index.search(rows, 5).ids, exact_search(rows, rows, 5).ids) >= 0.95


@pytest.mark.parametrize(
    ("factory", "most_lists"),
    [("IVF9,PQ32x4fs", 9), ("OPQ64,IVF16,PQ32x4fs", 16), ("IVF16,Flat", 8)],
)
def test_short_codes_of_more_than_half_of_the_lists_are_scanned(factory, most_lists):
    """The nearest of random rows lie in all lists; codes are still scanned faster than rows."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4000, 64), dtype=np.float32)
    queries = rng.standard_normal((300, 64), dtype=np.float32)

    index = build_index(rows, IndexSpec(factory=factory, recall=0.99), queries=queries[:200])

    found = recall(index.search(queries[200:], 50).ids, exact_search(rows, queries[200:], 50).ids)
    is_enough = factory != "IVF16,Flat"
    assert index.nprobe <= most_lists
    assert (found >= 0.98) == is_enough
    assert (index.recall >= 0.98) == is_enough


def test_only_clearly_longer_rows_are_in_no_list(clustered):
    """Every query pays for them, and rows of about one length are found through the lists."""
    rows, queries = clustered
    level = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    level *= np.random.default_rng(0).uniform(0.8, 1.2, (len(rows), 1)).astype(np.float32)
    assert not len(build_index(level, IndexSpec(factory="IVF16,Flat")).long_ids)
    level[[7, 40, 2999]] *= 4
    index = build_index(level, IndexSpec(factory="IVF16,Flat"))
    assert index.long_ids.tolist() == [7, 40, 2999]
    wanted = exact_search(level, queries, 10).ids
    assert recall(index.search(queries, 10).ids, wanted) >= 0.95
    level[:1000] *= 4
    longest = np.argsort(-np.linalg.norm(level, axis=1), kind="stable")[:150]
    assert build_index(level, IndexSpec(factory="IVF16,Flat")).long_ids.tolist() == sorted(
        longest
    ), "5 % at most"


def test_names_decide_ties():
    rows = np.ones((4000, 4), np.float32)
    names = np.random.default_rng(0).permutation(4000)
    top = build_index(rows, IndexSpec(factory="Flat")).search(rows[:2], 3, names)
    assert top.ids.tolist() == [[0, 1, 2]] * 2


def test_selected_rows_keep_their_positions_when_they_move(clustered):
    rows, queries = clustered
    selection = Index(torch.from_numpy(rows), None).only(np.arange(2000, 3000))
    before = selection.search(queries[:1], 5)
    selection.move_to(torch.device("cpu"))
    assert_same(selection.search(queries[:1], 5), before)
    assert before.ids.min() >= 2000


def test_exact_ignores_the_index(clustered):
    rows, queries = clustered
    index = build_index(rows, IndexSpec(factory="IVF64,Flat", nprobe=1, candidates=1))
    wanted = exact_search(rows, queries, 10).ids
    assert recall(index.search(queries, 10).ids, wanted) < 1
    np.testing.assert_array_equal(index.search(queries, 10, exact=True).ids, wanted)


def test_auto_by_size():
    assert resolve_factory("auto", 50_000, 256) == "Flat"
    assert resolve_factory("auto", 10**5, 256) == "IVF512,PQ128x4fs"
    assert resolve_factory("auto", 10**6, 64) == "IVF2048,PQ32x4fs"
    assert resolve_factory("auto", 10**6, 63) == "IVF2048,SQfp16", "a code is of two numbers"
    assert resolve_factory("IVF8,Flat", 10**8, 256) == "IVF8,Flat"


@pytest.mark.parametrize("dim", [1, 2, 3, 6, 62])
def test_auto_fits_vectors_of_any_width(dim, monkeypatch):
    monkeypatch.setattr(index_spec, "FLAT_ROWS", 1000)
    rows = np.random.default_rng(0).standard_normal((4000, dim), np.float32)
    queries = rows[:300] + 0.1
    found = build_index(rows, IndexSpec(), queries=queries).search(queries, 10)
    assert recall(found.ids, exact_search(rows, queries, 10).ids) > 0.9


@pytest.mark.parametrize("factory", ["IVF16,PQ8x4fs", "HNSW16"])
@pytest.mark.parametrize("hides", [False, True])
def test_a_query_has_the_same_answers_alone_and_among_others(clustered, factory, hides):
    rows, queries = clustered
    rows, queries = rows.copy(), queries[:40]
    rows[1::2] = rows[::2]  # equal scores
    ids = np.random.default_rng(1).permutation(len(rows))
    ids[::7] = -1
    hidden = [[query, 2 * query, len(rows) - 1] if hides else [] for query in range(len(queries))]
    index = build_index(rows, IndexSpec(factory=factory), threads=2)
    among_others = index.search(queries, 10, ids, Ragged.from_rows(hidden))
    for query in range(len(queries)):
        own_hidden = Ragged.from_rows([hidden[query]]) if hides else None
        alone = index.search(queries[query : query + 1], 10, ids, own_hidden)
        np.testing.assert_array_equal(alone.ids[0], among_others.ids[query])
        # Products of long rows and many queries are added up in another order.
        np.testing.assert_allclose(alone.scores[0], among_others.scores[query], rtol=1e-6)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("k", [1, 2])
def test_few_answers_of_short_codes(clustered, num_queries, k):
    rows, queries = clustered
    queries = queries[:num_queries]
    index = build_index(rows, IndexSpec(factory="IVF16,PQ8x4fs", nprobe=16, candidates=16))
    found = index.search(queries, k).ids
    np.testing.assert_array_equal(found, exact_search(rows, queries, k).ids)


def test_many_queries_of_few_lists_share_their_work(clustered, monkeypatch):
    """Short codes are not asked then: the lists are scanned with products of the rows."""
    rows, queries = clustered
    monkeypatch.setattr(index_module, "MANY_QUERIES", 100)
    index = build_index(rows, IndexSpec(factory="IVF64,PQ8x4fs", nprobe=4))
    asked = []
    monkeypatch.setattr(index, "search_candidates", lambda *given: asked.append(given))
    index.search(queries, 10)
    assert not asked
    for few_queries, nprobe in ((queries[:99], 4), (queries, 5)):
        index.set_nprobe(nprobe)
        with pytest.raises(TypeError):
            index.search(few_queries, 10)
    assert len(asked) == 2


def test_short_rows_are_found_in_a_graph(clustered):
    """Links by inner product lead to long rows only: this would take a breadth of 1024."""
    rows, queries = clustered
    lengths = np.random.default_rng(1).lognormal(0, 0.1, (len(rows), 1))
    level = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    level = (level * lengths).astype(np.float32)
    index = build_index(level, IndexSpec(factory="HNSW8", recall=0.98), queries=queries[:100])
    assert index.breadth == 50
    wanted = exact_search(level, queries[100:], 10)
    assert recall(index.search(queries[100:], 10).ids, wanted.ids) >= 0.98


def test_a_graph_holds_no_copy_of_the_vectors(clustered, tmp_path):
    rows, queries = clustered
    index = build_index(rows, IndexSpec(factory="HNSW8"))
    index.save(tmp_path / "i.faiss")
    links_bytes = 4 * (2 * 8 + 8) * len(rows)
    assert (tmp_path / "i.faiss").stat().st_size < links_bytes + rows.nbytes // 2
    vectors = torch.from_numpy(rows.copy())
    loaded = Index.load(tmp_path / "i.faiss", vectors)
    assert_same(index.search(queries, 5), loaded.search(queries, 5))
    assert str(tmp_path / "i.faiss") in Path("/proc/self/maps").read_text()
    vectors.zero_()
    assert not loaded.search(queries, 5).scores.any()


def test_a_graph_with_vectors_of_an_earlier_release_is_read(clustered, tmp_path):
    rows, queries = clustered
    graph = faiss.index_factory(16, "HNSW8", faiss.METRIC_INNER_PRODUCT)
    graph.add(rows)
    faiss.write_index(graph, str(tmp_path / "i.faiss"))
    np.save(tmp_path / "i.long.npy", np.empty(0, np.int64))
    loaded = Index.load(tmp_path / "i.faiss", torch.from_numpy(rows))
    wanted = exact_search(rows, queries, 5)
    assert recall(loaded.search(queries, 5).ids, wanted.ids) > 0.9


def test_breadth_is_chosen_by_recall(clustered):
    rows, queries = clustered

    def breadth(**settings):
        index = build_index(rows[:1000], IndexSpec(factory="HNSW8", **settings), queries=queries)
        return index.breadth

    assert breadth(recall=0.5) == 50
    assert breadth(recall=1.0) > 50
    assert breadth(ef_search=77) == 77


def test_empty_shard():
    index = build_index(np.empty((0, 8), np.float32), IndexSpec(factory="IVF16,Flat"))
    top = index.search(np.ones((2, 8), np.float32), 3)
    assert (top.ids == -1).all()
    assert np.isneginf(top.scores).all()


@pytest.mark.parametrize("factory", ["IVF1,Flat", "IVF1,SQ8", "HNSW4", "HNSW4,SQ8", "SQ8"])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_fewer_rows_than_few_answers_are_indexed(clustered, factory, num_rows):
    rows = clustered[0][:num_rows]
    queries = clustered[1]
    index = build_index(rows, IndexSpec(factory=factory), queries=queries)
    expected = exact_search(rows, queries, num_rows)
    np.testing.assert_array_equal(index.search(queries, num_rows).ids, expected.ids)


@pytest.mark.parametrize("factory", ["IVF16,", "nonsense", "PQ7"])
def test_a_bad_factory_is_one_line(clustered, factory):
    with pytest.raises(ConfigError, match="index factory") as error:
        build_index(clustered[0], IndexSpec(factory=factory))
    assert "\n" not in str(error.value)


def test_missing_faiss_names_both_extras(clustered, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ResourceError, match=r"xmcray\[cpu\].*xmcray\[gpu\]"):
        build_index(clustered[0], IndexSpec(factory="IVF16,Flat"))
    assert build_index(clustered[0], IndexSpec(factory="Flat")).is_exact


class IndexOnGpu:
    """What FAISS's indexes on a GPU do with more candidates than they can select."""

    def __init__(self, faiss_index):
        self.faiss_index = faiss_index

    def search(self, queries, k):
        if k > ann.GPU_CANDIDATES:
            raise RuntimeError("GPU index only supports min/max-K selection up to 2048")
        return self.faiss_index.search(queries, k)


def test_more_candidates_than_a_gpu_selects_are_warned_of_once(clustered, monkeypatch, caplog):
    rows, queries = clustered
    monkeypatch.setattr(ann, "GPU_CANDIDATES", 100)
    monkeypatch.setattr(faiss, "GpuIndex", IndexOnGpu, raising=False)
    on_host = ann_create.create(rows, None, "IVF16,Flat", 0, 1)
    ann.set_search(on_host, 16, 0)
    index = Index(torch.from_numpy(rows), IndexOnGpu(on_host), candidates=2)
    for k in (60, 120):  # of 120 and 240 candidates
        found = index.search(queries, k)
        np.testing.assert_array_equal(found.ids, exact_search(rows, queries, k).ids)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "proposes at most 100 candidates of a query, a search needs 120" in caplog.text


def test_missing_gpu(clustered, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ResourceError, match="GPU 3"):
        build_index(clustered[0], IndexSpec(factory="auto"), gpu=3)


def test_a_file_of_other_vectors_or_none(clustered, tmp_path):
    rows = clustered[0]
    build_index(rows, IndexSpec(factory="IVF16,Flat")).save(tmp_path / "i")
    with pytest.raises(BundleError, match="expected 2849 of width 16"):
        Index.load(tmp_path / "i", torch.from_numpy(rows[1:]))
    (tmp_path / "i").unlink()
    with pytest.raises(BundleError, match="i is missing, expected by settings"):
        Index.load(tmp_path / "i", torch.from_numpy(rows))


@pytest.mark.parametrize("factory", ["IVF16,Flat", "IVF16,PQ8x4fs"])
@pytest.mark.parametrize("nprobe", [0, 17, 1 << 40])
def test_a_file_that_searches_no_list_or_too_many_is_refused(clustered, tmp_path, nprobe, factory):
    rows = clustered[0]
    build_index(rows, IndexSpec(factory=factory)).save(tmp_path / "i")
    faiss_index = faiss.read_index(str(tmp_path / "i"))
    faiss_index.nprobe = nprobe
    faiss.write_index(faiss_index, str(tmp_path / "i"))
    with pytest.raises(BundleError, match=f"searches {nprobe} lists, expected 1 to 16"):
        Index.load(tmp_path / "i", torch.from_numpy(rows))


def test_altered_files_never_crash_the_process(clustered, tmp_path):
    """In a process of its own, whose exit status says whether it crashed."""
    rows = clustered[0][:600]
    for name, factory in (("ivf", "IVF16,PQ8x4fs"), ("flat", "IVF16,Flat"), ("graph", "HNSW8")):
        build_index(rows, IndexSpec(factory=factory, nprobe=2, candidates=2)).save(
            tmp_path / f"{name}.faiss"
        )
    np.save(tmp_path / "rows.npy", rows)
    program = """
        import pathlib, shutil, sys, numpy as np, torch
        from xmcray.errors import BundleError
        from xmcray.retrieval.index import Index
        folder = pathlib.Path(sys.argv[1])
        rows, rng = torch.from_numpy(np.load(folder / "rows.npy")), np.random.default_rng(0)

        def is_read(name, data):
            shutil.copyfile(folder / f"{name}.long.npy", folder / "altered.long.npy")
            (folder / "altered.faiss").write_bytes(data)
            try:
                index = Index.load(folder / "altered.faiss", rows)
            except BundleError as error:
                assert "\\n" not in str(error)
                return False
            index.search(rows[:8].numpy(), 3)
            return True

        num_read = 0
        for name in ("ivf", "flat", "graph"):
            whole = (folder / f"{name}.faiss").read_bytes()
            # Cut at each byte of the header, and within each number at the end.
            for length in [*range(140), *range(len(whole) - 30, len(whole))]:
                assert not is_read(name, whole[:length]), f"{length} bytes of {name}"
            for trial in range(80):  # half of the changes in the header, where the sizes are
                data = bytearray(whole)
                place = rng.integers(min(len(data), 200) if trial % 2 else len(data))
                data[place : place + 8] = rng.bytes(8) if trial % 4 == 1 else b"\\xff" * 8
                num_read += is_read(name, data)
        print(num_read)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) < 240, "some changes are of vectors, others of sizes"


def test_many_candidates_are_searched_a_few_queries_at_a_time(clustered, monkeypatch):
    rows, queries = clustered
    index = build_index(rows, IndexSpec(factory="IVF16,PQ8x4fs"))
    hidden = Ragged.from_rows([[query] for query in range(len(queries))])
    at_once = index.search(queries, 10, hidden=hidden)
    monkeypatch.setattr(index_module, "CANDIDATES_AT_ONCE", 1000)
    assert_same(index.search(queries, 10, hidden=hidden), at_once)
