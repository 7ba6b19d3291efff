"""Runs a drafter that reads hidden states (`models.drafters`), which each step leaves of the model's.

It first computes pairs: token i + 1 of a sequence, with the model's hidden states at token i. A pair is available when
the step that computed token i is over; its key and value go into the drafter's own pages, in order. The pair of a
sequence's last token but one gives the next token. Later tokens are drafted from the drafter's own results
(`Stepping`), or at once (`Blocks`), for all sequences in batch, and sampled with the model's noise.

Pages of pairs are cached by their tokens, like the model's own: for a prefix in its cache the model gives no hidden
states, and the sequence takes over the pairs that another left. If these are gone, or steps were not read, pairs are
missing: it continues without them, and later pairs follow the earlier ones. It is then accepted less often; nothing
else depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from models.drafters.hidden_state_drafter import BlockDrafter, PairDrafter
from runtime.engine.limits import EngineLimits
from runtime.engine.scheduling.block_pool import BlockPool, Chain
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Drafting, Drawing, Ids, LeftChunk, PairChunks, WantedStates, prepared
from runtime.engine.speculation.drafting import Blocks, Stepping
from runtime.engine.steps.executor import AuxiliaryHiddenStates
from runtime.engine.steps.layout import BlockTables
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor


class _Pairs:
    """A sequence as the block pool reads it: its pairs by the tokens that they end with, ``ahead`` of those of their
    hidden states. See `TokenSource`."""

    __slots__ = ("ahead", "sequence")

    def __init__(self, sequence: Sequence, ahead: int) -> None:
        self.sequence, self.ahead = sequence, ahead

    def prefix_keys(self, start: int, end: int) -> Ids:
        return self.sequence.prefix_keys(start + self.ahead, end + self.ahead)


@dataclass(slots=True, eq=False)
class _Known:
    """The drafter's state of a sequence.

    row        its row in the block tables
    pairs, chain  as the pool needs them
    blocks     its pages
    length     pairs in the pages
    following  the position in the sequence of the next pair's hidden states
    is_whole   no pair is missing
    """

    row: int
    pairs: _Pairs
    chain: Chain
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    following: int = 0
    is_whole: bool = True


@dataclass(slots=True, eq=False)
class _Pass:
    """The next pairs of a sequence to compute, from ``start`` of its pages on, with the rows of hidden states."""

    known: _Known
    token_ids: Ids
    start: int
    rows: NDArray[np.int32]


class StateProposer:
    """See `StateDrafter`. Belongs to the engine's loop.

    drafter     on the engine's device
    limits      the engine's
    num_blocks  of its pages
    most        highest draft length of a sequence
    """

    def __init__(self, drafter: PairDrafter | BlockDrafter, limits: EngineLimits, num_blocks: int, most: int) -> None:
        spec = drafter.kv_cache_spec(limits.block_size)
        self.name = drafter.kind
        self.wanted = WantedStates(drafter.layers, drafter.target.config.hidden_size, drafter.target.dtype)
        self._max_positions, self._block_size = drafter.max_positions, limits.block_size
        self.pool = BlockPool(num_blocks, limits.block_size, enable_prefix_caching=limits.enable_prefix_caching)
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        longest = limits.max_model_len + (drafter.block_size if isinstance(drafter, BlockDrafter) else 0)
        max_blocks = -(-longest // limits.block_size)
        self._tables = BlockTables(1, limits.max_num_seqs, max_blocks, limits.block_size)
        pages = KVCache(spec, num_blocks)
        self._drafting: Drafting
        if isinstance(drafter, BlockDrafter):
            self._drafting = Blocks(drafter, pages, self._tables, limits)
        else:
            self._drafting = Stepping(drafter, pages, self._tables, limits, most)
        self._known: dict[Sequence, _Known] = {}  # most recently computed last
        self._states: tuple[Tensor, ...] = ()  # left by the latest step
        self._chunks: Callable[[], list[LeftChunk]] = list  # their sequences
        self._proposed: dict[Sequence, list[int]] = {}

    def follow(self, kept: AuxiliaryHiddenStates, chunks: Callable[[], list[LeftChunk]], *, pays: bool) -> None:
        """See `StateDrafter`. Chunks within prompts are computed at once, while that may pay; the others only if drafts
        are requested before the next step."""
        self._states, self._chunks, self._proposed = kept.tensors, partial(_of_text, chunks), {}
        if not pays:
            return
        left = self._chunks()
        self._chunks = lambda: left
        prompts: list[_Pass] = []
        keep = {chunk.sequence for chunk in left}
        for chunk in left:
            if chunk.start + chunk.num_tokens >= chunk.sequence.num_tokens - 1:
                continue
            before = self._known.get(chunk.sequence)
            if before is not None and chunk.start + chunk.num_tokens <= before.following:
                continue  # recomputed by the model after a preemption
            if (one := self._take(chunk, 0, keep)) is not None:
                prompts.append(one)
        if prompts:
            prompts.sort(key=lambda one: one.known.row)
            self._drafting.absorb(self._chunks_of(prompts))
            self._note(prompts)

    def prepare(self, asked: list[tuple[Sequence, int]]) -> None:
        self._proposed = {}
        keep = {sequence for sequence, _ in asked}
        left = {chunk.sequence: chunk for chunk in self._chunks()}
        self._chunks = list
        passes: list[tuple[_Pass, Drawing]] = []
        for sequence, most in asked:
            chunk = left.get(sequence)
            if chunk is None or chunk.start + chunk.num_tokens != sequence.num_tokens - 1:
                continue
            one = self._take(chunk, most, keep)
            if one is not None:
                passes.append((one, Drawing(sequence, most)))
        if not passes:
            return
        passes.sort(key=lambda both: both[0].known.row)
        pairs, sampling_sequences = [one for one, _ in passes], [each for _, each in passes]
        found = self._drafting.draft(self._chunks_of(pairs), sampling_sequences)
        self._note(pairs)
        self._proposed = {each.sequence: ids for each, ids in zip(sampling_sequences, found, strict=True)}

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        return prepared(self._proposed, sequence, most)

    def end(self, sequence: Sequence) -> None:
        self._proposed.pop(sequence, None)
        known = self._known.pop(sequence, None)
        if known is not None:
            self.pool.release(known.blocks)
            self.pool.forget(known.chain)
            self._tables.clear(known.row)
            self._free_rows.append(known.row)

    def _take(self, chunk: LeftChunk, most: int, keep: set[Sequence]) -> _Pass | None:
        """The pairs of a chunk that are not known yet, at least the last, with pages for them and for ``most`` draft
        tokens; None if there is no room."""
        sequence, size = chunk.sequence, self._block_size
        known = self._known.pop(sequence, None) or self._begin(chunk, keep)
        if known is None:
            return None
        self._known[sequence] = known
        skipped = min(max(0, known.following - chunk.start), chunk.num_tokens - 1)
        first, count = chunk.start + skipped, chunk.num_tokens - skipped
        if first < known.following:  # known before: computed again
            known.length = max(0, known.length - (known.following - first))
        elif first > known.following:
            known.is_whole = False
        most_slots = known.length + count + self._drafting.slots_after(most)
        if most_slots > self._max_positions:
            self.end(sequence)
            return None
        missing = -(-most_slots // size) - len(known.blocks)
        while missing > self.pool.num_free:
            if not self._forget_oldest(keep):
                self.end(sequence)
                return None
        if missing > 0:
            added = self.pool.allocate(missing)
            self._tables.add(0, known.row, len(known.blocks), added)
            known.blocks += added
        ids = np.asarray(sequence.token_ids(first + 1, first + 1 + count), np.int32)
        rows = np.arange(chunk.first_row + skipped, chunk.first_row + chunk.num_tokens, dtype=np.int32)
        known.following = first + count
        return _Pass(known, ids, known.length, rows)

    def _begin(self, chunk: LeftChunk, keep: set[Sequence]) -> _Known | None:
        """A new sequence, with the cached pairs before the chunk; None if there is no row."""
        if not self._free_rows and not self._forget_oldest(keep):
            return None
        sequence = chunk.sequence
        pairs = _Pairs(sequence, self._drafting.pair_ahead)
        first = int(sequence.prefix_keys(0, 1)[0])
        known = _Known(self._free_rows.pop(), pairs, Chain(f"{sequence.chain.salt!r} {first}"))
        hit = self.pool.find(pairs.prefix_keys(0, chunk.start), known.chain.salt)
        shared = [block for block in hit.blocks[0] if block is not None]
        if shared:
            self.pool.share(shared)
            self._tables.add(0, known.row, 0, shared)
            known.blocks = shared
            known.length = known.following = len(shared) * self._block_size
        return known

    def _forget_oldest(self, keep: set[Sequence]) -> bool:
        """Free the pages of the sequence that was computed least recently; False if there is none."""
        oldest = next((sequence for sequence in self._known if sequence not in keep), None)
        if oldest is not None:
            self.end(oldest)
        return oldest is not None

    def _chunks_of(self, passes: list[_Pass]) -> PairChunks:
        """The pairs in the order of their sequences' rows."""
        return PairChunks(
            self._states,
            np.concatenate([one.rows for one in passes]),
            np.concatenate([one.token_ids for one in passes]),
            np.array([one.known.row for one in passes]),
            np.array([one.start for one in passes]),
            np.array([len(one.token_ids) for one in passes]),
        )

    def _note(self, passes: list[_Pass]) -> None:
        """Record that these pairs lie in their pages."""
        for one in passes:
            known = one.known
            known.length += len(one.token_ids)
            if known.is_whole:
                self.pool.record(known.chain, [known.blocks], [0], known.length, known.pairs)


def _of_text(chunks: Callable[[], list[LeftChunk]]) -> list[LeftChunk]:
    """The chunks of sequences without pictures, whose tokens have no pairs."""
    return [chunk for chunk in chunks() if chunk.sequence.request.pictures is None]
