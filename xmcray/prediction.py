"""`xmcray predict`: Ray Data spreads chunks of queries; finished chunks survive a kill.

One task reads the queries and streams chunks. A few tasks answer them, each in a process that loads
the bundle once, and the driver keeps the answers. At any time only a few chunks exist, whatever the
number of rows. When all are answered, the result is written in the order of the input and takes its
name at one moment.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from xmcray import config as configs
from xmcray.config import check_range
from xmcray.data.stream import (
    READ_CPUS,
    mapped,
    pipeline_session,
    progress_bar,
    results,
    share,
    stream_of,
    watched,
)
from xmcray.errors import ConfigError, StorageError
from xmcray.evaluation.predictions import write_predictions
from xmcray.ray_adapter.cluster import free_cpus
from xmcray.retrieval.batch_predict import (
    CHUNK_ANSWERS,
    CHUNK_ROWS,
    BadQueryError,
    PredictionWork,
    QueriesEnd,
    QueryChunk,
    answer_chunk,
    collect,
    find_queries,
    mixes_side_vectors,
    read_chunks,
)
from xmcray.retrieval.bundle import KIND as BUNDLE
from xmcray.retrieval.bundle import Settings, read_labels, read_settings
from xmcray.retrieval.calibration import check_min_probability, has_calibration
from xmcray.retrieval.fused import fixed_parts
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig, changed_memory
from xmcray.storage.artifact import new_artifact, open_artifact, refuse_existing
from xmcray.storage.manifest import hash_file
from xmcray.storage.remote import is_url

if TYPE_CHECKING:
    from xmcray.retrieval.reranker import Reranker

KIND = "predictions"
ANSWERS = 10  # by default, or all labels if there are fewer
WORKERS = 8  # processes by default, each with its own copy of encoder and label texts
# What a task yields while it loads a bundle or answers a chunk, and how often.
ALIVE = "alive"
SIGN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What the answers of a chunk depend on.

    Attributes:
        bundle: folder or URL.
        sha256: of the bundle.
        query_hashes: of the files of queries.
        k: answers per query.
        memory: how training queries vote; None without a memory.
        texts: whether the queries' texts are written.
        min_probability: of answers; None for all.
        reranker: a cross-encoder that reads the best answers again, and its SHA-256; None without.
        chunk_rows: queries of a chunk.
        vectors: whether the bundle uses side vectors of queries.
    """

    bundle: str
    sha256: str
    query_hashes: list[str]
    k: int
    memory: MemoryConfig | None
    texts: bool
    min_probability: float | None
    reranker: tuple[str, str] | None
    chunk_rows: int
    vectors: bool

    def to_json(self) -> dict[str, Any]:
        """What job.json and the result's manifest hold."""
        return {
            "bundle": self.sha256,
            "queries": self.query_hashes,
            "k": self.k,
            "memory": self.memory and configs.dump(self.memory),
            "texts": self.texts,
            "min_probability": self.min_probability,
            "reranker": None if self.reranker is None else list(self.reranker),
            "chunk_rows": self.chunk_rows,
        }


def predict(
    bundle: str | Path,
    queries: str | Path,
    out: str | Path,
    k: int | None = None,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    texts: bool = False,
    min_probability: float | None = None,
    rerank: str | None = None,
    workers: int | None = None,
    chunk_rows: int = CHUNK_ROWS,
    stall_s: float = 60.0,
    progress: bool = True,
) -> int:
    """Answers all queries. Killed and called again it goes on where it was.

    Args:
        bundle: folder or URL.
        queries: file or folder; see `find_queries`.
        out: folder or URL that does not exist yet, for predictions.npz (CSR, queries x source label
            ids) and predictions-00000.parquet ..., both in the order of the input.
        k: answers per query.
        settings: such as {"memory": {"weight": 0.3}}, in place of those of the bundle's memory.
        texts: also write the queries' texts.
        min_probability: leave out answers that are less probable.
        rerank: a cross-encoder that reads the best answers again: folder or hub id.
        workers: processes that answer; as many as there are free CPUs, at most 8, if not given.
        chunk_rows: queries of a chunk: what a kill of all processes loses at most per worker.
        stall_s: seconds without a sign of life after which to give up.
        progress: show rows and rows/s on stderr if that is a terminal.
    Returns:
        The number of queries.
    Raises:
        DataError: no queries, or a malformed row.
        ConfigError: k is not in 1 .. L, or there is no memory, or there are no probabilities.
        RunError: there is unfinished work of another bundle, input or setting.
        StorageError: `out` exists, the bundle is damaged, or the disk is full.
        ResourceError: no node had a CPU for the pipeline.
    """
    refuse_existing(out)
    if workers is not None:
        check_range("workers", workers, 1)
    files = find_queries(queries)
    reranker = None if rerank is None else _named_reranker(rerank)
    job, num_labels = _job(bundle, files, k, settings, texts, min_probability, reranker, chunk_rows)
    about: dict[str, Any] = {**job.to_json(), "command": "predict", "num_labels": num_labels}
    with PredictionWork.opened(out, job.to_json()) as work:
        try:
            end = _answer_all(work, files, job, workers, stall_s, progress)
        except BadQueryError:
            work.remove()  # a repaired row makes another input
            raise
        about["rows"] = end.rows
        with new_artifact(out, KIND, about) as target:
            chunks = [work.path(number) for number in range(end.chunks)]
            answers = collect(chunks, target, job.k)
            write_predictions(target / "predictions.npz", answers, num_labels)
        work.remove()
    return end.rows


