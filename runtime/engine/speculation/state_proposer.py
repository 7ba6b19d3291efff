"""A drafter that reads hidden states at work (`models.drafters`): what each step leaves of the model's.

A pair is what it computes at once: token i + 1 of a sequence, and the model's hidden states at token i. It comes when
the step that computed token i is over, and its key and value go into pages of the drafter's own, one behind another.
The pair of a sequence's last token but one says the next token; from there on the drafter goes on with its own results,
for all sequences in batch, and draws as the model will, with the same noise.

Pages of pairs can be found by what they are made of, as the model's own are by their tokens: a sequence whose prefix
the model finds in its cache gets none of its hidden states, and takes over the pairs that another left. Where these are
gone, or steps came by unread, pairs are missing: it goes on without them, and those behind lie next to those before. It
knows less then, and is right less often; nothing else depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from models.drafters.hidden_state_drafter import HiddenStateDrafter
from runtime import ops
from runtime.engine.config import EngineLimits
from runtime.engine.scheduling.block_pool import BlockPool, Chain
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import NOTHING, Ids, LeftChunk, WantedStates
from runtime.engine.speculation.draws import draw_ahead
from runtime.engine.speculation.recorded_drafts import RecordedDrafts
from runtime.engine.steps.block_tables import BlockTables
from runtime.engine.steps.executor import KeptRows
from runtime.engine.steps.ragged import lay_out
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor


class _Pairs:
    """A sequence as the pool of pages reads it: its pairs by the tokens that they end with. See `TokenSource`."""

    __slots__ = ("sequence",)

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence

    def prefix_keys(self, start: int, end: int) -> Ids:
        return self.sequence.prefix_keys(start + 1, end + 1)


@dataclass(slots=True, eq=False)
class _Known:
    """What the drafter knows of a sequence.

    row        its row in the block tables
    pairs, chain  as the pool needs them
    blocks     its pages
    length     pairs that lie in them
    following  the place in the sequence of the next pair's hidden states
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
    """Tokens of a sequence that are computed next, from ``start`` of its pages on, behind the rows of hidden states."""

    known: _Known
    token_ids: Ids
    start: int
    rows: NDArray[np.int32]


