"""One step, and its sampled tokens, as values: plain numbers and arrays that msgspec can send. No kernels are imported.

The engine makes it of the scheduler's plan (`assemble`); an `Executor` runs it and needs nothing else. An executor's
state between steps is kept by row: a row's block tables, its last token, its sampling parameters. A step carries the
changes. Arrays are read only.
"""

from __future__ import annotations

from typing import Any, Literal, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.engine.dry import NO_BREAKERS, DryBreakers
from runtime.engine.messages import ErrorCode, TokenLogprobs
from runtime.engine.reasoning_budget import ReasoningBudget

LAST_TOKEN = -1
"""In ``token_ids``: the last token of the row, from its load or from the latest step that has the row."""

Mode = Literal["eager", "replay", "record"]
"""How the model's operations run: eagerly; as a recording, if one fits; or as a recording that is made after the step
if it is missing. Every rank of an executor gets the same mode."""


class RowLoad(msgspec.Struct, kw_only=True, gc=False):
    """A row belongs to another sequence from this step on.

    numbers         the parameters of ``runtime.sampling_table``, by name
    last_token_id   the last of its known tokens
    num_prompt_tokens  its output begins after them
    rotary_offset   rotary position minus KV position, if the step has no ``rotary_positions``
    logprobs        alternatives in each sampled token's log probabilities; None for no log probabilities
    logprob_ids     the ids whose log probabilities are wanted instead of the most probable ones
    prompt_ids      each id of the prompt once, if penalties count them
    output_ids      the output so far, if penalties, bad words, DRY or logits processors depend on it
    bias_ids, bias_values  logit bias
    min_tokens      outputs before which none of ``end_ids`` may be sampled
    bad_words       the last id of each may not be sampled after the others
    allowed_ids     the only ids that may be sampled, or None for all
    reasoning_budget  forces the tokens that end the reasoning
    stages          the row's chain of samplers (`numba_kernels.sampler_chain`), empty for the usual ones
    mirostat_mu     mirostat's mu after the tokens so far
    dry_prompt_ids  the prompt, if DRY looks for repetitions, with ``dry_breakers``
    processed_prompt_ids  the prompt, if the engine has logits processors, with the request's ``extra_args``
    has_masks       each sample has a mask of a grammar, which is sent with the step
    row_numbers     of the batch's fields that have a number for each sequence, by name
    """

    row: int
    seed: int
    choice_index: int
    num_prompt_tokens: int
    last_token_id: int
    numbers: dict[str, float]
    rotary_offset: int = 0
    logprobs: int | None = None
    logprob_ids: list[int] = []
    prompt_ids: NDArray[np.int32] | None = None
    output_ids: NDArray[np.int32] | None = None
    bias_ids: list[int] = []
    bias_values: list[float] = []
    min_tokens: int = 0
    end_ids: list[int] = []
    bad_words: list[list[int]] = []
    allowed_ids: list[int] | None = None
    reasoning_budget: ReasoningBudget | None = None
    stages: tuple[int, ...] = ()
    mirostat_mu: float = 0.0
    dry_prompt_ids: NDArray[np.int32] | None = None
    dry_breakers: DryBreakers = NO_BREAKERS
    processed_prompt_ids: NDArray[np.int32] | None = None
    extra_args: dict[str, Any] | None = None
    has_masks: bool = False
    row_numbers: dict[str, int] = {}


class BlockAddition(msgspec.Struct, array_like=True, gc=False):
    """The blocks from entry ``first`` on of a row's table in one KV cache group."""

    group: int
    row: int
    first: int
    block_ids: list[int]


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """The tokens from ``first`` on of the step's row of tokens predict ``targets``; each gets ``num_alternatives``
    alternatives."""

    first: int
    targets: NDArray[np.int32]
    num_alternatives: int


class FeatureSpan(msgspec.Struct, array_like=True, gc=False):
    """The embeddings of ``count`` tokens from ``first_token`` on are an encoder's output in ``slot``, rows from
    ``first_row`` on."""

    slot: int
    first_row: int
    first_token: int
    count: int


class UncutSpan(msgspec.Struct, array_like=True, gc=False):
    """``count`` tokens from ``first_token`` on that have to be in one chunk."""

    first_token: int
    count: int


