"""`xmcray predict`: chunks of queries spread over worker processes by Ray Data; what is finished survives a kill.

One task reads the queries and streams chunks, a few tasks answer them, each in a process that loads the bundle once,
and the driver keeps what they answer. At any time only a few chunks exist, whatever the number of rows. When all are
there the result is written in the order of the input and takes its name at one moment.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import ray.data

from xmcray import config as configs
from xmcray import storage
from xmcray.config import check_range
from xmcray.data.stream import READ_CPUS, mapped, progress_bar, results, share, watched
from xmcray.errors import ConfigError, DataError, StorageError
from xmcray.evaluation.predictions import write_predictions
from xmcray.ray_adapter.cluster import free_cpus
from xmcray.ray_adapter.session import ray_session
from xmcray.retrieval.bundle import KIND as BUNDLE
from xmcray.retrieval.bundle import Settings, read_labels, read_settings
from xmcray.retrieval.predict import (
    CHUNK_ANSWERS,
    CHUNK_ROWS,
    Chunk,
    End,
    Work,
    answer_chunk,
    collect,
    find_queries,
    read_chunks,
)
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig, changed_memory

KIND = "predictions"
ANSWERS = 10  # by default, or all labels if there are fewer
WORKERS = 8  # processes by default, each with its own copy of encoder and label texts
ALIVE, SIGN_S = (
    "alive",
    5.0,
)  # what a task says while it loads a bundle or answers a chunk, and how often


def predict(
    bundle: str | Path,
    queries: str | Path,
    out: str | Path,
    k: int | None = None,
    *,
    settings: Sequence[str] = (),
    texts: bool = False,
    workers: int | None = None,
    chunk_rows: int = CHUNK_ROWS,
    stall_s: float = 60.0,
    progress: bool = True,
) -> int:
    """Answers all queries; returns how many. Killed and called again it goes on where it was.

    Args:
        bundle: folder or URL.
        queries: file or folder; see `find_queries`.
        out: folder or URL that does not exist yet, for predictions.npz (CSR, queries x source label ids) and
            predictions-00000.parquet ..., both in the order of the input.
        k: answers per query.
        settings: such as memory.weight=0.3, over those of the bundle's memory.
        texts: also write the queries' texts.
        workers: processes that answer; as many as there are free CPUs, at most 8, if not given.
        chunk_rows: queries of a chunk: what is lost at most per worker when all is killed.
        stall_s: seconds without a sign of life after which to give up.
        progress: show rows and rows/s on stderr if that is a terminal.
    Raises:
        DataError: no queries, or a malformed row.
        ConfigError: k is not in 1 .. L, or there is no memory.
        RunError: there is unfinished work of another bundle, input or setting.
        StorageError: `out` exists, the bundle is damaged, or the disk is full.
        ResourceError: nobody had a CPU for the pipeline.
    """
    storage.refuse_existing(out)
    if workers is not None:
        check_range("workers", workers, 1)
    files = find_queries(queries)
    folder, manifest = storage.open_artifact(bundle, BUNDLE)
    stored = read_settings(folder)
    num_labels = stored.num_labels - len(read_labels(folder, stored)[2])
    k = min(ANSWERS, num_labels) if k is None else k
    if not 1 <= k <= num_labels:
        raise ConfigError(f"k is {k}, expected 1 .. {num_labels} (the number of labels)")
    votes = _memory(stored, settings)
    job: dict[str, Any] = {
        "bundle": manifest.sha256,
        "queries": [storage.hash_file(file).sha256 for file in files],
        "k": k,
        "memory": votes and configs.dump(votes),
        "texts": texts,
        "chunk_rows": max(1, min(chunk_rows, CHUNK_ANSWERS // k)),
    }
    where = str(bundle) if storage.is_url(bundle) else str(Path(bundle).absolute())
    about: dict[str, Any] = {**job, "command": "predict", "num_labels": stored.num_labels}
    with Work.opened(out, job) as work:
        try:
            end = _answer_all(work, files, where, job, votes, workers, stall_s, progress)
        except DataError:
            work.remove()  # whoever repairs a row has another input
            raise
        about["rows"] = end.rows
        with storage.new_artifact(out, KIND, about) as target:
            chunks = [work.path(number) for number in range(end.chunks)]
            write_predictions(
                target / "predictions.npz", collect(chunks, target, k), stored.num_labels
            )
        work.remove()
    return end.rows


def _memory(bundle: Settings, settings: Sequence[str]) -> MemoryConfig | None:
    """How training queries vote: the bundle's own settings with changes; None without a memory."""
    if bundle.has_memory:
        own = configs.build(MemoryConfig, bundle.predictor["config"], "memory.")
        return changed_memory(own, settings)
    if settings:
        raise ConfigError(
            "this bundle has no memory of training queries; make one with `xmcray memory`"
        )
    return None


def _answer_all(
    work: Work,
    files: Sequence[Path],
    bundle: str,
    job: dict[str, Any],
    memory: MemoryConfig | None,
    workers: int | None,
    stall_s: float,
    progress: bool,
) -> End:
    """Adds the answers of all chunks that are not done yet."""
    done, end = frozenset(work.done), End(0, 0)
    with ray_session(), progress_bar(progress) as bar, watched(stall_s) as beat:
        free = max(1, int(free_cpus()))
        tasks, cpus = share(workers or min(free, WORKERS))
        load = functools.partial(_retriever, bundle, job["bundle"], max(1, free // tasks))

        def read(_: int) -> Iterator[Chunk | End]:
            return read_chunks(files, job["chunk_rows"], done)

        def answer(chunk: Chunk | End) -> Iterator[Any]:
            if isinstance(chunk, End):
                yield chunk
            else:
                found = functools.partial(_answers, load, chunk, job["k"], memory, job["texts"])
                yield from _with_signs_of_life(found)

        task = bar.add_task("queries", total=None)
        stages = mapped(
            mapped(ray.data.from_items([0]), read, READ_CPUS), answer, cpus, concurrency=tasks
        )
        for item in results(stages, beat):
            if isinstance(item, End):
                end = item
            elif item != ALIVE:
                work.add(*item)
                bar.advance(task, len(item[1]))
    assert end.rows, "the reader ended without an End"
    assert work.done >= set(range(end.chunks)), "a chunk was lost"
    return end


def _answers(load: Callable[[], Retriever], chunk: Chunk, *how: Any) -> tuple[int, Any]:
    return chunk.number, answer_chunk(load(), chunk, *how)


@functools.lru_cache(maxsize=1)
def _retriever(bundle: str, sha256: str, threads: int) -> Retriever:
    """In a task: the bundle, loaded once per process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks are the parallelism
    retriever = Retriever.load(bundle, threads=threads)
    if retriever.sha256 != sha256:
        raise StorageError(
            f"{bundle} was changed meanwhile; leave it alone, or predict with a copy"
        )
    return retriever


def _with_signs_of_life(work: Callable[[], Any]) -> Iterator[Any]:
    """What `work` returns, and before it a sign every few seconds: slow work is not a pipeline without a CPU."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(work)
        yield ALIVE
        while not wait([result], SIGN_S).done:
            yield ALIVE
        yield result.result()
