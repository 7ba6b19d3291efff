"""One step's ragged batch: plain data that the runner writes and models and operations read.

The tokens of all sequences form one row. Sequence ``s`` owns the tokens ``query_start[s] : query_start[s+1]``; its
``j``-th token has position ``seq_lens[s] - query_len + j`` and attends to positions up to its own. A decode is a chunk
of length one; there is no padding and no separate prefill path.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor


class StepField(NamedTuple):
    """Declares an array of each step at its field of `Batch`: the layout on the host, the memory on the device, and the
    inputs of all recordings follow from it.

    dtype     of its numbers, numpy's name
    per       "token", "chunk" (a sequence of the step), "start" (of each chunk, and the end), "logit", or "block": a
              row of blocks for each chunk
    padding   the value in padding, and in passes outside the steps
    by_group  there is one for each KV cache group
    row       path from a `Sequence` to its number, which is sent when the sequence gets its row; "": not from there
    step      path from a step's `Chunk` to its number, which is sent with each step; "": not from there
    of_last   only steps that want nothing but each chunk's last token have it (`Batch.is_last_wanted`)
    of_adapted  only steps in which a row has an adapter have it
    """

    dtype: str
    per: Literal["token", "chunk", "start", "logit", "block"]
    padding: int = 0
    by_group: bool = False
    row: str = ""
    step: str = ""
    of_last: bool = False
    of_adapted: bool = False


@dataclass(frozen=True, slots=True)
class EncodedTokens:
    """Tokens from ``first_token`` on whose embeddings come from an encoder.

    ``rows``: each ``[num_tokens, hidden_size]``; the first are the embeddings, the i-th of the others are added after
    the i-th layer.
    """

    first_token: int
    rows: tuple[Tensor, ...]


class LongChunk(NamedTuple):
    """A chunk whose sequence's latent rows are expanded (`runtime.linear.latent`).

    seq, first_token  of the batch's
    num_tokens        of the chunk
    length            tokens of the sequence, rounded up
    """

    seq: int
    first_token: int
    num_tokens: int
    length: int


class LongChunks(NamedTuple):
    """`max_query_len` is the longest of a batch's other chunks, 0 if there are none; without long ones it means
    nothing."""

    chunks: tuple[LongChunk, ...] = ()
    max_query_len: int = 0


NO_LONG_CHUNKS = LongChunks()


@dataclass(slots=True)
class AdaptedRows:
    """The part of a batch that addends read, for rows that are no tokens of one. Fields as in `Batch`."""

    adapters: Tensor | None
    computed: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(slots=True)
class Batch:
    """The input of one forward pass. Every Tensor lies on the model's device and is C-contiguous.

    The runner sets every field once, before ``Model.forward``; only ``kept``, ``carried``, ``position_bias``, ``plans``
    and ``computed`` change afterwards.
    ``slot_mappings`` and ``block_tables`` hold one entry for each KV cache group (full attention, sliding window); most
    models have one.
    Each array of a step's layout is declared here alone (`StepField`).
    """

    token_ids: Annotated[Tensor, StepField("int32", "token")]  # [num_tokens]
    positions: Annotated[Tensor, StepField("int32", "token")]
    """``[num_tokens]`` rows of position tables, mostly indices in the sequence."""
    query_start: Annotated[Tensor, StepField("int32", "start")]  # [num_seqs + 1] offsets into the token row
    seq_lens: Annotated[Tensor, StepField("int32", "chunk")]
    """``[num_seqs]`` tokens in the KV cache after this step (context + this chunk)."""
    slot_mappings: Annotated[tuple[Tensor, ...], StepField("int64", "token", padding=-1, by_group=True)]
    """Each ``[num_tokens]``: block * block_size + offset; -1 = not stored."""
    block_tables: Annotated[tuple[Tensor, ...], StepField("int32", "block", by_group=True)]
    """Each ``[num_seqs, max_blocks]``."""
    logits_indices: Annotated[Tensor, StepField("int32", "logit")]
    """``[num_logits]`` rows of the token row that need logits."""
    max_query_len: int  # longest chunk of this batch, in tokens: for launch plans
    max_seq_len: int  # longest sequence of this batch, in tokens: for launch plans
    last_tokens: Annotated[Tensor | None, StepField("int32", "chunk", of_last=True)] = None
    """Rows of the token row, each chunk's last."""
    last_positions: Annotated[Tensor | None, StepField("int32", "chunk", of_last=True)] = None
    """Their `positions`."""
    last_start: Annotated[Tensor | None, StepField("int32", "start", of_last=True)] = None
    """0, 1, 2 ...: `query_start` of them alone."""
    logits_chunks: Annotated[Tensor | None, StepField("int32", "logit", of_last=True)] = None
    """The chunk of each logit."""
    adapters: Annotated[
        Tensor | None, StepField("int32", "token", padding=-1, row="request.adapter_slot", of_adapted=True)
    ] = None
    """The slot of each token's adapter, -1 for none; None if no token has one."""
    logits_adapters: Annotated[Tensor | None, StepField("int32", "logit", padding=-1, of_adapted=True)] = None
    """Those of the rows that need logits."""
    last_adapters: Annotated[Tensor | None, StepField("int32", "chunk", padding=-1, of_last=True, of_adapted=True)] = (
        None
    )
    """Those of `last_tokens`."""
    is_last_wanted: bool = False
    """Whether nothing but the hidden state of each chunk's last token is wanted, of a model that `gives_last_rows`:
    `Model.forward` may return these rows alone, ``[num_seqs, hidden_size]``, since layers that write no pages need not
    compute the others."""
    exact: bool = False  # a row's result must not depend on the rest of the batch; on the cpu it never does
    rope: RopeTable | None = None  # rotations of this step, a row a position; None for the model's own
    carried: Tensor | None = None  # [num_tokens, n]: what all layers of some models read, set by `Model.forward`
    encoded: tuple[EncodedTokens, ...] = ()  # embeddings of some tokens that come from an encoder
    bidirectional_until: Tensor | None = (
        None  # [num_tokens] int32: each attends to positions before this one; None for causal
    )
    until_by_window: dict[int | None, Tensor] = field(default_factory=dict)
    """An encoder's `bidirectional_until` of the layers with each window."""
    token_types: Tensor | None = None  # [num_tokens] int32: 0 in the first of two texts, 1 in the second
    may_round: bool = False
    """Whether attention on the cpu may round what it multiplies to bfloat16, with sums in float32, as GPUs do. An
    encoder in bfloat16 sets it; processors whose products do not round so ignore it."""
    position_bias: Tensor | None = None  # of attention's scores, as `ops.attention` takes it; a model sets it
    auxiliary_layers: tuple[
        int, ...
    ] = ()  # layers after which hidden states are kept, counted from 1; 0: the embeddings
    long_chunks: LongChunks = NO_LONG_CHUNKS
    kept: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)  # by layer
    plans: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # derived by ops, for all layers
    computed: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """Results of kernels that all layers of one pass read; a batch that is run again begins without any."""

    def keep(self, layer: int, x: Tensor) -> None:
        """Keep ``x [num_tokens, hidden_size]``, the hidden states after a layer, which is not written to any more."""
        if layer in self.auxiliary_layers:
            self.kept[layer] = x

    def has_rows_after(self, index: int) -> bool:
        """Whether an encoder's rows are added to some tokens after layer `index`."""
        return any(index + 1 < len(each.rows) for each in self.encoded)

    def of_last_tokens(self) -> Batch:
        """The chunks' last tokens as a batch of decodes, whose keys and values are written."""
        assert self.last_tokens is not None, "a step has them"
        assert self.last_positions is not None, "a step has them"
        assert self.last_start is not None, "a step has them"
        return replace(
            self, token_ids=self.last_tokens, positions=self.last_positions, query_start=self.last_start,
            slot_mappings=tuple(each[: self.num_seqs] for each in self.slot_mappings), max_query_len=1,
            is_last_wanted=False, bidirectional_until=None, long_chunks=NO_LONG_CHUNKS, adapters=self.last_adapters,
            plans={}, computed={},
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        """Sequences in this step."""
        return self.seq_lens.shape[0]


STEP_FIELDS: dict[str, StepField] = {
    name: each
    for name, hint in get_type_hints(Batch, include_extras=True).items()
    for each in getattr(hint, "__metadata__", ())
    if isinstance(each, StepField)
}
"""The arrays of a step, in the order of their memory."""

USUAL_FIELDS = {name: each for name, each in STEP_FIELDS.items() if not each.of_last}
"""Those of steps that want more than last tokens."""

_FIELDS_BY_KIND = {
    (is_last_wanted, has_adapters): {
        name: each
        for name, each in (STEP_FIELDS if is_last_wanted else USUAL_FIELDS).items()
        if has_adapters or not each.of_adapted
    }
    for is_last_wanted in (False, True)
    for has_adapters in (False, True)
}


def fields_of(*, is_last_wanted: bool, has_adapters: bool) -> dict[str, StepField]:
    """The arrays that such a step has."""
    return _FIELDS_BY_KIND[is_last_wanted, has_adapters]
