"""A table of embeddings of which each rank has some columns."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.communicator import Communicator
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SharedTable:
    """Looked up by `ops.embedding`, which gathers the rows: bits are those of the whole table.

    Attributes:
        part: this rank's columns, ``[V, share]``; the last rank's may be fewer.
        share: columns of each rank but the last.
        columns: of all ranks.
    """

    part: Tensor
    communicator: Communicator
    share: int
    columns: int