class StateProposer:
    """See `StateDrafter`. Belongs to the engine's loop.

    drafter     on the engine's device
    limits      the engine's
    num_blocks  of its pages
    most        proposals for a sequence in a step
    """

    def __init__(self, drafter: HiddenStateDrafter, limits: EngineLimits, num_blocks: int, most: int) -> None:
        spec = drafter.kv_cache_spec(limits.block_size)
        self.name = drafter.kind
        self.wanted = WantedStates(drafter.layers, drafter.target.config.hidden_size, drafter.target.dtype)
        self._drafter = drafter
        self._limits = limits
        self._pages = KVCache(spec, num_blocks)
        self.pool = BlockPool(num_blocks, limits.block_size, enable_prefix_caching=limits.enable_prefix_caching)
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self._tables = BlockTables(1, limits.max_num_seqs, max_blocks, limits.block_size)
        self._recorded: RecordedDrafts | None = None
        if drafter.device.kind == "cpu" and limits.decode_graphs != "off":
            self._recorded = RecordedDrafts(drafter, self._pages, self._tables, limits, most)
        self._known: dict[Sequence, _Known] = {}  # the one that was computed last is the last
        self._states: tuple[Tensor, ...] = ()  # that the latest step left
        self._chunks: Callable[[], list[LeftChunk]] = list  # whose they are
        self._proposed: dict[Sequence, list[int]] = {}

    def follow(self, kept: KeptRows, chunks: Callable[[], list[LeftChunk]], *, pays: bool) -> None:
        """See `StateDrafter`. Chunks within prompts are computed at once, while that may pay; the others are, if
        proposals are asked for before the next step."""
        self._states, self._chunks, self._proposed = kept.tensors, chunks, {}
        if not pays:
            return
        left = chunks()
        self._chunks = lambda: left
        prompts: list[_Pass] = []
        keep = {chunk.sequence for chunk in left}
        for chunk in left:
            if chunk.start + chunk.num_tokens >= chunk.sequence.num_tokens - 1:
                continue
            before = self._known.get(chunk.sequence)
            if before is not None and chunk.start + chunk.num_tokens <= before.following:
                continue  # computed again by the model, after a preemption
            if (one := self._take(chunk, 0, keep)) is not None:
                prompts.append(one)
        if prompts:
            self._compute(prompts)

    def prepare(self, asked: list[tuple[Sequence, int]]) -> None:
        """See `BatchDrafter`."""
        self._proposed = {}
        keep = {sequence for sequence, _ in asked}
        left = {chunk.sequence: chunk for chunk in self._chunks()}
        self._chunks = list
        passes: list[_Pass] = []
        ready: list[tuple[Sequence, _Known, int]] = []  # with how many to propose
        for sequence, most in asked:
            chunk = left.get(sequence)
            if chunk is None or chunk.start + chunk.num_tokens != sequence.num_tokens - 1:
                continue
            one = self._take(chunk, most, keep)
            if one is not None:
                passes.append(one)
                ready.append((sequence, one.known, most))
        if not passes:
            return
        order = sorted(range(len(passes)), key=lambda i: passes[i].known.row)
        ready, passes = [ready[i] for i in order], [passes[i] for i in order]
        if self._recorded is not None and self._run_recorded(self._recorded, passes, ready):
            return
        normed, hidden = self._compute(passes)
        self._proposed = {sequence: [] for sequence, _, _ in ready}
        for ahead in range(self._limits.max_model_len):
            drawing = [sequence for sequence, _, _ in ready]
            drawn = draw_ahead(self._drafter.logits(normed), drawing, [ahead] * len(ready))
            going_on = []  # rows of those that draw further
            for i, ((sequence, _, most), token_id) in enumerate(zip(ready, drawn)):
                if token_id >= 0:
                    self._proposed[sequence].append(token_id)
                    if ahead + 1 < most:
                        going_on.append(i)
            if not going_on:
                break
            newest = np.array([drawn[i] for i in going_on], np.int32)
            ready = [ready[i] for i in going_on]
            if len(going_on) < len(drawn):
                hidden = self._rows_of(hidden, np.array(going_on, np.int32))
            rows = np.array([known.row for _, known, _ in ready])
            starts = np.array([known.length + ahead for _, known, _ in ready])
            normed, hidden = self._forward(newest, rows, starts, np.ones(len(ready), np.int64), hidden)

    def _run_recorded(
        self, recorded: RecordedDrafts, passes: list[_Pass], ready: list[tuple[Sequence, _Known, int]]
    ) -> bool:
        """All of it at once; False, before anything was done: it has to be done step by step."""
        found = recorded.run(
            self._states,
            np.concatenate([one.rows for one in passes]),
            np.concatenate([one.token_ids for one in passes]),
            np.array([one.known.row for one in passes]),
            np.array([one.start for one in passes]),
            np.array([len(one.token_ids) for one in passes]),
            [(sequence, most) for sequence, _, most in ready],
        )
        if found is None:
            return False
        self._note(passes)
        self._proposed = {sequence: ids for (sequence, _, _), ids in zip(ready, found, strict=True)}
        return True

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        ids = self._proposed.get(sequence)
        return (np.array(ids[:most], np.int32), 0) if ids else (NOTHING, 0)

    def end(self, sequence: Sequence) -> None:
        self._proposed.pop(sequence, None)
        known = self._known.pop(sequence, None)
        if known is not None:
            self.pool.release(known.blocks)
            self.pool.forget(known.chain)
            self._tables.clear(known.row)
            self._free_rows.append(known.row)

    def _take(self, chunk: LeftChunk, most: int, keep: set[Sequence]) -> _Pass | None:
        """The pairs of a chunk that are not known yet, at least the last, with pages for them and for ``most``
        proposals behind; None: there is no room for them."""
        sequence, size = chunk.sequence, self._limits.block_size
        known = self._known.pop(sequence, None) or self._begin(chunk, keep)
        if known is None:
            return None
        self._known[sequence] = known
        skipped = min(max(0, known.following - chunk.start), chunk.num_tokens - 1)
        first, count = chunk.start + skipped, chunk.num_tokens - skipped
        if first < known.following:  # known before: the same again
            known.length = max(0, known.length - (known.following - first))
        elif first > known.following:
            known.is_whole = False
        end = known.length + count
        most_slots = end + max(0, most - 1)
        if most_slots > self._drafter.max_positions:
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
        """A sequence that is new, with the pairs before the chunk that others left; None: there is no row."""
        if not self._free_rows and not self._forget_oldest(keep):
            return None
        sequence = chunk.sequence
        pairs = _Pairs(sequence)
        first = int(sequence.prefix_keys(0, 1)[0])
        known = _Known(self._free_rows.pop(), pairs, Chain(f"{sequence.chain.salt!r} {first}"))
        hit = self.pool.find(pairs.prefix_keys(0, chunk.start), known.chain.salt)
        shared = [block for block in hit.blocks[0] if block is not None]
        if shared:
            self.pool.share(shared)
            self._tables.add(0, known.row, 0, shared)
            known.blocks = shared
            known.length = known.following = len(shared) * self._limits.block_size
        return known

    def _forget_oldest(self, keep: set[Sequence]) -> bool:
        """Let the pages go of whoever was computed longest ago. False: there is nobody."""
        oldest = next((sequence for sequence in self._known if sequence not in keep), None)
        if oldest is not None:
            self.end(oldest)
        return oldest is not None

    def _compute(self, passes: list[_Pass]) -> tuple[Tensor, Tensor]:
        """Compute pairs, whose sequences' rows ascend or not. Of the last of each what `_forward` gives."""
        passes = sorted(passes, key=lambda one: one.known.row)
        states = self._drafter.fuse(
            [self._rows_of(each, np.concatenate([one.rows for one in passes])) for each in self._states]
        )
        counts = np.array([len(one.token_ids) for one in passes])
        normed, hidden = self._forward(
            np.concatenate([one.token_ids for one in passes]),
            np.array([one.known.row for one in passes]),
            np.array([one.start for one in passes]),
            counts,
            states,
        )
        self._note(passes)
        if counts.max() == 1:
            return normed, hidden
        last = (np.cumsum(counts) - 1).astype(np.int32)
        return self._rows_of(normed, last), self._rows_of(hidden, last)

    def _note(self, passes: list[_Pass]) -> None:
        """These pairs lie in their pages."""
        for one in passes:
            known = one.known
            known.length += len(one.token_ids)
            if known.is_whole:
                self.pool.record(known.chain, [known.blocks], [0], known.length, known.pairs)

    def _forward(
        self, token_ids: Ids, rows: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64],
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `HiddenStateDrafter.forward`."""
        layout = lay_out(token_ids, rows, starts, counts, self._tables, np.empty(0, np.int32))
        batch = layout.batch(self._drafter.device, exact=self._limits.exact)
        return self._drafter.forward(batch, hidden, self._pages)

    def _rows_of(self, x: Tensor, rows: NDArray[np.int32]) -> Tensor:
        (indices,) = ops.place([rows], self._drafter.device)
        return ops.gather_rows(x, indices)
