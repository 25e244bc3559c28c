"""Trains a static encoder to answer like the transformer of a bundle.

The student sees the queries and label texts that the teacher was trained on. Its table of tokens
starts from the vectors that the teacher gives each token. Then it learns three things together: the
teacher's vector of a text, the teacher's probabilities of labels (Hinton et al., "Distilling the
knowledge in a neural network", 2015), and the positives. Label vectors, index and memory stay the
teacher's, so the result is the same bundle with another encoder.

Letters of axes in this file: N sampled texts (queries and label texts), K best labels that the teacher
finds for a text, C labels of a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xmcray import config as configs
from xmcray import draws
from xmcray.config import check_ranges
from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.tokens import TextTokenizer
from xmcray.errors import ConfigError
from xmcray.evaluation.metrics import precisions, relevant
from xmcray.nn.distilled import token_vectors
from xmcray.nn.encoder import Encoder, EncoderConfig, build_encoder, fit_width
from xmcray.nn.static import StaticEncoder
from xmcray.nn.transformer import TransformerEncoder
from xmcray.permutations import random_sample
from xmcray.retrieval.bundle import KIND, new_bundle
from xmcray.retrieval.query_encoder import CHUNK
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import SearchScope
from xmcray.storage.artifact import link_files, open_artifact, refuse_existing
from xmcray.storage.manifest import FileEntry, Manifest
from xmcray.training.held_out import held_out_by, some_rows, without_voters
from xmcray.training.optim import EncoderOptimizer, OptimConfig, lr_factor
from xmcray.training.outcome import check_fits
from xmcray.training.probability_curves import fit_calibration
from xmcray.types import Float32Array, Float64Array, Int64Array, Ragged, find_sorted, spans

# Share of the training queries that is held out if the teacher's run held none out.
OWN_HELD_OUT = 0.05
MOST_MEASURED = 2000  # held-out queries
TEMPERATURE_QUERIES = 256
# They fit scores whose differences are between thousandths and hundreds.
TEMPERATURES = tuple(float(value) for value in np.geomspace(0.001, 100, 101))
WARMUP = 0.05  # share of the steps
# Score of a label that must get probability 0. Finite, because 0 * -inf would be NaN in the cross-entropy.
NEVER = float(np.finfo(np.float32).min)
_REPLACED = ("encoder/", "calibration/")  # all other files are linked to the teacher's


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How a static encoder is distilled.

    Attributes:
        texts: training queries and label texts that are used at most.
        epochs: passes over them.
        batch_size: texts of a step.
        candidates: best labels of the teacher whose probabilities are learned. All texts of a step
            share theirs.
        random_labels: further labels of a step.
        positives: share of the positives in the probabilities; the rest are the teacher's.
        bigram_buckets: rows for pairs of neighbouring tokens, see `encoder.bigram_buckets`.
        position_decay: extra weight of first tokens, see `encoder.position_decay`.
        lr: highest learning rate.
        seed: of the sampling and of new weights.
    """

    texts: int = 500_000
    epochs: int = 40
    batch_size: int = 128
    candidates: int = 32
    random_labels: int = 256
    positives: float = 0.8
    bigram_buckets: int = 50_000
    position_decay: float = 1.0
    lr: float = 0.003
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "",
            texts=1,
            epochs=1,
            batch_size=1,
            candidates=1,
            random_labels=0,
            positives=(0, 1),
            bigram_buckets=0,
            position_decay=0,
            lr=0,
            seed=0,
        )

    def num_texts(self, corpus: Corpus) -> int:
        """Texts of all epochs, at most."""
        num_all = corpus.card.num_train + corpus.card.num_labels
        return self.epochs * min(self.texts, num_all)


@dataclass(frozen=True, slots=True)
class DistilOutcome:
    """How both bundles answer held-out queries.

    Attributes:
        teacher: P@1 and P@5 of the bundle with the transformer.
        student: P@1 and P@5 of the new bundle.
        queries: number of held-out queries that were measured.
        unseen_by_teacher: whether the teacher's run held them out too. If not, the teacher was
            trained on them and the student was not.
    """

    teacher: tuple[float, float]
    student: tuple[float, float]
    queries: int
    unseen_by_teacher: bool


@dataclass(frozen=True, eq=False)
class _Lessons:
    """The teacher's vectors and best labels of the sampled texts.

    Attributes:
        data: the training split.
        ids: int64 [N], query ids of `data`, ascending.
        vectors: float32 [N, D].
        labels: int64 [N, K], source ids of its best labels.
        temperature: by which its scores are divided.
    """

    data: TrainingData
    ids: Int64Array
    vectors: Float32Array
    labels: Int64Array
    temperature: float


