"""The engine's interface to the executor of its steps, and the executor's to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import Batch, LongChunks
from runtime.device.device import Device
from runtime.dtype import DType
from runtime.engine.steps.step_input import PassPictures, Sampled, StepInput
from runtime.engine.weights.commands import WeightSource
from runtime.errors import XservError
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.linear.adapter_pairs import Change
from runtime.linear.low_rank import LowRankMaps
from runtime.pooling import PoolingTask
from runtime.rank_notices import Span, Tally
from runtime.tensor.tensor import Tensor


class UnsupportedStepError(XservError):
    """The executor's model does not support the step; the message names the field."""


class ExecutorLostError(XservError):
    """The executor can run no step any more; the message has the reason."""


class Model(Protocol):
    """The executor's interface to a model; ``models.base.Model`` implements it."""

    @property
    def device(self) -> Device: ...

    @property
    def gives_last_rows(self) -> bool:
        """Whether `forward` gives the rows of last tokens alone where no others are wanted."""
        ...

    @property
    def suppressed_ids(self) -> Tensor | None:
        """Ids that are never sampled, int32 ``[n]``."""
        ...

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec: ...

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """``[num_tokens, hidden_size]`` float32. Uses operations of ``runtime.ops`` alone; unless ``decode_graphs`` is
        "off" they may be deferred until after they return, so tensors must not be read here."""
        ...

    def compute_logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """``[n, hidden_size]`` → ``[n, vocab_size]`` float32; ``adapters [n]`` as in `Batch`."""
        ...

    def head(self, task: PoolingTask, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `Executor.head`."""
        ...


@runtime_checkable
class BidirectionalModel(Protocol):
    """A model whose tokens see later ones, too: `models.encoder.Encoder`."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of its layers, in tokens on each side, a token's own included."""
        ...

    def needs_pages(self, page_dtype: DType) -> bool:
        """Whether any layer writes to pages of this type. If none does, one page is enough."""
        ...


@runtime_checkable
class ExpandingModel(Protocol):
    """A model with latent attention, which expands the rows of long chunks' sequences."""

    def long_chunks(self, contexts: Sequence[int], counts: Sequence[int]) -> LongChunks:
        """Those of a step, of chunks after so many tokens each."""
        ...


class WeightLoader(Protocol):
    """Reads the weights of a rank's part of a model: `runtime.engine.weights.loader`."""

    def declared(self) -> Model:
        """The model without its numbers, which cannot run."""
        ...

    def load(self, source: WeightSource) -> Model:
        """The model with other numbers. Raises ``ModelLoadError``, ``RequestError`` and ``OutOfMemoryError``."""
        ...

    def take_over(self) -> None:
        """The model that was loaded last serves: `reload` gives its numbers."""
        ...

    def keep(self) -> None:
        """Copy the numbers of the model that serves, as far as its files have them as a GPU does, into pinned memory,
        which `reload` reads. They are kept until others serve."""
        ...

    def forget(self) -> None:
        """Keep no copy of any numbers."""
        ...

    def reload(self) -> Model:
        """The model that serves, read again. Raises as `load`, and ``RequestError`` if its numbers are not to be had,
        or are others by now."""
        ...


def logits_to_sample(model: Model, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
    """`Model.compute_logits`, with minus infinity for the ids that are never sampled: log probabilities of sampled
    tokens are those among the others."""
    logits = model.compute_logits(hidden) if adapters is None else model.compute_logits(hidden, adapters)
    if model.suppressed_ids is not None and logits is not None:
        ops.forbid(logits, model.suppressed_ids)
    return logits


class SidePass(Protocol):
    """Forward passes over prompts outside the steps."""

    def run(
        self, token_ids: Sequence[NDArray[np.int32]], starts: Sequence[int], pictures: PassPictures | None = None,
        types: Sequence[NDArray[np.int32] | None] = (),
    ) -> Tensor:  # fmt: skip
        """The hidden states ``[num_tokens, hidden_size]`` of the tokens at ``starts`` of each prompt, all before which
        were computed. Waits until no step runs. ``pictures`` belong to the only prompt. ``types`` of each prompt's
        tokens are read by encoders; None: all 0."""
        ...


@dataclass(frozen=True, slots=True)
class AuxiliaryHiddenStates:
    """Hidden states that a step left, valid until the next step starts.

    number   of the step
    tensors  of each kept layer, ``[rows, hidden_size]``
    last     [n]: the row of each chunk's last token; its others are before it, unless they were not wanted
    """

    number: int
    tensors: tuple[Tensor, ...]
    last: NDArray[np.int64] | NDArray[np.intp]


class DrawMasks(Protocol):
    """The grammar masks of a step's samples: computed during the step, and sent after it."""

    def wait(self) -> tuple[NDArray[np.intp], NDArray[np.uint32], list[int]]:
        """The constrained samples ``[m]``; the ids that each allows, ``[m, words]``, bit ``t % 32`` of word
        ``t // 32``; and the samples without a mask, since their grammar failed."""
        ...


class Computation(Protocol):
    """A running step.

    started_s  when its inputs were ready and its computation began, of ``time.monotonic()``
    """

    @property
    def started_s(self) -> float: ...

    def result(self) -> Sampled:
        """Waits for it. Raises the model's errors."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """The progress of encoding an image.

    is_made   the image is complete: steps may use its slot
    num_rows  computed rows
    seconds   the host's time
    """

    is_made: bool
    num_rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Recorded decode graphs, device memory of all recordings, steps run from decode graphs, and failed recordings;
    recorded passes of other steps, and steps run from them."""

    num_graphs: int = 0
    size_bytes: int = 0
    num_steps: int = 0
    num_failed: int = 0
    num_forwards: int = 0
    num_forward_steps: int = 0


class Executor(Protocol):
    """Runs steps over rows, KV pages and host pages of its own. Belongs to the engine's loop; results are read in the
    order of the steps.

    depth             steps that may be open (started, and their results not read), each with its own sequences
    overlaps          whether ``start`` returns while the step runs, so that the next one should be planned meanwhile
    num_groups        KV cache groups
    takes_any_thread  whether another thread may run a pass while no step is open: not with a GPU or other ranks
    """

    @property
    def depth(self) -> int: ...

    @property
    def overlaps(self) -> bool: ...

    @property
    def num_groups(self) -> int: ...

    @property
    def takes_any_thread(self) -> bool: ...

    def start(
        self, step: StepInput, masks: DrawMasks | None = None,
        proposed: Sequence[NDArray[np.float32] | None] | None = None,
    ) -> Computation:  # fmt: skip
        """Move blocks, write rows, and start the computation. Raises UnsupportedStepError before any work, and an error
        if blocks could not be moved, which leaves pages in doubt. Other errors come from the computation's result. An
        executor of several ranks raises ExecutorLostError, in all methods, when one of them fails. ``proposed`` has,
        for each chunk that samples, the distributions ``[proposals, vocab_size]`` of its draft tokens, if rejection
        sampling is to verify them; not supported with several ranks."""
        ...

    def write_adapter(self, slot: int, pairs: Mapping[str, Change]) -> None:
        """Write an adapter's pairs to a slot of the model's maps, after the open steps, none of which reads it."""
        ...

    @property
    def adapters(self) -> LowRankMaps | None:
        """The slots of the model that runs, all of them empty after `use_weights` and `reload_weights`; or None."""
        ...

    def load_weights(self, source: WeightSource) -> None:
        """Read other weights beside those that run, between two steps; they replace those that were read before and are
        not used. Raises as `WeightLoader.load`, and nothing has changed then."""
        ...

    def drop_loaded(self) -> None:
        """Forget the weights that were read and are not used."""
        ...

    def use_weights(self) -> None:
        """Run later steps on the weights that were read last. As for the following methods, no step is open, and no
        row, page, image or recording is used again."""
        ...

    def free_memory(self, *, weights: bool) -> None:
        """Let go of the pages, or of the weights and what drafters keep of layers: no step may be started."""
        ...

    def keep_weights(self) -> None:
        """See `WeightLoader.keep`."""
        ...

    def forget_kept_weights(self) -> None:
        """See `WeightLoader.forget`."""
        ...

    def reload_weights(self) -> None:
        """Read the weights again after `free_memory`. Raises as `WeightLoader.reload`."""
        ...

    def allocate_pages(self) -> None:
        """Allocate the pages again after `free_memory`. Raises ``OutOfMemoryError``."""
        ...

    def can_overlap(self, step: StepInput) -> bool:
        """Whether the step may be started while the previous one runs, though both have the same rows."""
        ...

    def keep_layers(self, layers: tuple[int, ...], width: int, dtype: DType, *, of_last: bool) -> None:
        """Keep the hidden states ``[num_tokens, width]`` of each step's tokens after these layers, counted from 1 (0:
        the embeddings), of this type; with ``of_last``, of chunks without draft tokens the last tokens' may be enough.
        To be called before the first step. Raises UnsupportedStepError if the model does
        not expose its layers."""
        ...

    @property
    def auxiliary_hidden_states(self) -> AuxiliaryHiddenStates | None:
        """The kept hidden states of the step that was over last, or None."""
        ...

    def record(self) -> None:
        """Make the recording that the last step lacked, if there is one; to be called between two steps."""
        ...

    def expect(self, seq_len: int) -> None:
        """While the engine is idle: prepare steps like the latest for sequences of this length, of at most the model's.
        It may do nothing."""
        ...

    def start_encoding(self, slot: int, patches: NDArray[np.uint8], grid: tuple[int, int], adapter: int = -1) -> None:
        """Begin to encode an image of ``grid`` rows and columns of ``patches [rows * columns, patch_bytes]`` into a
        free slot, with the adapter that lies in this slot of adapters, or -1. Raises UnsupportedStepError if the model
        reads no images, and the model's errors."""
        ...

    def encode(self, slot: int, num_rows: int) -> Encoded:
        """Compute pieces of the image with so many rows together, at least one; a row counts twice in each layer."""
        ...

    def drop_encoded(self, slot: int) -> None:
        """Free the slot. No step that is still to be started may use it."""
        ...

    def head(self, task: PoolingTask, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        """The result of the task for a pooled row ``[hidden_size]``, or for each of several, by the model's head."""
        ...

    def pooled(
        self, token_ids: Sequence[NDArray[np.int32]], types: Sequence[NDArray[np.int32] | None], pooling: str
    ) -> NDArray[np.float32] | None:
        """The rows ``[n, hidden_size]`` of whole prompts by one pooling, as a `SidePass` computes the hidden states;
        None if only such a pass takes them."""
        ...

    def pooling_pass(self, lengths: Sequence[int]) -> SidePass:
        """Forward passes over separate pages, for prompts of these lengths."""
        ...

    def logits(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The logits after each of ``token_ids [num_tokens]``: ``[num_tokens, vocab_size]``."""
        ...

    def take_timed(self) -> tuple[int, float]:
        """Bytes and seconds of the swaps that have finished since the last call."""
        ...

    def graph_stats(self) -> GraphStats:
        """Thread-safe."""
        ...

    def tallies(self) -> list[Tally]:
        """The progress of each of several ranks. Thread-safe."""
        ...

    def spans(self, rank: int, num_known: int) -> tuple[int, list[Span]]:
        """See `RankCommunicator.spans`; of several ranks. Thread-safe."""
        ...

    def close(self) -> None:
        """Wait until no step runs, and run none any more."""
        ...