def _named_reranker(path: str) -> tuple[str, str]:
    """A cross-encoder's folder or hub id as workers find it, and its SHA-256."""
    from xmcray.retrieval.reranker import Reranker  # its library takes seconds to import

    # Workers may have another working directory.
    everywhere = str(Path(path).absolute()) if Path(path).exists() else path
    return everywhere, _reranker_sha256(Reranker.load(everywhere), everywhere)


def _reranker_sha256(reranker: Reranker, path: str) -> str:
    """Names the content of a cross-encoder; "" for one of a hub that xmcray did not write."""
    folder = Path(path)
    if reranker.sha256 or not folder.is_dir():
        return reranker.sha256
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(folder)} {hash_file(file).sha256}\n".encode())
    return digest.hexdigest()


def _job(
    bundle: str | Path,
    files: Sequence[Path],
    k: int | None,
    settings: Mapping[str, Any],
    texts: bool,
    min_probability: float | None,
    reranker: tuple[str, str] | None,
    chunk_rows: int,
) -> tuple[_Job, int]:
    """The job, and the number of source label ids of the bundle."""
    folder, manifest = open_artifact(bundle, BUNDLE)
    stored = read_settings(folder)
    _, _, removed = read_labels(folder, stored)
    num_labels = stored.num_labels - len(removed)
    if k is None:
        k = min(ANSWERS, num_labels)
    if not 1 <= k <= num_labels:
        raise ConfigError(f"k is {k}, expected 1 .. {num_labels} (the number of labels)")
    memory = _memory(stored, settings)
    if min_probability is not None:
        own_settings = memory is None or memory == _memory(stored, {})
        check_min_probability(min_probability, own_settings and has_calibration(folder))
    job = _Job(
        bundle=str(bundle) if is_url(bundle) else str(Path(bundle).absolute()),
        sha256=manifest.sha256,
        query_hashes=[hash_file(file).sha256 for file in files],
        k=k,
        memory=memory,
        texts=texts,
        min_probability=min_probability,
        reranker=reranker,
        chunk_rows=max(1, min(chunk_rows, CHUNK_ANSWERS // k)),
        vectors=mixes_side_vectors(manifest.files),
    )
    return job, stored.num_labels


def _memory(bundle: Settings, settings: Mapping[str, Any]) -> MemoryConfig | None:
    """How training queries vote: the bundle's own settings with changes; None without a memory."""
    if bundle.is_fused:
        if settings:
            raise fixed_parts()
        return None
    if bundle.has_memory:
        own = configs.build(MemoryConfig, bundle.predictor["config"], "memory.")
        return changed_memory(own, settings)
    if settings:
        raise ConfigError(
            "this bundle has no memory of training queries; make one with `xmcray memory`"
        )
    return None


def _answer_all(
    work: PredictionWork,
    files: Sequence[Path],
    job: _Job,
    workers: int | None,
    stall_s: float,
    progress: bool,
) -> QueriesEnd:
    """Adds the answers of all chunks that are not done yet."""
    done = frozenset(work.done)
    end = QueriesEnd(chunks=0, rows=0)
    with pipeline_session(), progress_bar(progress) as bar, watched(stall_s) as beat:
        free = max(1, int(free_cpus()))
        tasks, cpus = share(workers or min(free, WORKERS))
        threads = max(1, free // tasks)

        def read(_: int) -> Iterator[QueryChunk | QueriesEnd]:
            return read_chunks(files, job.chunk_rows, done, vectors=job.vectors)

        def answer(item: QueryChunk | QueriesEnd) -> Iterator[Any]:
            if isinstance(item, QueriesEnd):
                yield item
            else:
                yield from _with_signs_of_life(functools.partial(_answers, item, job, threads))

        task = bar.add_task("queries", total=None)
        chunks = mapped(stream_of([0]), read, READ_CPUS)
        for item in results(mapped(chunks, answer, cpus, concurrency=tasks), beat):
            if isinstance(item, QueriesEnd):
                end = item
            elif item != ALIVE:
                number, answers = item
                work.add(number, answers)
                bar.advance(task, len(answers))
    assert end.rows, "the reader ended without a QueriesEnd"
    assert work.done >= set(range(end.chunks)), "a chunk was lost"
    return end


def _answers(chunk: QueryChunk, job: _Job, threads: int) -> tuple[int, pa.Table]:
    """In a task: number and answers of a chunk."""
    retriever = _retriever(job.bundle, job.sha256, job.reranker, threads)
    answers = answer_chunk(
        retriever, chunk, job.k, job.memory, job.texts, min_probability=job.min_probability
    )
    return chunk.number, answers


@functools.lru_cache(maxsize=1)
def _retriever(
    bundle: str, sha256: str, reranker: tuple[str, str] | None, threads: int
) -> Retriever:
    """In a task: the bundle, loaded once per process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks are the parallelism
    retriever = Retriever.load(bundle, threads=threads)
    if retriever.sha256 != sha256:
        raise StorageError(
            f"{bundle} was changed meanwhile; leave it alone, or predict with a copy"
        )
    if reranker is None:
        return retriever
    name, reranker_sha256 = reranker
    reranked = retriever.reranked_by(name)
    assert reranked.reranker is not None
    if _reranker_sha256(reranked.reranker, name) != reranker_sha256:
        raise StorageError(f"{name} was changed meanwhile; leave it alone, or predict with a copy")
    return reranked


def _with_signs_of_life(work: Callable[[], Any]) -> Iterator[Any]:
    """Yields what `work` returns, and a sign every few seconds before.

    The sign tells slow work from a pipeline without a CPU.
    """
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(work)
        yield ALIVE
        while not wait([result], SIGN_S).done:
            yield ALIVE
        yield result.result()
