"""One request's sampling parameters, with vLLM's names, defaults and meanings.

A ``SamplingParams`` is checked when it is made (types, ranges, NaN) and again at admission against the model
(``validate``: token ids within the vocabulary, lengths). Every error is a ``RequestError`` that names the field, the
value and the limit. Text is not handled here: ``stop`` strings are matched in ``runtime.text``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from numba_kernels.sampler_chain import GREEDY_BELOW, IS_MIROSTAT, STAGES, USUAL_STAGES
from runtime.engine.checks import is_integer, is_number
from runtime.engine.dry import NO_BREAKERS, DryBreakers
from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.structured_outputs import StructuredOutputsParams
from runtime.engine.option_names import KnownOptions
from runtime.engine.reasoning_budget import ReasoningBudget
from runtime.engine.samplers import checked_breakers, checked_samplers
from runtime.sampling_table import COLUMNS, DEFAULTS, PENALTIES, SamplingNumbers

MAX_N = 128
"""Most choices of one request."""
MAX_LOGPROBS = 20
"""Most alternatives beside each token (vLLM's default for ``max_logprobs``)."""
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
"""Bounds of ``stop``: how many strings, and how many characters each."""
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
"""Bounds of ``bad_words_token_ids``: how many sequences, and how many ids each."""


class RequestOutputKind(Enum):
    """The content of each output of a stream: all so far, what is new, or all at the end and nothing before."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


if TYPE_CHECKING:  # the table's module may not import msgspec, since every command's help reads it

    class _Numbers(SamplingNumbers, msgspec.Struct, frozen=True, kw_only=True): ...
else:
    _Numbers = msgspec.defstruct(
        "_Numbers",
        [(name, column.kind, DEFAULTS[name]) for name, column in COLUMNS.items()],
        frozen=True,
        kw_only=True,
    )


class SamplingParams(_Numbers, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=KnownOptions):
    """Sampling parameters of one request: the numbers of ``runtime.sampling_table``, ``temperature`` to
    ``dry_penalty_last_n``, with their meanings and bounds, and

    n                       choices to generate, 1 … 128; choice ``i`` is sampled with ``(seed, i)``
    seed                    a sample depends on seed, choice index and output position only; None for a random seed
    stop, stop_token_ids    strings in the content, and token ids, that end a choice ("stop")
    ignore_eos              the model's end-of-sequence ids do not end a choice
    min_tokens, max_tokens  output tokens; ``max_tokens=None`` or -1 allows all up to the context's end
    logprobs                alternatives beside each token, 0 … 20, as ``logprobs_mode`` says
    prompt_logprobs         the same for the prompt's tokens
    truncate_prompt_tokens  ``LLM`` keeps so many of the prompt's last tokens; -1: as many as leave the answer room
    detokenize              if False, no text is made (stop strings are then refused)
    skip_special_tokens     special tokens leave no text
    include_stop_str_in_output  the matched stop string (or stop token's text) stays in the text
    logit_bias              token id → number in [-100, 100] added to its logit
    allowed_token_ids       only these ids can be sampled
    logprob_token_ids       log probabilities of these ids, in this order, instead of the most probable ones
    bad_words               texts whose tokens the output will not hold; ``LLM`` makes ``bad_words_token_ids`` of them
    bad_words_token_ids     the same as token ids
    grammar                 a constraint on the text; it ends ("stop") when nothing can follow
    reasoning_budget        most tokens of reasoning
    samplers                llama.cpp's names of samplers, in their order; others are off
    temperature_last        the temperature acts after the filters, as in llama.cpp
    dry_sequence_breakers   texts that DRY's repetitions do not reach over; ``LLM`` makes ``dry_breakers`` of them
    dry_breakers            the same as token ids
    structured_outputs      a ``grammar`` in vLLM's form
    extra_args              a dict of JSON's types for the engine's logits processors
    output_kind             the content of each output of ``AsyncLLM.generate``; ``LLM`` gives whole answers alone

    Raises ``UnknownOptionError``, ``RequestError``.
    """

    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    grammar: Grammar | None = None
    reasoning_budget: ReasoningBudget | None = None
    samplers: list[str] | None = None
    temperature_last: bool = False
    dry_sequence_breakers: list[str] | None = None
    dry_breakers: DryBreakers | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._integer("n", 1, MAX_N)
        for name, column in COLUMNS.items():
            if column.kind is int:
                self._integer(name, int(column.low), int(column.high))
            else:
                self._number(name, column.low, column.high, low_open=column.is_low_open)
        self._integer("seed", -(2**63), 2**63 - 1, optional=True)
        self._max_tokens()
        self._integer("min_tokens", 0, 2**31 - 1)
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("truncate_prompt_tokens", -1, 2**31 - 1, optional=True)
        check_truncation(self.truncate_prompt_tokens)
        for name in (
            "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "temperature_last"
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be a bool, got {getattr(self, name)!r}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}",
                param="min_tokens",
            )
        self._stop_strings()
        self._token_ids("stop_token_ids")
        self._token_ids("allowed_token_ids")
        self._token_ids("logprob_token_ids")
        for name in ("allowed_token_ids", "logprob_token_ids"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise RequestError(f"{name} must not be empty", param=name)
        if self.logprob_token_ids is not None and self.logprobs:
            raise RequestError(
                f"logprobs must be 0 or None beside logprob_token_ids, got {self.logprobs}", param="logprobs"
            )
        if self.logprob_token_ids is not None:
            self._set("logprobs", 0)
        self._logit_bias()
        self._bad_words()
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(f"grammar must be a Grammar or None, got {self.grammar!r:.80}", param="grammar")
        if self.reasoning_budget is not None and not isinstance(self.reasoning_budget, ReasoningBudget):
            problem = f"reasoning_budget must be a ReasoningBudget or None, got {self.reasoning_budget!r:.80}"
            raise RequestError(problem, param="reasoning_budget")
        self._structured_outputs()
        if self.mirostat == 1:
            raise RequestError("mirostat must be 0 or 2, got 1: version 1 is not built", param="mirostat")
        self._set("samplers", checked_samplers(self.samplers, is_last=self.temperature_last))
        self._set("dry_sequence_breakers", checked_breakers(self.dry_sequence_breakers))
        if self.dry_breakers is not None and not isinstance(self.dry_breakers, DryBreakers):
            problem = f"dry_breakers must be DryBreakers or None, got {self.dry_breakers!r:.80}"
            raise RequestError(problem, param="dry_breakers")
        self._extra_args()
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(
                f"output_kind must be a RequestOutputKind, got {self.output_kind!r:.80}", param="output_kind"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list, empty if there is none."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def has_penalties(self) -> bool:
        numbers = self.numbers
        return any(numbers[name] != neutral for name, neutral in PENALTIES.items())

    @property
    def has_dry(self) -> bool:
        """Whether DRY looks for repetitions."""
        return self.dry_multiplier != 0.0 and self.dry_penalty_last_n != 0 and _names(self.samplers, "dry")

    @property
    def stages(self) -> tuple[int, ...]:
        """The chain of samplers (`numba_kernels.sampler_chain`); empty for vLLM's usual ones."""
        ordered = list(STAGES) if self.temperature_last else self.samplers
        has_mirostat = self.mirostat != 0
        is_usual = ordered is None and not (
            has_mirostat or self.has_dry or self.top_n_sigma > 0 or self.typical_p < 1 or self.dynatemp_range > 0
            or (self.xtc_probability > 0 and self.xtc_threshold <= 0.5)
        )  # fmt: skip
        if is_usual or (self.is_greedy and not self.has_dry):
            return ()
        own = USUAL_STAGES if ordered is None else tuple(STAGES[name] for name in ordered if name in STAGES)
        return (*own, IS_MIROSTAT) if has_mirostat else own

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of ``runtime.sampling_table``; penalties are neutral if ``samplers`` does not name them."""
        numbers: dict[str, float] = {name: getattr(self, name) for name in COLUMNS}
        return numbers if _names(self.samplers, "penalties") else numbers | PENALTIES

    def validate(self, vocab_size: int) -> None:
        """Check that every token id lies in ``[0, vocab_size)``.

        Raises ``RequestError``.
        """
        if self.bad_words is not None:
            raise RequestError("bad_words are texts, and the engine knows ids: bad_words_token_ids", param="bad_words")
        if self.dry_sequence_breakers:
            problem = "dry_sequence_breakers are texts, and the engine knows ids: dry_breakers"
            raise RequestError(problem, param="dry_sequence_breakers")
        if self.truncate_prompt_tokens is not None:
            problem = "truncate_prompt_tokens must be None: the engine cuts no prompt; cut it before, as LLM does"
            raise RequestError(problem, param="truncate_prompt_tokens")
        check_token_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        check_token_ids("logprob_token_ids", self.logprob_token_ids or (), vocab_size)
        check_token_ids("logit_bias", self.logit_bias or (), vocab_size)
        budget = self.reasoning_budget
        check_token_ids("reasoning_budget", () if budget is None else budget.ids, vocab_size)
        for word in self.bad_words_token_ids or ():
            check_token_ids("bad_words_token_ids", word, vocab_size)
        breakers = self.dry_breakers or NO_BREAKERS
        for ids in (breakers.token_ids, *breakers.sequences):
            check_token_ids("dry_breakers", ids, vocab_size)

    def _set(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    def _integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if value is None and optional:
            return
        if not is_integer(value):
            kind = "an integer or None" if optional else "an integer"
            raise RequestError(f"{name} must be {kind}, got {value!r:.80}", param=name)
        if not low <= value <= high:
            raise RequestError(f"{name} must be between {low} and {high}, got {value}", param=name)
        self._set(name, int(value))

    def _max_tokens(self) -> None:
        value: Any = self.max_tokens
        if is_integer(value) and value == -1:
            self._set("max_tokens", None)
        elif is_integer(value) and value < 1:
            limits = f"between 1 and {2**31 - 1}, or -1 for no limit but the context's end"
            raise RequestError(f"max_tokens must be {limits}, got {value}", param="max_tokens")
        self._integer("max_tokens", 1, 2**31 - 1, optional=True)

    def _number(self, name: str, low: float, high: float, *, low_open: bool = False) -> None:
        value: Any = getattr(self, name)
        if not is_number(value):
            raise RequestError(f"{name} must be a number, got {value!r:.80}", param=name)
        above = value > low if low_open else value >= low
        if not (above and value <= high and math.isfinite(value)):  # NaN fails every comparison
            limit = f"greater than {low}" if low_open else f"at least {low}"
            if high != math.inf:
                limit += f" and at most {high}"
            raise RequestError(f"{name} must be finite, {limit}, got {value}", param=name)
        self._set(name, float(value))

    def _stop_strings(self) -> None:
        stop: Any = self.stop
        if stop is None:
            return
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, (list, tuple)) or not all(isinstance(text, str) for text in strings):
            raise RequestError(f"stop must be a string, a list of strings or None, got {stop!r:.80}", param="stop")
        if len(strings) > MAX_STOP_STRINGS:
            raise RequestError(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(strings)}", param="stop")
        for text in strings:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise RequestError(
                    f"stop has a string of {len(text)} characters; each must have 1 to {MAX_STOP_LENGTH}",
                    param="stop",
                )
        if strings and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")
        self._set("stop", list(strings))

    def _token_ids(self, name: str) -> None:
        value: Any = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, (list, tuple, set, frozenset)) or not all(is_integer(i) for i in value):
            raise RequestError(f"{name} must be a list of token ids or None, got {value!r:.80}", param=name)
        self._set(name, [int(i) for i in value])

    def _logit_bias(self) -> None:
        bias: Any = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {bias!r:.80}", param="logit_bias")
        for token_id, value in bias.items():
            if not is_integer(token_id):
                raise RequestError(f"logit_bias: {token_id!r:.40} is not a token id", param="logit_bias")
            if not is_number(value) or not abs(value) <= MAX_LOGIT_BIAS:
                raise RequestError(
                    f"logit_bias of token {token_id} must be a number between -{MAX_LOGIT_BIAS:g} and "
                    f"{MAX_LOGIT_BIAS:g}, got {value!r:.40}",
                    param="logit_bias",
                )
        self._set("logit_bias", {int(i): float(value) for i, value in bias.items()})

    def _structured_outputs(self) -> None:
        wanted: Any = self.structured_outputs
        if wanted is None:
            return
        if not isinstance(wanted, StructuredOutputsParams):
            kind = "StructuredOutputsParams or None"
            raise RequestError(f"structured_outputs must be {kind}, got {wanted!r:.80}", param="structured_outputs")
        if self.grammar is not None:
            raise RequestError("structured_outputs and grammar: one of them", param="structured_outputs")
        self._set("grammar", wanted.as_grammar())
        self._set("structured_outputs", None)

    def _extra_args(self) -> None:
        given: Any = self.extra_args
        if given is None:
            return
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise RequestError(f"extra_args must be a dict with texts as keys, got {given!r:.80}", param="extra_args")
        try:
            msgspec.json.encode(given)
        except (TypeError, ValueError) as error:
            raise RequestError(f"extra_args must hold JSON's types alone: {error}", param="extra_args") from None

    def _bad_words(self) -> None:
        texts: Any = self.bad_words
        if texts is not None:
            if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
                raise RequestError(f"bad_words must be a list of texts or None, got {texts!r:.80}", param="bad_words")
            if len(texts) > MAX_BAD_WORDS:
                raise RequestError(
                    f"bad_words must have at most {MAX_BAD_WORDS} entries, got {len(texts)}", param="bad_words"
                )
            self._set("bad_words", list(texts) or None)
        name = "bad_words_token_ids"
        words: Any = self.bad_words_token_ids
        if words is None:
            return
        if not isinstance(words, (list, tuple)) or not all(
            isinstance(word, (list, tuple)) and all(is_integer(i) for i in word) for word in words
        ):
            raise RequestError(f"{name} must be a list of lists of token ids or None, got {words!r:.80}", param=name)
        if len(words) > MAX_BAD_WORDS:
            raise RequestError(f"{name} must have at most {MAX_BAD_WORDS} entries, got {len(words)}", param=name)
        for word in words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"{name}: an entry must have 1 to {MAX_BAD_WORD_TOKENS} ids, got {len(word)}", param=name
                )
        self._set(name, [[int(i) for i in word] for word in words])


def _names(samplers: list[str] | None, name: str) -> bool:
    return samplers is None or name in samplers


def check_truncation(most: int | None) -> None:
    """Raises ``RequestError`` for an invalid ``truncate_prompt_tokens``."""
    if most is not None and most < 1 and most != -1:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, or -1 for as many as leave room for the answer, got {most}",
            param="truncate_prompt_tokens",
        )


def last_tokens(ids: list[int], most: int | None, room: int) -> list[int]:
    """The end of a prompt, as ``truncate_prompt_tokens`` cuts it; ``room`` tokens fit. Raises ``RequestError``."""
    check_truncation(most)
    return ids if most is None else ids[-(most if most > 0 else max(1, room)) :]


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise ``RequestError`` if an id lies outside ``[0, vocab_size)``."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{field} has token id {token_id}, outside the vocabulary of {vocab_size}", param=field)
