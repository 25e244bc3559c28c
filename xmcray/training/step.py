"""One optimisation step. The only place where a loss is divided and where gradients are scaled over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from xmcray import draws
from xmcray.errors import ConfigError
from xmcray.methods.base import Method
from xmcray.nn.encoder import Encoder
from xmcray.parallel import collectives
from xmcray.training.optim import EncoderOptimizer, OptimConfig, lr_factor, sparse_parameters
from xmcray.types import Batch, Ragged, Shortlist, StepOutput

_PLAIN_ROWS = 1024  # texts encoded at once where no graph is kept


class Embedder:
    """The encoder as methods call it: with `micro_batch`, a text is encoded twice and its graph lives for one chunk.

    (GradCache, Gao et al. 2021: encode all chunks without a graph, back-propagate the loss to the vectors, then
    encode each chunk again and back-propagate its vectors' gradient. Dropout inside the encoder is replayed.)
    """

    def __init__(self, encoder: Encoder, micro_batch: int) -> None:
        self.encoder, self.micro_batch = encoder, micro_batch
        self._kept: list[tuple[Ragged, Tensor, int]] = []

    def __call__(self, tokens: Ragged) -> Tensor:
        """Vectors [rows, D] that carry a gradient back to the encoder."""
        if not self.micro_batch or len(tokens) <= self.micro_batch:
            return self.encoder(tokens)  # type: ignore[no-any-return]
        seed = int(torch.randint(2**62, (1,)))
        with torch.no_grad():
            parts = [
                self._chunk(chunk, seed + i)
                for i, chunk in enumerate(_chunks(tokens, self.micro_batch))
            ]
        leaf = torch.cat(parts).requires_grad_()
        self._kept.append((tokens, leaf, seed))
        return leaf

    def finish_backward(self) -> None:
        """Takes the gradients of chunked vectors back to the encoder."""
        for tokens, leaf, seed in self._kept:
            assert leaf.grad is not None
            grads = leaf.grad.split(self.micro_batch)
            for i, (chunk, grad) in enumerate(
                zip(_chunks(tokens, self.micro_batch), grads, strict=True)
            ):
                self._chunk(chunk, seed + i).backward(grad)
        self._kept.clear()

    def _chunk(self, chunk: Ragged, seed: int) -> Tensor:
        """One chunk with the dropout of `seed`, on any device."""
        torch.manual_seed(seed)
        return self.encoder(chunk)  # type: ignore[no-any-return]


def encode_plain(encoder: Encoder, tokens: Ragged) -> Tensor:
    """Vectors without a graph and without dropout, in bounded memory; the encoder's mode is restored."""
    training = encoder.training
    encoder.eval()
    with torch.no_grad():
        found, place = None, 0
        for chunk in _chunks(
            tokens, _PLAIN_ROWS
        ):  # no list of parts, which would exist twice when it is joined
            vectors = encoder(chunk)
            if found is None:
                found = vectors.new_empty(len(tokens), vectors.shape[1])
            found[place : place + len(vectors)] = vectors
            place += len(vectors)
    encoder.train(training)
    return next(encoder.parameters()).new_zeros(0, encoder.dim) if found is None else found


def answer_queries(encoder: Encoder, method: Method, tokens: Ragged) -> Tensor:
    """Vectors that `method.answer_rows` are searched with; no graph, no dropout."""
    training = method.head.training
    method.head.eval()
    with torch.no_grad():
        query_BD: Tensor = method.head(encode_plain(encoder, tokens))
    method.head.train(training)
    return query_BD


class Stepper:
    """Encoder, method and optimisers of one rank.

    Args:
        encoder: data-parallel. embedder: the encoder as the method calls it. method: what is trained.
        config: section `optim`. total_steps: of the whole run, for the schedule.
    """

    def __init__(
        self,
        encoder: Encoder,
        embedder: Embedder,
        method: Method,
        config: OptimConfig,
        total_steps: int,
    ) -> None:
        self.encoder, self.embedder, self.method = encoder, embedder, method
        self.config, self.total_steps = config, total_steps
        torch.set_float32_matmul_precision("medium" if config.matmul == "bf16" else "highest")
        self.modules: dict[str, nn.Module] = {"encoder": encoder, **method.modules}
        sparse = [
            f"{m}.{p}" for m, module in self.modules.items() for p in sparse_parameters(module)
        ]
        self.optimizer = EncoderOptimizer(self.modules, config, sparse, method.lr_factors)
        if not (
            self.optimizer.named
            or sparse
            or any(table.config.lr for table in method.tables.values())
        ):
            raise ConfigError(
                "encoder.frozen leaves this method nothing to train without a projection; set encoder.dim"
            )

    def step(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """Computes loss and gradients, and updates everything once; collective."""
        # Dropout inside a transformer can be replayed, and differs between ranks.
        torch.manual_seed(
            draws.torch_seed(self.config.seed, "torch", batch.step, collectives.rank())
        )
        self.encoder.train()
        self.optimizer.zero_grad()
        output = self.method.loss(batch, shortlist)
        (output.total / output.divisor).backward()
        self.embedder.finish_backward()
        factor = lr_factor(self.config, batch.step, self.total_steps)
        self.optimizer.step(factor)
        for table in self.method.tables.values():
            table.update(table.config.lr * factor)
        self.method.after_step(batch, output)
        return output


def _chunks(tokens: Ragged, rows: int) -> Iterable[Ragged]:
    return (
        tokens.slice(start, min(start + rows, len(tokens))) for start in range(0, len(tokens), rows)
    )
