"""One optimisation step: the only place where a loss is divided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xmcray import draws
from xmcray.errors import ConfigError
from xmcray.methods.base import Method
from xmcray.nn.encoder import Encoder
from xmcray.parallel import collectives
from xmcray.training.optim import EncoderOptimizer, OptimConfig, lr_factor, sparse_parameters
from xmcray.types import Batch, Ragged, Shortlist, StepOutput

_PLAIN_ROWS = 1024  # texts encoded at once without a graph


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Vectors whose backward pass through the encoder is still to be done.

    Attributes:
        tokens: Texts that were encoded.
        leaf: Their vectors, which collect the gradient of the loss.
        seed: Of the dropout inside the encoder; chunk i has seed + i.
    """

    tokens: Ragged
    leaf: Tensor
    seed: int


class Embedder:
    """The encoder as methods call it; with `micro_batch`, graphs exist for one chunk at a time.

    Then every text is encoded twice (GradCache, Gao et al. 2021): first all chunks without a graph,
    so that the loss can be propagated back to the vectors; then each chunk again, to propagate its
    vectors' gradient through the encoder. Dropout inside the encoder is replayed.

    Args:
        encoder: The encoder.
        micro_batch: Texts of a chunk; 0 encodes all at once.
    """

    def __init__(self, encoder: Encoder, micro_batch: int) -> None:
        self.encoder = encoder
        self.micro_batch = micro_batch
        self._deferred: list[_Deferred] = []

    def __call__(self, tokens: Ragged) -> Tensor:
        """Vectors [rows, D] that carry a gradient back to the encoder, unless it is frozen."""
        if not self.micro_batch or len(tokens) <= self.micro_batch:
            return self.encoder(tokens)  # type: ignore[no-any-return]
        seed = int(torch.randint(2**62, (1,)))
        vectors = []
        with torch.no_grad():
            for i, chunk in enumerate(tokens.chunks(self.micro_batch)):
                vectors.append(self._encode_chunk(chunk, seed + i))
        vector_BD = torch.cat(vectors)
        if any(parameter.requires_grad for parameter in self.encoder.parameters()):
            self._deferred.append(_Deferred(tokens, vector_BD.requires_grad_(), seed))
        return vector_BD

    @property
    def is_deferred(self) -> bool:
        """Whether texts were encoded in chunks since the last `finish_backward`."""
        return bool(self._deferred)

    def finish_backward(self) -> None:
        """Propagates the gradients of chunked vectors through the encoder."""
        for deferred in self._deferred:
            assert deferred.leaf.grad is not None
            # The same cuts as in the first pass, so that chunk i meets its own gradient and seed.
            gradients = deferred.leaf.grad.split(self.micro_batch)
            for i, chunk in enumerate(deferred.tokens.chunks(self.micro_batch)):
                vectors = self._encode_chunk(chunk, deferred.seed + i)
                vectors.backward(gradients[i])
        self._deferred.clear()

    def _encode_chunk(self, chunk: Ragged, seed: int) -> Tensor:
        """One chunk with the dropout of `seed`, on any device."""
        torch.manual_seed(seed)
        return self.encoder(chunk)  # type: ignore[no-any-return]


def encode_without_graph(encoder: Encoder, tokens: Ragged) -> Tensor:
    """Vectors [rows, D] without a graph and without dropout, in bounded memory."""
    if not len(tokens):
        return next(encoder.parameters()).new_zeros(0, encoder.dim)
    training = encoder.training
    encoder.eval()
    result: Tensor | None = None
    row = 0
    with torch.no_grad():
        for chunk in tokens.chunks(_PLAIN_ROWS):
            vectors = encoder(chunk)
            # A list of parts would be in memory twice while it is joined.
            if result is None:
                result = vectors.new_empty(len(tokens), vectors.shape[1])
            result[row : row + len(vectors)] = vectors
            row += len(vectors)
    encoder.train(training)
    assert result is not None
    return result


def encode_queries(encoder: Encoder, method: Method, tokens: Ragged) -> Tensor:
    """Vectors that `method.answer_rows` are searched with, without a graph and without dropout."""
    training = method.head.training
    method.head.eval()
    with torch.no_grad():
        query_BD: Tensor = method.head(encode_without_graph(encoder, tokens))
    method.head.train(training)
    return query_BD


class Stepper:
    """Encoder, method and optimisers of one rank.

    Args:
        encoder: Data-parallel.
        embedder: The encoder as the method calls it.
        method: What is trained.
        config: Section `optim`.
        total_steps: Steps of the whole run, for the schedule.

    Raises:
        ConfigError: nothing would be trained.
    """

    def __init__(
        self,
        encoder: Encoder,
        embedder: Embedder,
        method: Method,
        config: OptimConfig,
        total_steps: int,
    ) -> None:
        self.encoder = encoder
        self.embedder = embedder
        self.method = method
        self.config = config
        self.total_steps = total_steps
        self.modules: dict[str, nn.Module] = {"encoder": encoder, **method.modules}
        sparse = []
        for name, module in self.modules.items():
            sparse += [f"{name}.{parameter}" for parameter in sparse_parameters(module)]
        self.optimizer = EncoderOptimizer(self.modules, config, sparse, method.lr_factors)
        # A learning rate of 0 freezes rows.
        rows_learn = any(table.config.lr for table in method.tables.values())
        if not (self.optimizer.dense or sparse or rows_learn):
            raise ConfigError(
                "encoder.frozen leaves this method nothing to train without a projection;"
                " set encoder.dim"
            )

    def step(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """Computes loss and gradients, and updates everything once; collective."""
        # Dropout inside a transformer can be replayed, and differs between ranks.
        seed = draws.torch_seed(self.config.seed, "torch", batch.step, collectives.rank())
        torch.manual_seed(seed)
        self.encoder.train()
        self.optimizer.zero_grad()
        output = self.method.loss(batch, shortlist)
        mean_loss = output.total / output.divisor
        if not self.embedder.is_deferred:
            self.optimizer.sums.overlap()
        mean_loss.backward()
        self.embedder.finish_backward()
        factor = lr_factor(self.config, batch.step, self.total_steps)
        self.optimizer.step(factor)
        # Each rank owns the rows of its labels, so these gradients are not exchanged.
        for table in self.method.tables.values():
            table.update(table.config.lr * factor)
        self.method.after_step(batch, output)
        return output
