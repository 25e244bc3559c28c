"""What a plan asks of a method, with the answers of one that encodes labels by their texts and keeps nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from xmcray.losses.columns import BLOCK_FLOATS
from xmcray.planning.data_size import DataSize, distinct_labels, union
from xmcray.planning.encoders import EncoderShape
from xmcray.planning.step import VALUE, Shard, Step, Workload
from xmcray.training.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Met:
    """Labels that a global batch meets.

    Attributes:
        columns: distinct ones; L where all are met. by_text: their texts are encoded in the step.
        hard: hard negatives that are used per query. uniform: labels of the uniform pool.
    """

    columns: float
    by_text: bool
    hard: int
    uniform: int = 0


@dataclass(frozen=True)
class Costs(ABC):
    """What one method adds to a plan; only the classes of this package know which method is planned.

    Attributes:
        config: the run that is planned.
        rows_answer: trained rows answer queries, so that validation encodes no label texts.
        encoder_alone: nothing is trained beside the encoder.
    """

    config: RunConfig
    rows_answer: ClassVar[bool] = False
    encoder_alone: ClassVar[bool] = False

    @property
    def method(self) -> Any:
        """Section `method`."""
        return self.config.method

    @property
    def starts_anywhere(self) -> bool:
        """Whether the rows of the first index point in random directions, and not where texts or queries do."""
        return getattr(self.method, "init", "") in ("random", "zeros")

    # -- what a step meets ---------------------------------------------------------------------------------------------

    @property
    def num_positives(self) -> int:
        """Positives that are drawn per query; 0: all."""
        return int(self.method.num_positives)

    @property
    def hard_per_query(self) -> int:
        """Hard negatives that are drawn per query."""
        return min(self.config.negatives.hard, int(self.method.hard_per_query))

    def met(self, data: DataSize, queries: int, positives: float) -> Met:
        """Labels that a batch of so many queries with so many positives in all meets."""
        drawn = min(positives, queries * self.num_positives) if self.num_positives else positives
        columns = union(
            data.num_labels, distinct_labels(data, drawn), queries * self.hard_per_query
        )
        return Met(columns=columns, by_text=True, hard=self.hard_per_query)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def classifier_width(self, dim: int) -> int:
        """Width of trained label rows; 0: there are none."""
        return 0

    def label_rows(self, dim: int, shard: Shard) -> int:
        """Bytes that a worker keeps for its labels, with their optimiser."""
        return 0

    def modules(self, dim: int, num_labels: int) -> tuple[int, int, int]:
        """Elements of the modules beside the encoder: dense ones, those of a sparse table, and bytes of buffers."""
        return 0, 0, 0

    def tensors(self) -> int:
        """Dense parameters of these modules: an optimiser goes from one to the next."""
        return 0

    def score_bytes(self, shape: EncoderShape, load: Workload, shard: Shard) -> int:
        """Scores of a step with what is made of them, and the rows that are read for them with their gradients."""
        blocks, rows = self.score_blocks(load, shard, shape.dim)
        return int(gathered(shape, load, shard) + (2 * blocks + rows) * shard.value)

    def score_blocks(self, load: Workload, shard: Shard, dim: int) -> tuple[float, float]:
        """Elements of a block of scores, and of label vectors with their gradients."""
        columns = load.columns / shard.workers
        return block(load.queries * columns), 6 * columns * dim

    def published_copies(self) -> int:
        """Copies of all label vectors while a version is written: of the encoder, then of the head or of the file."""
        return 2

    def started_bytes(self, num_labels: int, dim: int, shard: Shard) -> int:
        """What start values take for a moment."""
        return (
            2 * shard.labels * dim * 4
            if getattr(self.method, "init", "") in ("texts", "centroids")
            else 0
        )

    # -- seconds -------------------------------------------------------------------------------------------------------

    def dropped(self, step: Step) -> float:
        """Elements of dropout masks beside those of the encoder."""
        return 0.0

    @abstractmethod
    def loss(self, step: Step) -> float:
        """Seconds of scores, the loss and both their gradients."""

    def exchanged_width(self, dim: int) -> int:
        """Width of the query vectors that all ranks get."""
        return dim

    def exchange(self, step: Step) -> float:
        """Seconds of what ranks tell each other besides: of a softmax the sums, and their gradients."""
        return 2 * step.rates.exchange(step.load.queries * VALUE, step.shard.workers)


def gathered(shape: EncoderShape, load: Workload, shard: Shard) -> int:
    """Bytes of all query vectors: gathered, dropped out, and their gradients."""
    return 4 * load.queries * shape.dim * shard.value


def block(grid: float) -> float:
    """Elements of scores that exist at a time."""
    return min(grid, BLOCK_FLOATS)
