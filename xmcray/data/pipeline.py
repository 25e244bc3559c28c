"""Raw files to a corpus, as a streaming Ray Data pipeline: read -> validate -> tokenise -> write.

One task reads a split and streams chunks of one shard each, any number of tasks tokenise and pack chunks, and the
driver writes the finished files: at any time only a few chunks exist, whatever the number of rows, and nobody but the
driver needs the destination. Two passes: labels and a sample for the vocabulary first, then everything.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from rich.progress import Progress

from xmcray.data.chunks import Chunk, Shard, pack_chunk, read_chunks, survey
from xmcray.data.corpus import KIND, Corpus
from xmcray.data.formats import Source
from xmcray.data.stream import READ_CPUS, boxed, mapped, progress_bar, results, share, watched
from xmcray.data.tokens import TextTokenizer, from_transformer, train_wordpiece
from xmcray.data.writer import (
    CorpusWriter,
    PrepareConfig,
    short_name,
    sorted_pairs,
    statistics_table,
)
from xmcray.ray_adapter.session import ray_session
from xmcray.storage import new_artifact
from xmcray.types import Int64Array

__all__ = ["PrepareConfig", "prepare", "statistics_table"]

SAMPLE_TEXTS = 200_000  # texts the vocabulary is trained on
NO_PAIRS: Int64Array = np.empty((0, 2), np.int64)


def prepare(
    source: Source,
    out: str | Path,
    *,
    name: str,
    licence: str = "unknown",
    parallelism: int | None = None,
    stall_s: float = 60.0,
    progress: bool = True,
    **settings: Any,
) -> Corpus:
    """Writes the corpus `out` from raw files; the bytes depend on `source`, `name`, `licence` and `settings` alone.

    Args:
        out: folder or URL that does not exist yet.
        parallelism: tokenising tasks at a time; a quarter more than there are free CPUs if not given.
        stall_s: seconds without a finished chunk after which to give up.
        progress: show rows and rows/s on stderr if that is a terminal.
        settings: fields of PrepareConfig.

    Raises:
        DataError: malformed rows under on_error="fail", an empty split, files that contradict each other.
        ResourceError: nobody had a CPU for the pipeline.
        StorageError: `out` exists, or the disk is full.
    """
    config = PrepareConfig(**settings)
    about = {
        "name": name,
        "source": source.path.name,
        "format": source.format,
        "licence": licence,
        **asdict(config),
    }
    about["tokenizer"] = short_name(config.tokenizer)
    with ray_session(), new_artifact(out, KIND, about) as folder, progress_bar(progress) as bar:
        run, writer = (
            _Pipeline(source, config, share(parallelism), stall_s, bar),
            CorpusWriter(folder),
        )
        tokenizer = run.tokenizer()
        for shard in run.shards(["labels"], tokenizer, {}, 0):
            writer.add(shard)
        filters = {split: sorted_pairs(source.filters(split)) for split in source.splits}
        for shard in run.shards(source.splits, tokenizer, filters, writer.num_rows["labels"]):
            writer.add(shard)
        writer.finish(source, config, name, licence, tokenizer)
    return Corpus.open(out, verify=False)


@dataclass(slots=True)
class _Pipeline:
    """The Ray side: runs readers and packers, and watches that they move.

    The share of the CPUs is taken once: just after a pass, Ray still counts some that are free again as taken.
    """

    source: Source
    config: PrepareConfig
    share: tuple[int, float]
    stall_s: float
    bar: Progress

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer asked for; for "wordpiece" a first pass samples texts."""
        config = self.config
        if config.tokenizer != "wordpiece":
            return from_transformer(config.tokenizer, config.max_len, config.label_max_len)
        task, sample = self.bar.add_task("sample", total=None), list[str]()
        read = functools.partial(
            survey,
            cap=SAMPLE_TEXTS,
            seed=config.seed,
            skip=config.on_error == "skip",
            block_rows=config.shard_rows,
        )
        with watched(self.stall_s) as beat:
            chunks = mapped(ray.data.from_blocks([boxed(self.source)]), read, READ_CPUS)
            for count, survey_so_far in results(chunks, beat):
                sample = survey_so_far  # the last result is a sample of all chunks
                self.bar.advance(task, count)
        self.bar.update(task, description="vocabulary")
        tokenizer = train_wordpiece(sample, config.vocab_size, config.max_len, config.label_max_len)
        self.bar.remove_task(task)
        return tokenizer

    def shards(
        self,
        splits: Sequence[str],
        tokenizer: TextTokenizer,
        filters: Mapping[str, Int64Array],
        num_labels: int,
    ) -> Iterator[Shard]:
        """Packed shards of the splits, in whatever order they are finished."""
        source, size, skip = self.source, self.config.shard_rows, self.config.on_error == "skip"
        shared = ray.put((tokenizer.to_files(), dict(filters)))

        def read(split: str) -> Iterator[Chunk]:
            return read_chunks(source, split, num_labels, size, skip)

        def pack(chunk: Chunk) -> Iterator[Shard]:
            packer, pairs = _packer(shared)
            yield pack_chunk(chunk, packer, pairs.get(chunk.split, NO_PAIRS), num_labels, size)

        task = self.bar.add_task(" + ".join(splits), total=None)
        tasks, cpus = self.share
        with watched(self.stall_s) as beat:
            start = ray.data.from_blocks(
                [boxed(split) for split in splits]
            )  # no task, which could wait for a CPU
            for shard in results(
                mapped(mapped(start, read, READ_CPUS), pack, cpus, concurrency=tasks), beat
            ):
                self.bar.advance(task, shard.num_rows)
                yield shard
        self.bar.update(task, total=1, completed=1)


@functools.lru_cache(maxsize=1)
def _packer(shared: Any) -> tuple[TextTokenizer, Mapping[str, Int64Array]]:
    """In a task: tokenizer and filters, unpacked once per process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks are the parallelism
    files, filters = ray.get(shared)
    return TextTokenizer.from_files(files), filters
