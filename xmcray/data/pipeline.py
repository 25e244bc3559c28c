"""Raw files to a corpus, as a streaming Ray Data pipeline: read -> validate -> tokenise -> write.

One task reads a split and streams chunks of one shard each. Any number of tasks tokenise and pack
chunks. The driver writes the finished files, so no other process needs the destination. At any time
only a few chunks exist, whatever the number of rows. There are two passes: a sample of the texts
for the vocabulary first, then everything.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.progress import Progress

from xmcray import config as configs
from xmcray.data.append import appended_files, settings_of
from xmcray.data.appended_labels import match_labels, removed_rows
from xmcray.data.chunks import (
    NO_PAIRS,
    PackedShard,
    RawChunk,
    pack_chunk,
    read_chunks,
    survey,
    test_keys,
)
from xmcray.data.continued_writer import continued_writer, files_to_write
from xmcray.data.corpus import KIND, REMOVED, Corpus
from xmcray.data.formats import RawFiles
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
from xmcray.data.text_keys import NO_KEYS, Keys
from xmcray.data.tokens import TextTokenizer, from_transformer, train_wordpiece
from xmcray.data.writer import (
    CorpusWriter,
    PrepareConfig,
    short_name,
    sorted_pairs,
)
from xmcray.ray_adapter.session import get_object, put_object
from xmcray.storage.artifact import link_files, new_artifact, refuse_existing
from xmcray.storage.manifest import FileEntry, Manifest
from xmcray.types import Int64Array

__all__ = ["PrepareConfig", "append", "prepare"]

SAMPLE_TEXTS = 200_000  # texts the vocabulary is trained on


def prepare(
    source: RawFiles,
    out: str | Path,
    *,
    name: str,
    licence: str = "unknown",
    parallelism: int | None = None,
    stall_s: float = 60.0,
    progress: bool = True,
    **settings: Any,
) -> Corpus:
    """Writes the corpus `out` from raw files.

    Its bytes depend on `source`, `name`, `licence` and `settings` alone.

    Args:
        out: folder or URL that does not exist yet.
        parallelism: tokenising tasks at a time; None takes a quarter more than there are free CPUs.
        stall_s: seconds without a finished chunk and without a free CPU after which to give up.
        progress: show rows and rows/s on stderr if that is a terminal.
        settings: fields of PrepareConfig.

    Raises:
        DataError: malformed rows under on_error="fail", an empty split, files that contradict each
            other.
        ResourceError: no CPU became free for the pipeline.
        StorageError: `out` exists, or the disk is full.
    """
    config = configs.build(PrepareConfig, settings)
    about = {
        "name": name,
        "source": source.name,
        "format": source.format,
        "licence": licence,
        **asdict(config),
    }
    about["tokenizer"] = short_name(config.tokenizer)
    if source.titles_only is not None:
        # For rows that are appended. The name of the raw files in the card does not always tell.
        about["titles_only"] = source.titles_only
    # Before Ray starts, because these files may be malformed.
    source.side_width()
    source.warn_of_integer_labels()
    removed_ids = removed_rows(source)
    tokenizer = None
    if config.tokenizer != "wordpiece":
        # Before Ray starts, because the name may be wrong.
        tokenizer = from_transformer(
            config.tokenizer,
            config.max_len,
            config.label_max_len,
            config.query_prompt,
            config.label_prompt,
        )
    with (
        pipeline_session(),
        new_artifact(out, KIND, about) as folder,
        progress_bar(progress) as bar,
    ):
        pipeline = _Pipeline(source, config, share(parallelism), stall_s, bar)
        writer = CorpusWriter(folder, source, config, name, licence)
        if len(removed_ids):
            np.save(folder / REMOVED, removed_ids)
        if tokenizer is None:
            tokenizer = pipeline.trained_tokenizer()
        pipeline.write_rows(writer, tokenizer)
    return Corpus.open(out, verify=False)


def append(
    corpus: Corpus,
    manifest: Manifest,
    new: RawFiles,
    out: str | Path,
    *,
    on_error: Literal["fail", "skip"] = "fail",
    parallelism: int | None = None,
    stall_s: float = 60.0,
    progress: bool = True,
) -> Corpus:
    """Writes the corpus `out`: the rows of a corpus, and after them those of new raw files.

    Its contents are those of a preparation of all raw files with the tokenizer of the corpus. Files
    that do not change are linked.

    Args:
        corpus: local and verified; stays as it is.
        manifest: of the corpus.
        new: the new raw files. Their labels are matched with those of the corpus by uid.
        out: folder or URL that does not exist yet.
        on_error: what to do with malformed rows; see `PrepareConfig`.
        parallelism: as for `prepare`.
        stall_s: as for `prepare`.
        progress: as for `prepare`.

    Raises:
        DataError: as for `prepare`, or a label of the corpus has another text in the new files.
        ResourceError: as for `prepare`.
        StorageError: as for `prepare`.
    """
    refuse_existing(out)
    new.warn_of_integer_labels()
    config = settings_of(corpus.card, on_error)
    tokenizer = corpus.tokenizer()
    label_ids = match_labels(corpus, new, on_error == "skip")
    source = appended_files(corpus, new, label_ids, manifest.about.get("titles_only"))
    about = {**manifest.about, "appended": new.name, "appended_to": manifest.sha256}
    # Rows that are appended stay, also if earlier ones were left out.
    about["on_leak"] = config.on_leak
    linked: dict[str, FileEntry] = {}
    with pipeline_session(), new_artifact(out, KIND, about, linked) as folder:
        changed = files_to_write(manifest.files, source, config)
        linked.update(link_files(corpus.path, manifest, folder, changed))
        writer = continued_writer(folder, corpus, source, config)
        with progress_bar(progress) as bar:
            pipeline = _Pipeline(source, config, share(parallelism), stall_s, bar)
            pipeline.write_rows(writer, tokenizer)
    return Corpus.open(out, verify=False)


@dataclass(slots=True)
class _Pipeline:
    """The Ray side: runs readers and packers, and raises an error if they make no progress.

    Attributes:
        source: raw files.
        config: settings of the corpus.
        share: packing tasks at a time, and the CPUs of each. It is computed once, because just
            after a pass Ray still counts some CPUs as taken that are free again.
        stall_s: seconds without a finished chunk and without a free CPU after which to give up.
        bar: progress on stderr.
    """

    source: RawFiles
    config: PrepareConfig
    share: tuple[int, float]
    stall_s: float
    bar: Progress

    def trained_tokenizer(self) -> TextTokenizer:
        """A tokenizer trained on a sample of the texts, which a first pass draws."""
        config = self.config
        task = self.bar.add_task("sample", total=None)
        sample: list[str] = []
        read = functools.partial(
            survey,
            cap=SAMPLE_TEXTS,
            seed=config.seed,
            skip=config.on_error == "skip",
            block_rows=config.shard_rows,
        )
        with watched(self.stall_s) as beat:
            chunks = mapped(stream_of([self.source]), read, READ_CPUS)
            for num_rows, texts in results(chunks, beat):
                sample = texts  # only the last result has texts: the sample
                self.bar.advance(task, num_rows)
        self.bar.update(task, description="vocabulary")
        tokenizer = train_wordpiece(sample, config.vocab_size, config.max_len, config.label_max_len)
        self.bar.remove_task(task)
        return tokenizer

    def write_rows(self, writer: CorpusWriter, tokenizer: TextTokenizer) -> None:
        """Reads, tokenises and writes all rows of the source, and finishes the corpus."""
        source = self.source
        for shard in self.shards(["labels"], tokenizer, {}, 0, NO_KEYS):
            writer.add(shard)
        # Queries come after the labels: their label ids are checked against the number of labels.
        num_labels = writer.num_rows["labels"]
        filters = {split: sorted_pairs(source.filters(split)) for split in source.splits}
        leaks = self.test_keys(num_labels) if self.config.on_leak == "drop" else NO_KEYS
        for shard in self.shards(source.splits, tokenizer, filters, num_labels, leaks):
            writer.add(shard)
        writer.finish(tokenizer)

    def test_keys(self, num_labels: int) -> Keys:
        """Keys of the texts of all test queries, which a pass over them finds.

        Args:
            num_labels: rows of the label file.
        """
        if "test" not in self.source.splits:
            return NO_KEYS
        read = functools.partial(
            test_keys,
            num_labels=num_labels,
            skip=self.config.on_error == "skip",
            block_rows=self.config.shard_rows,
        )
        with watched(self.stall_s) as beat:
            blocks = mapped(stream_of([self.source]), read, READ_CPUS)
            return np.unique(np.concatenate(list(results(blocks, beat))))

    def shards(
        self,
        splits: Sequence[str],
        tokenizer: TextTokenizer,
        filters: Mapping[str, Int64Array],
        num_labels: int,
        leaks: Keys,
    ) -> Iterator[PackedShard]:
        """Packed shards of the splits, in the order in which they are finished.

        Args:
            filters: by split, int64 [pairs, 2]: row of the raw file, source label id; sorted.
            num_labels: rows of the label file.
            leaks: keys of texts whose training queries are left out.
        """
        # The functions below travel to the tasks, so they hold plain values instead of `self`.
        source = self.source
        shard_rows = self.config.shard_rows
        skip = self.config.on_error == "skip"
        shared = put_object((tokenizer.to_files(), dict(filters)))
        shared_leaks = put_object(leaks)

        def read(split: str) -> Iterator[RawChunk]:
            left_out = get_object(shared_leaks) if split == "train" else NO_KEYS
            return read_chunks(source, split, num_labels, shard_rows, skip, left_out)

        def pack(chunk: RawChunk) -> Iterator[PackedShard]:
            task_tokenizer, task_filters = _unpacked(shared)
            pairs = task_filters.get(chunk.split, NO_PAIRS)
            yield pack_chunk(chunk, task_tokenizer, pairs, num_labels, shard_rows)

        task = self.bar.add_task(" + ".join(splits), total=None)
        num_tasks, cpus = self.share
        with watched(self.stall_s, cpus) as beat:
            chunks = mapped(stream_of(splits), read, READ_CPUS)
            shards = mapped(chunks, pack, cpus, concurrency=num_tasks)
            for shard in results(shards, beat):
                self.bar.advance(task, shard.num_rows)
                yield shard
        self.bar.update(task, total=1, completed=1)


@functools.lru_cache(maxsize=1)
def _unpacked(shared: Any) -> tuple[TextTokenizer, Mapping[str, Int64Array]]:
    """Tokenizer and filters of a task, built once per process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks are the parallelism
    files, filters = get_object(shared)
    return TextTokenizer.from_files(files), filters
