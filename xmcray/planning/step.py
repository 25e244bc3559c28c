"""What a plan is made from: a worker's shard, what a step of it meets, and the machine it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from xmcray.nn.row_table import RowOptimConfig
from xmcray.planning.data_size import DataSize
from xmcray.planning.encoders import EncoderShape
from xmcray.planning.rates import Rates
from xmcray.training.run import RunConfig

ID = 8  # bytes of an int64
VALUE = 4  # bytes of a float32
STATE_TENSORS = {"sgd": 1, "adagrad": 1, "adam": 2}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of the global batch, and the run around it.

    Attributes:
        queries: G. per_rank: queries of the largest share of a rank. steps_per_epoch, epochs: of the run.
        num_query_ids: N, or N + L where label texts are queries.
        positives: of all G queries together. label_texts: labels whose texts the step encodes, of all ranks.
        hard: hard negatives that the step uses per query. uniform: labels of the uniform pool.
        columns: distinct labels that the step meets, of all ranks (L where it meets all).
        tokens: of the texts that one rank encodes. token_rows: distinct rows of a static encoder's table in them;
            all_token_rows: in those of all ranks.
    """

    queries: int
    per_rank: int
    steps_per_epoch: int
    epochs: int
    num_query_ids: int
    positives: float
    label_texts: float
    hard: int
    uniform: int
    columns: float
    tokens: float
    token_rows: float
    all_token_rows: float


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Who holds what: W workers, of which each has S of L labels and B of G queries; `value` is bytes of a number."""

    workers: int
    labels: int
    queries: int
    value: int = 4


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step on one worker.

    Attributes:
        config, shape, data, load, shard: what is trained. rates: of the machine.
    """

    config: RunConfig
    shape: EncoderShape
    data: DataSize
    load: Workload
    shard: Shard
    rates: Rates

    @property
    def columns(self) -> float:
        """Labels that the step meets, of one worker."""
        return self.load.columns / self.shard.workers


def row_states(config: RowOptimConfig) -> int:
    """Tensors of an optimiser beside the rows."""
    return 0 if config.kind == "sgd" and config.momentum == 0 else STATE_TENSORS[config.kind]


def row_table(rows: int, dim: int, config: RowOptimConfig, value: int = 4) -> int:
    """Rows, their optimiser state, and the step that touched each (int32; Adam counts touches too)."""
    stored = 2 if config.storage == "bfloat16" else value
    return rows * dim * (stored + row_states(config) * value) + rows * 4 * (
        2 if config.kind == "adam" else 1
    )
