"""Common part of methods that search label texts: one encoder for queries and labels."""

from __future__ import annotations

from torch import Tensor

from xmcray.methods.base import Method, MethodContext
from xmcray.nn.heads import Head
from xmcray.types import Batch, Int64Array, Ragged


class DualEncoder(Method):
    """A label's vector is the head's output for its text.

    Args:
        name: Name of the method, for messages.
        context: What it is built from.
        head: Follows the encoder, for queries and labels alike.
    """

    def __init__(self, name: str, context: MethodContext, head: Head) -> None:
        context.check_label_texts(name)
        super().__init__(head)
        self.context = context

    def encode(
        self, batch: Batch, label_ids: Int64Array, label_tokens: Ragged | None = None
    ) -> tuple[Tensor, Tensor]:
        """Vectors of this rank's queries [B, D] and of label texts [U, D], with a graph."""
        query_BD, label_UD = self.context.encode_with_labels(batch, label_ids, label_tokens)
        return self.head(query_BD), self.head(label_UD)

    def answer_rows(self) -> Tensor:
        """Vectors of this rank's label texts."""
        label_SD: Tensor = self.head(self.context.label_vectors())
        return label_SD