class StepInput(msgspec.Struct, kw_only=True):
    """A step of ``n`` chunks, one a row, ``num_tokens`` tokens in all. Executed in the order ``swap_out``, ``swap_in``,
    ``copies``, ``loads``, ``additions``, chunks.

    number        of the step
    rows          [n] int64, ascending
    starts        [n] int64, the first position of each chunk, in the KV cache
    counts        [n] int64, its tokens
    num_samples   [n] int64: how many of its last tokens are sampled after. If several, all but the first of
                  those tokens are draft tokens, kept as far as the samples before them agree.
    token_ids     [num_tokens] int32, or `LAST_TOKEN`
    mode          see `Mode`
    additions     missing entries of block tables
    loads         new rows
    swap_out      (block, host slot)
    swap_in       (host slot, block)
    copies        (source block, target block)
    prompt_logprobs  requested log probabilities of prompts
    rotary_positions  [3, num_tokens] int32, or None for the KV positions and each row's offset
    features      embeddings that come from an encoder
    bidirectional_spans   tokens that attend to each other
    numbers       [n] of the batch's fields that have a number for each chunk, by name
    """

    number: int
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    num_samples: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    mode: Mode = "eager"
    additions: list[BlockAddition] = []
    loads: list[RowLoad] = []
    swap_out: list[tuple[int, int]] = []
    swap_in: list[tuple[int, int]] = []
    copies: list[tuple[int, int]] = []
    prompt_logprobs: list[PromptLogprobs] = []
    rotary_positions: NDArray[np.int32] | None = None
    features: list[FeatureSpan] = []
    bidirectional_spans: list[UncutSpan] = []
    numbers: dict[str, NDArray[np.int64]] = {}

    def goes_on(self, before: StepInput) -> bool:
        """Whether it decodes the same rows as the previous step, and differs only in number, starts and additions."""
        return (
            self.rows is before.rows
            and self.counts is before.counts
            and self.num_samples is before.num_samples
            and self.token_ids is before.token_ids
            and self.mode == before.mode
            and not (
                self.loads
                or self.has_transfers
                or self.prompt_logprobs
                or self.has_pictures
                or self.bidirectional_spans
            )
            and not self.numbers
        )

    def next(self, number: int, starts: NDArray[np.int64], additions: list[BlockAddition]) -> StepInput:
        """The step after this one that `goes_on`."""
        return StepInput(
            number=number, rows=self.rows, starts=starts, counts=self.counts, num_samples=self.num_samples,
            token_ids=self.token_ids, mode=self.mode, additions=additions,
        )  # fmt: skip

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def has_transfers(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)

    @property
    def has_pictures(self) -> bool:
        """Whether it has image tokens, or tokens before some."""
        return self.rotary_positions is not None or bool(self.features)

    @property
    def are_decodes(self) -> bool:
        """Whether each chunk is one token, after which one is sampled."""
        num_seqs = len(self.rows)
        return len(self.token_ids) == num_seqs == np.count_nonzero(self.num_samples)

    @property
    def draws_everywhere(self) -> bool:
        """Whether it samples after each token, and some chunk has several: decodes with drafts."""
        counts, num_samples = self.counts, self.num_samples
        return len(self.token_ids) > len(counts) and (counts is num_samples or bool((counts == num_samples).all()))


class PassPictures(msgspec.Struct, array_like=True, gc=False):
    """The same for a pass outside the steps: for one prompt's tokens from ``start`` on."""

    start: int
    count: int
    rotary_positions: NDArray[np.int32] | None
    features: list[FeatureSpan]
    bidirectional_spans: list[UncutSpan]

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.array([self.start])

    @property
    def counts(self) -> NDArray[np.int64]:
        return np.array([self.count])


class Sampled(msgspec.Struct, kw_only=True):
    """A step's sampled tokens, in the order of its chunks.

    counts           tokens of each chunk that samples: at least 1, at most its samples; None means one each
    is_valid         False if the logits held NaN or allowed no token, or the row's parameters failed. With several
                     samples a chunk's last one may be so.
    broken           tokens of rows whose parameters failed
    failures         code and reason of tokens whose logits processors failed, by their index
    logprobs         an entry a token, None if its row did not request any; None if no row did
    mus              mirostat's mu after each token; None if no row has a chain
    prompt_logprobs  entries for each of the step's ``prompt_logprobs``
    """

    token_ids: list[int] = []
    is_valid: list[bool] = []
    counts: list[int] | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    mus: list[float] | None = None
    prompt_logprobs: list[list[TokenLogprobs]] = []
    broken: list[int] = []
    failures: dict[int, tuple[ErrorCode, str]] = {}


def encode(step: StepInput) -> bytes:
    """The step as MessagePack."""
    return _ENCODER.encode(step)


def decode(data: bytes) -> StepInput:
    """Raises msgspec.DecodeError, msgspec.ValidationError."""
    return _DECODER.decode(data)


def from_array(value: object) -> object:
    """An array as msgspec sends it: its type, shape and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    raise NotImplementedError(f"a step holds no {type(value).__name__}")


def to_array(kind: Any, value: Any) -> NDArray[Any]:
    """The inverse of `from_array`."""
    if get_origin(kind) is not np.ndarray:
        raise NotImplementedError(f"a step holds no {kind}")
    dtype, shape, data = value
    array = np.frombuffer(data, dtype).reshape(shape)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"a step holds no arrays of {array.dtype}")
    return array


_ENCODER = msgspec.msgpack.Encoder(enc_hook=from_array)
_DECODER = msgspec.msgpack.Decoder(StepInput, dec_hook=to_array)
