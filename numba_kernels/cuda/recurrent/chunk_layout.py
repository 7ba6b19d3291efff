"""The chunk form of recurrent states: chunks of 64 tokens, and what its first launch leaves for the second.

A sequence's chunk of the batch has n tokens; those that its page holds as pending come first, so that it has
``m = pending + n`` tokens here, cut into chunks of `CHUNK` from its own first one. Sequences of at most `most_steps`
tokens are the step kernels'.

**Workspace.** Every chunk has a slot; the slots of a sequence follow each other, and begin at a number that depends on
the tokens before it alone. A slot has a part for each key head (Q, K) and for each value head (W, P, decays, U). All
matrices lie as *fragments*: 16 bytes a lane, 512 bytes a warp, each lane's words being operands of `mma.sync`
(`intrinsics.mma`). So the second launch copies runs of memory, and reads them without `ldmatrix` or a bank conflict.
An accumulator's words are the same fragment once packed, which is why the first launch needs no exchange to write them:

    Q, W  [strip of 16 tokens][step of 16 rows][lane]     second factor [rows, tokens]
    K     [strip of 16 tokens][16 rows][lane]             second factor [tokens, rows]
    P     [strip of 16 tokens][earlier strip][lane]       second factor [earlier tokens, tokens], the triangle alone
    U     [16 columns][strip of 16 tokens][lane]          accumulator [columns, tokens]

"Rows" are the state's key dimension, "columns" its value dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import int32, uint32, uint64

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.recurrent.chunk import find_chunk

CHUNK = 64
STRIPS = CHUNK // 16
FRAGMENT = 512
TRIANGLE = STRIPS * (STRIPS + 1) // 2
"""Fragments of P."""


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """Sizes of a state, of 16-bit activations, and the bytes of a slot's parts.

    Attributes:
        rows, columns: of a head's state: dk and dv.
        has_delta: the delta rule; else Mamba-2, whose W is 0.
    """

    dtype: str
    rows: int
    columns: int
    has_delta: bool

    @property
    def matrix(self) -> int:
        """Bytes of Q, K or W of a head."""
        return CHUNK * self.rows * 2

    @property
    def key_part(self) -> int:
        return 2 * self.matrix

    @property
    def decays(self) -> int:
        """The offset of a value head's decays: e^G of each token, then what each adds to the state, float32."""
        return self.matrix * self.has_delta + TRIANGLE * FRAGMENT

    @property
    def copied(self) -> int:
        """Bytes of a value head's part that all warps of the second launch read: W, P and the decays."""
        return self.decays + 2 * CHUNK * 4

    @property
    def value_part(self) -> int:
        return self.copied + CHUNK * self.columns * 2


def num_slots(num_tokens: int, num_seqs: int, pending: int) -> int:
    """Slots of all chunks of a batch, at most."""
    return (num_tokens + num_seqs * (pending + CHUNK - 1)) // CHUNK


@device_function
def first_slot(first_token, seq, pending):
    """The slot of a sequence's first chunk."""
    return uint32(uint32(first_token + seq * uint32(pending + uint32(CHUNK - 1))) // uint32(CHUNK))


@device_function
def sequence_of(seq, query_start, seq_lens, table, table_width, lengths, pending, most_steps):
    """``(first_token, num_pending, num_tokens, position, read_page, write_page)`` of a sequence: its first token in
    the batch, the tokens that are pending and those with them, 0 if the chunk form does not serve it, and the position
    of the first that is not pending; at position 0 nothing is read."""
    start, count, before, read, written, length = find_chunk(
        query_start, seq_lens, table, table_width, lengths, seq
    )  # fmt: skip
    num_pending, num_tokens = uint32(0), uint32(0)
    if before >= int32(0) and uint32(count) > most_steps:
        if before > int32(0):
            num_pending = minimum_u32(uint32(before - length), pending)
        num_tokens = uint32(num_pending + uint32(count))
    return uint32(start), num_pending, num_tokens, uint32(before), uint64(uint32(read)), uint64(uint32(written))