def distil(
    path: str,
    corpus: Corpus,
    out: str | Path,
    config: Distillation | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> DistilOutcome:
    """Writes a bundle that answers like another one, with a static encoder.

    Args:
        path: folder or URL of a bundle with a transformer.
        corpus: the one that it was made from.
        out: folder or URL that does not exist yet.
        config: settings; the defaults if not given.
        progress: called with the number of texts that were learned so far.
    Raises:
        ConfigError: the bundle has no transformer, several encoders, or a mixer of side vectors.
        DataError: bundle and corpus do not belong together.
        StorageError: the bundle is damaged, `out` exists, or the disk is full.
    """
    config = config or Distillation()
    refuse_existing(out)
    folder, manifest = open_artifact(path, KIND)
    teacher = Retriever.of_folder(folder)
    check_fits(teacher, corpus)
    transformer = _transformer(teacher, path)
    data, unseen_by_teacher = _held_out(path, manifest.about, corpus)
    lessons = _lessons(teacher, data, config)
    settings = EncoderConfig(
        dim=transformer.dim,
        bigram_buckets=config.bigram_buckets,
        position_decay=config.position_decay,
    )
    encoder = _start(transformer, teacher.tokenizer, settings, data, config.seed)
    _train(encoder, teacher, lessons, config, progress)
    query_encoder = dataclasses.replace(teacher.query_encoder, encoder=encoder.eval())
    # The teacher's calibration and its maps from texts to rows do not fit the student's vectors.
    student = dataclasses.replace(
        teacher, query_encoder=query_encoder, calibration=None, row_maps={}
    )
    rows = data.validation_rows
    measured = some_rows(rows, MOST_MEASURED, config.seed)
    outcome = DistilOutcome(
        teacher=_precision(teacher, corpus, measured),
        student=_precision(student, corpus, measured),
        queries=len(measured),
        unseen_by_teacher=unseen_by_teacher,
    )
    # Label vectors that were trained on these queries would make the probabilities too high.
    if teacher.calibration is not None and unseen_by_teacher:
        calibration = fit_calibration(student, corpus, rows)
        student = dataclasses.replace(student, calibration=calibration)
    changes = {
        "config": {**manifest.about.get("config", {}), "encoder": configs.dump(settings)},
        "distilled_from": manifest.sha256,
        "distillation": dataclasses.asdict(config),
    }
    _write(out, student, folder, manifest, changes)
    return outcome


def _transformer(teacher: Retriever, path: str) -> TransformerEncoder:
    """The encoder of a bundle; raises ConfigError if it has none that can be distilled alone."""
    if teacher.side_width:
        raise ConfigError(
            f"{path} mixes side vectors into its vectors, expected an encoder of texts alone; train"
            " with encoder.side=ignore"
        )
    problem = "has no transformer"
    encoder = teacher.query_encoder.encoder
    if teacher.fusion is not None:
        problem = "has several parts"
    elif isinstance(encoder, TransformerEncoder):
        return encoder
    raise ConfigError(
        f"{path} {problem}, expected a bundle of one transformer; distil the bundle of a run"
        " with encoder.name=MODEL"
    )


def _write(
    out: str | Path,
    student: Retriever,
    teacher_folder: Path,
    manifest: Manifest,
    changes: Mapping[str, Any],
) -> None:
    """Writes the student's encoder and probabilities; the other files are the teacher's."""
    replaced = {name for name in manifest.files if name.startswith(_REPLACED)}
    # Files with a second name keep their hashes: only new files are hashed.
    linked: dict[str, FileEntry] = {}
    with new_bundle(out, {**manifest.about, **changes}, linked) as target:
        student.query_encoder.encoder.save(target / "encoder")
        if student.calibration is not None:
            student.calibration.save(target)
        linked |= link_files(teacher_folder, manifest, target, replaced)


def _held_out(path: str, about: Mapping[str, Any], corpus: Corpus) -> tuple[TrainingData, bool]:
    """The training split of the teacher, and whether its held-out queries are new to the teacher."""
    settings = about.get("config", {}).get("data") or {}
    config = configs.build(DataConfig, settings, "data.")
    is_new = bool(config.validation)
    if is_new:
        data = held_out_by(path, about, corpus)
    else:
        data = TrainingData(corpus, dataclasses.replace(config, validation=OWN_HELD_OUT))
    # Label texts are to be learned, also of a teacher that was not trained on them as queries.
    with_labels = dataclasses.replace(data.config, augment_with_labels=True)
    return TrainingData(corpus, with_labels).with_validation_rows(data.validation_rows), is_new


def _lessons(teacher: Retriever, data: TrainingData, config: Distillation) -> _Lessons:
    """Encodes a sample of the training texts with the teacher and finds its best labels."""
    generator = draws.generator(config.seed, "distil")
    num_labels = min(config.candidates, teacher.num_labels)
    num_texts = min(config.texts, len(data.query_ids))
    chosen = random_sample(generator, len(data.query_ids), num_texts)
    ids = data.query_ids[np.sort(chosen)]
    vectors = []
    labels = []
    for span in spans(len(ids), CHUNK):
        vector_BD = teacher.query_encoder.encode(data.tokens(ids[span]))
        scope = SearchScope(exclude=_own_labels(data, ids[span]))
        vectors.append(vector_BD)
        labels.append(teacher.labels.search(vector_BD, num_labels, scope).ids)
    temperature = _temperature(teacher, data, config)
    return _Lessons(data, ids, np.concatenate(vectors), np.concatenate(labels), temperature)


def _temperature(teacher: Retriever, data: TrainingData, config: Distillation) -> float:
    """The temperature by which the teacher's scores predict held-out positives best.

    Guo et al., "On calibration of modern neural networks", ICML 2017.
    """
    rows = some_rows(data.validation_rows, TEMPERATURE_QUERIES, config.seed)
    vector_BD = teacher.query_encoder.encode(data.tokens(rows))
    num_labels = min(config.candidates, teacher.num_labels)
    own_labels = _own_labels(data, rows)
    top = teacher.labels.search(vector_BD, num_labels, SearchScope(exclude=own_labels))
    positives = _positives(data, rows)
    label_C = np.unique(np.concatenate([top.ids.ravel(), positives.values]))
    # -1 stands for a missing answer.
    label_C = label_C[label_C >= 0]
    label_CD = teacher.labels.vectors_of(label_C)
    is_own_BC = _is_own(own_labels, label_C)
    score_BC = torch.from_numpy(vector_BD @ label_CD.T)
    target_BC = _shares(positives, data.weights(rows), label_C)

    def loss_at(temperature: float) -> float:
        kept_BC = (score_BC / temperature).masked_fill(is_own_BC, NEVER)
        return float(F.cross_entropy(kept_BC, target_BC))

    return min(TEMPERATURES, key=loss_at)


def _start(
    transformer: TransformerEncoder,
    tokenizer: TextTokenizer,
    settings: EncoderConfig,
    data: TrainingData,
    seed: int,
) -> Encoder:
    """A static encoder in which a token has the vector that the transformer gives it as a text."""
    counts = data.token_counts(tokenizer.vocab_size)
    encoder = build_encoder(settings, tokenizer, counts, seed)
    assert isinstance(encoder, StaticEncoder)
    table_VD = fit_width(token_vectors(transformer, tokenizer), settings.dim)
    encoder.start_from(table_VD.to(encoder.embedding.weight), share=1.0)
    return encoder.train()


def _train(
    encoder: Encoder,
    teacher: Retriever,
    lessons: _Lessons,
    config: Distillation,
    progress: Callable[[int], None] | None,
) -> None:
    """Trains the encoder on positives, on the teacher's probabilities and on its vectors."""
    # The student keeps the teacher's head as it is.
    head = teacher.query_encoder.head
    head.requires_grad_(False)
    steps_per_epoch = math.ceil(len(lessons.ids) / config.batch_size)
    num_steps = config.epochs * steps_per_epoch
    settings = OptimConfig(lr=config.lr, warmup_steps=int(WARMUP * num_steps))
    tables = [f"encoder.{name}" for name in encoder.sparse_parameters()]
    optimizer = EncoderOptimizer({"encoder": encoder}, settings, tables)
    # The squared length of the teacher's vectors makes the error of vectors a share.
    mean_square = float(np.square(lessons.vectors).sum(axis=1).mean())
    num_done = 0
    for step, places in enumerate(_steps(len(lessons.ids), config)):
        ids = lessons.ids[places]
        positives = _positives(lessons.data, ids)
        label_C = _step_labels(lessons, places, positives, step, config)
        label_CD = torch.from_numpy(teacher.labels.vectors_of(label_C))
        # Divided once, this puts the scores of teacher and student at the same temperature.
        scaled_label_CD = label_CD / lessons.temperature
        teacher_BD = torch.from_numpy(lessons.vectors[places])
        student_BD = head(encoder(lessons.data.tokens(ids)))
        if teacher.query_encoder.normalised:
            student_BD = F.normalize(student_BD, dim=-1)
        is_own_BC = _is_own(_own_labels(lessons.data, ids), label_C)
        teacher_score_BC = (teacher_BD @ scaled_label_CD.T).masked_fill(is_own_BC, NEVER)
        student_score_BC = (student_BD @ scaled_label_CD.T).masked_fill(is_own_BC, NEVER)
        positive_share_BC = _shares(positives, lessons.data.weights(ids), label_C)
        teacher_share_BC = F.softmax(teacher_score_BC, dim=1)
        target_BC = config.positives * positive_share_BC + (1 - config.positives) * teacher_share_BC
        loss = F.cross_entropy(student_score_BC, target_BC)
        error_B = (student_BD - teacher_BD).square().sum(dim=1)
        loss = loss + error_B.mean() / mean_square
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(lr_factor(settings, step, num_steps))
        num_done += len(places)
        if progress is not None:
            progress(num_done)


def _steps(num_texts: int, config: Distillation) -> Iterator[Int64Array]:
    """Places of the texts of each step; every text occurs once in an epoch."""
    for epoch in range(config.epochs):
        order = draws.generator(config.seed, "distil order", epoch).permutation(num_texts)
        for span in spans(num_texts, config.batch_size):
            yield order[span]


def _step_labels(
    lessons: _Lessons, places: Int64Array, positives: Ragged, step: int, config: Distillation
) -> Int64Array:
    """Source ids of the labels that the texts of a step are compared with, ascending."""
    corpus = lessons.data.corpus
    taught = lessons.labels[places].ravel()
    random = draws.uniform_labels(config.seed, step, lessons.data.num_labels, config.random_labels)
    labels = np.unique(np.concatenate([taught, positives.values, random]))
    # -1 stands for a label that a query lacks.
    return np.setdiff1d(labels[labels >= 0], corpus.removed_labels)


def _positives(data: TrainingData, ids: Int64Array) -> Ragged:
    """Positives of queries and label texts by source id."""
    return _by_source_id(data, data.positives(ids))


def _own_labels(data: TrainingData, ids: Int64Array) -> Ragged:
    """Labels that are the query itself, by source id: they are neither right nor wrong."""
    return _by_source_id(data, data.excluded(ids))


def _by_source_id(data: TrainingData, internal: Ragged) -> Ragged:
    return Ragged(data.corpus.label_order[internal.values], internal.offsets)


def _shares(positives: Ragged, weights: Float64Array | None, label_C: Int64Array) -> Tensor:
    """[B, C], rows that sum to 1 over the positives among the labels, by how much each counts."""
    places, is_there = find_sorted(label_C, positives.values)
    share_BC = torch.zeros(len(positives), len(label_C))
    counts = torch.ones(int(is_there.sum()))
    if weights is not None:
        counts = torch.from_numpy(weights[is_there]).to(counts)
    share_BC[positives.row_ids[is_there], places[is_there]] = counts
    sum_B1 = share_BC.sum(dim=1, keepdim=True)
    # A row without positives stays 0: the loss has the teacher's share alone.
    return share_BC / sum_B1.where(sum_B1 > 0, 1)


def _is_own(own_labels: Ragged, label_C: Int64Array) -> Tensor:
    """bool [B, C], the cells of a query and its own label."""
    places, is_there = find_sorted(label_C, own_labels.values)
    is_own_BC = torch.zeros(len(own_labels), len(label_C), dtype=torch.bool)
    is_own_BC[own_labels.row_ids[is_there], places[is_there]] = True
    return is_own_BC


def _precision(retriever: Retriever, corpus: Corpus, rows: Int64Array) -> tuple[float, float]:
    """P@1 and P@5 on held-out queries, which do not vote."""
    split = corpus.split("train")
    judged = without_voters(retriever, corpus, rows)
    count = min(5, retriever.num_labels)
    top = judged.top_labels(split.tokens(rows), count, exclude=split.filters(rows))
    hit_BK = relevant(top.ids, split.positives(rows), corpus.card.num_labels)
    return precisions(hit_BK)
