"""What the engine needs of whoever runs its steps, and what that needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Batch
from runtime.device.device import Device
from runtime.dtype import DType
from runtime.engine.steps.drawn import Drawn as Drawn
from runtime.engine.steps.step_input import PassPictures, StepInput
from runtime.errors import XservError
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.rank_notices import Span, Tally
from runtime.tensor.tensor import Tensor


class UnsupportedStepError(XservError):
    """A step asks for what its executor's model cannot do; the message names the field."""


class ExecutorLostError(XservError):
    """The executor can run no step any more; the message says why."""


class Model(Protocol):
    """What an executor needs of a model; ``models.base.Model`` is one."""

    @property
    def device(self) -> Device: ...

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec: ...

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """``[num_tokens, hidden_size]`` float32. By operations of ``runtime.ops`` alone: unless ``decode_graphs`` is
        "off" they may not have been done yet when they return, so that nobody may look into a tensor."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[n, hidden_size]`` → ``[n, vocab_size]`` float32."""
        ...


class SidePass(Protocol):
    """Prompts that are computed beside the steps."""

    def run(
        self, token_ids: Sequence[NDArray[np.int32]], starts: Sequence[int], pictures: PassPictures | None = None
    ) -> Tensor:
        """The hidden states ``[num_tokens, hidden_size]`` of the tokens at ``starts`` of each prompt, all before which
        were computed. Waits until no step runs. ``pictures``: of the only prompt."""
        ...


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Hidden states that a step left: until the next step is started.

    number   of the step
    tensors  of each layer that is kept, ``[rows, hidden_size]``
    first    [n]: the row of each chunk's first token; its others follow
    """

    number: int
    tensors: tuple[Tensor, ...]
    first: NDArray[np.int64] | NDArray[np.intp]


class DrawMasks(Protocol):
    """The masks of a step's draws that are under a grammar: computed beside the step, and sent behind it."""

    def wait(self) -> tuple[NDArray[np.intp], NDArray[np.uint32], list[int]]:
        """Those draws ``[m]``; the ids that each allows, ``[m, words]``, bit ``t % 32`` of word ``t // 32``; and draws
        that have none, since their grammar failed."""
        ...


class Computation(Protocol):
    """A step under way.

    started_s  when all was ready and its computation began, of ``time.monotonic()``
    """

    @property
    def started_s(self) -> float: ...

    def result(self) -> Drawn:
        """Waits for it. Raises what the model raised."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """What was done of a picture.

    is_made   that was all of it: steps may name its slot
    num_rows  that were computed
    seconds   that the host was busy
    """

    is_made: bool
    num_rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Decode graphs that are recorded, the device's memory that all recordings hold, steps that decode graphs have run,
    and recordings that failed; recorded passes of other steps, and those steps."""

    num_graphs: int = 0
    size_bytes: int = 0
    num_steps: int = 0
    num_failed: int = 0
    num_forwards: int = 0
    num_forward_steps: int = 0


class Executor(Protocol):
    """Runs steps over rows, KV pages and host pages of its own. Belongs to the engine's loop; results are asked for in
    the order of the steps.

    depth       steps that may be open, each with sequences of its own: started, and their results not asked for
    overlaps    whether ``start`` returns while the step runs, so that the next one is best planned meanwhile
    num_groups  KV cache groups
    """

    @property
    def depth(self) -> int: ...

    @property
    def overlaps(self) -> bool: ...

    @property
    def num_groups(self) -> int: ...

    def start(
        self, step: StepInput, masks: DrawMasks | None = None,
        proposed: Sequence[NDArray[np.float32] | None] | None = None,
    ) -> Computation:  # fmt: skip
        """Move blocks, write rows, and begin the computation. Raises UnsupportedStepError before anything was
        done, and where blocks could not be moved: pages are in doubt then. What else fails, the computation's result
        raises. An executor of several ranks raises ExecutorLostError, here as elsewhere, when one of them fails.
        ``proposed``: of each chunk that draws, the probabilities ``[proposals, vocab_size]`` that its proposals were
        drawn by, where rejection sampling shall keep them; one of ranks takes none."""
        ...

    def can_lead(self, step: StepInput) -> bool:
        """Whether the step may be started while the one before it runs, though both have the same rows."""
        ...

    def keep_layers(self, layers: tuple[int, ...], width: int, dtype: DType) -> None:
        """Keep the hidden states ``[num_tokens, width]`` of each step's tokens behind these layers, counted from 1 (0:
        the embeddings), which are of this type. To be called before the first step. Raises UnsupportedStepError where
        the model's layers are not told apart."""
        ...

    @property
    def kept_rows(self) -> KeptRows | None:
        """What the step that was over last left of them; None: nothing."""
        ...

    def record(self) -> None:
        """Make the recording that the last step lacked, if there is one; to be called between two steps."""
        ...

    def start_encoding(self, slot: int, patches: NDArray[np.uint8], grid: tuple[int, int]) -> None:
        """Begin to encode a picture of ``grid`` rows and columns of ``patches [rows * columns, patch_bytes]`` into a
        slot that is free. Raises UnsupportedStepError where the model reads none, and what the model raises."""
        ...

    def encode(self, slot: int, num_rows: int) -> Encoded:
        """Compute pieces of the picture that have so many rows together, at least one; a row counts twice in each
        layer."""
        ...

    def drop_encoded(self, slot: int) -> None:
        """The slot is free again. No step that is still to be started names it."""
        ...

    def side_pass(self, lengths: Sequence[int]) -> SidePass:
        """Forward passes over pages of their own, for prompts of these lengths."""
        ...

    def logits(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The logits after each of ``token_ids [num_tokens]``: ``[num_tokens, vocab_size]``."""
        ...

    def take_timed(self) -> tuple[int, float]:
        """Blocks and seconds of the swaps that are over and were not given here before."""
        ...

    def graph_stats(self) -> GraphStats:
        """Thread-safe."""
        ...

    def tallies(self) -> list[Tally]:
        """What each of several ranks has done. Thread-safe."""
        ...

    def spans(self, rank: int, num_known: int) -> tuple[int, list[Span]]:
        """See `RankCommunicator.spans`; of several ranks. Thread-safe."""
        ...

    def close(self) -> None:
        """Wait until no step runs, and run none any more."""
        ...
