"""Forward passes outside the steps, over separate pages: for embeddings and for the logits of whole prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.engine.limits import EngineLimits
from runtime.engine.steps.encoder_passes import EncoderInputs, EncoderPasses, pages_of
from runtime.engine.steps.executor import BidirectionalModel, Model
from runtime.engine.steps.layout import BlockTables, lay_out
from runtime.engine.steps.pictures import PictureStore
from runtime.engine.steps.step_input import PassPictures
from runtime.tensor.tensor import Tensor

LOGITS_SLICE_ELEMENTS = 1 << 23
"""Most logits (float32 elements) held at once for log probabilities of prompts: 32 MiB."""


class PagedSidePass:
    """See `SidePass`. Prompts of ``lengths`` tokens, and the pages that their keys and values are written to.

    synchronize  waits until no step runs
    store        of the images' embeddings, if the model reads images
    bring_back   sends the last stage's hidden states to the first and waits for it; other stages return what they sent
    passes       the recorded ones of an encoder, if there are any
    """

    def __init__(
        self,
        model: Model,
        limits: EngineLimits,
        lengths: Sequence[int],
        synchronize: Callable[[], None],
        store: PictureStore | None = None,
        bring_back: Callable[[Tensor], Tensor] | None = None,
        passes: EncoderPasses | None = None,
    ) -> None:
        self._synchronize = synchronize
        self._bring_back = bring_back
        self._store = store
        self._model = model
        self._limits = limits
        self._lengths = tuple(lengths)
        self._states: list[tuple[int, int, list[int]]] = []
        self._passes = passes if passes is not None and passes.takes(lengths) else None
        if self._passes is None:
            self._reserve()

    def _reserve(self) -> None:
        """Makes the block tables, and pages but for those of recorded passes."""
        model, limits, lengths = self._model, self._limits, self._lengths
        spec = model.kv_cache_spec(limits.block_size) if self._passes is None else self._passes.spec
        size = limits.block_size
        num_blocks = [-(-length // size) for length in lengths]
        self._tables = BlockTables(len(spec.group_kinds), len(lengths), limits.table_width(max(lengths)), size)
        self._rows = np.arange(len(lengths))
        switch = limits.longrope_threshold
        self._rotary_offsets = np.array([switch if switch and length > switch else 0 for length in lengths], np.int64)
        num_used = [0] * len(spec.block_bytes)  # by pool
        for group, (pool, kind) in enumerate(zip(spec.group_pools, spec.group_kinds)):
            for row, count in enumerate(num_blocks):
                first = num_used[pool]
                if kind.follows_tokens:
                    self._tables.add(group, row, 0, range(first, first + count))
                else:  # a state is read from one page and written to the other, by turns
                    count = 2
                    self._states.append((group, row, [first, first + 1]))
                num_used[pool] += count
        self._pages = pages_of(model, spec, num_used) if self._passes is None else self._passes.pages

    def run(
        self, token_ids: Sequence[NDArray[np.int32]], starts: Sequence[int], pictures: PassPictures | None = None,
        types: Sequence[NDArray[np.int32] | None] = (), pooling: str = "",
    ) -> Tensor:  # fmt: skip
        self._synchronize()
        if self._passes is not None:
            found = self._passes.run_again(self._lengths, token_ids, types or [None] * len(token_ids), pooling)
            if found is not None:
                return found
            self._reserve()
        for group, row, pages in self._states:
            pages.reverse()
            self._tables.add(group, row, 0, pages)
        counts = np.array([len(ids) for ids in token_ids])
        no_logits = np.empty(0, np.int32)
        layout = lay_out(
            np.concatenate(token_ids), self._rows, np.array(starts), counts, self._tables, no_logits,
            self._rotary_offsets,
        )  # fmt: skip
        inputs = None
        if isinstance(self._model, BidirectionalModel):
            assert not any(starts), "an encoder's prompt is one chunk"
            inputs = encoder_inputs(self._model.windows, counts, types)
            if self._passes is not None:
                return self._passes.run(self._lengths, layout, inputs, pooling)
        batch = layout.batch(self._model.device, exact=self._limits.exact)
        if pictures is not None:
            assert self._store is not None, "pictures were encoded"
            self._store.complete(batch, pictures)
        if inputs is not None:
            inputs.give(batch)
        hidden = self._model.forward(batch, self._pages)
        return hidden if self._bring_back is None else self._bring_back(hidden)


def encoder_inputs(
    windows: Sequence[int | None], counts: NDArray[np.int64], types: Sequence[NDArray[np.int32] | None]
) -> EncoderInputs:
    """The ends that tokens of texts with so many tokens see, and their types (0 without `types`)."""
    ends, own = np.repeat(counts, counts), np.concatenate([np.arange(count) for count in counts])
    until = {window: ends if window is None else np.minimum(ends, own + window) for window in windows}
    given = [np.zeros(count, np.int32) if each is None else each for count, each in zip(counts, types)]
    of_types = np.concatenate(given) if given else np.zeros(len(own), np.int32)
    return EncoderInputs({window: each.astype(np.int32) for window, each in until.items()}, of_types)


def slices(vocab_size: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Rows from ``first`` to ``end`` in parts with a bounded number of logits each."""
    num_rows = max(1, LOGITS_SLICE_ELEMENTS // vocab_size)
    for row in range(first, end, num_rows):
        yield row, min(row + num_rows, end)
