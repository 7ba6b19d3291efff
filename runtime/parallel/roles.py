"""Roles of a fleet's engines: which of them compute prompts, and which one writes a request's answer.

    roles = StaticRoles(num_prefill=1, num_engines=4)
    costs = roles.prompt_costs(loads, num_new)           # the router sends the prompt to the engine with the least
    engine = roles.decode_engine(loads, prefill_engine)  # where its answer is written; often the same engine

Like the router, the module has no clocks, threads and processes: fleets and the simulator (`bench roles`) run the same
classes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine.scheduling.step_limit import MOST_WITHOUT
from runtime.errors import InvalidArgumentError

_FORGETTING = 1 / 256
"""The weight of the latest request in the means."""

_FORGETTING_OPEN = 1 / 1024
"""The same for the number of open answers, which changes slowly: neighbours are alike."""

_PLAN_EVERY = 128
"""Requests between two choices of roles."""

_FIRST_PLAN = 8
"""Requests before the first choice; it is made again whenever twice as many are known."""

_CHANGE = 1.02
"""Roles change for a capacity that is so many times as large."""

_GAIN = 1.03
"""Engines for prompts alone must carry so many times as many requests as none."""

_WAIT = 0.6
"""Prompts go to an engine with decodes if they would wait for this share of the target longer at another one: its
answers have no time to spare at the rate that is planned for."""

_MOVE_STEPS = 1.5
"""An answer that is moved waits about so many steps."""

_SEEN, _FIRST_LENGTH = 256, 32.0
"""Answers whose lengths are kept; half of them must keep the target where steps take all of it. Their median before
one has ended."""

_TYPICAL = 8
"""Decodes of a step in which one's time is divided into its own and its context's."""

_DECODES = sorted({round(1.08**power) for power in range(91)})
"""Numbers of decodes that are considered, up to 1,018."""

_CROWD = 1.25
"""Steps have room for so many times the decodes that are planned for, since their number varies."""

_NEARLY, _SPEED = 0.9, 0.1
"""Sizes of steps with nearly the most requests are compared by requests, times this power of the prompts' speed beside
many decodes: prompts come together."""

_OVERFULL = 2
"""With so many times the decodes that fit its steps' time an engine of answers gets no more."""

_LOST, _LEAST_LOST = 0.1, 0.02
"""The share of requests that may miss a target, and the least one that queues and crowds may cost beside prompts that
are too long for it."""

_PARTS = tuple((part, NormalDist().inv_cdf(1.0 - _LOST * (1.0 - part))) for part in (0.2, 0.5, 0.8))
"""Divisions of that share: the part that waits too long for its first token, and the standard deviations within which
decodes must keep their target for the rest."""


class EngineLoad(NamedTuple):
    """An engine's load.

    num_prompt   prompt tokens that it has still to compute
    num_decodes  open choices with a first token
    num_context  tokens of those choices' prompts
    is_ready     False: it gets no request
    """

    num_prompt: int
    num_decodes: int
    num_context: int
    is_ready: bool = True


class OpenAnswers(NamedTuple):
    """Requests with a first token that have not ended, and the tokens of their answers so far."""

    num: int
    num_tokens: int


class Roles(Protocol):
    """The division of work among engines."""

    def prompt_costs(self, loads: Sequence[EngineLoad], num_new: Sequence[int]) -> list[float]:
        """The cost of a prompt on each engine, of which ``num_new`` tokens must be computed there;
        infinite for an engine that takes no prompts. At least one ready engine has a finite cost."""
        ...

    def decode_engine(self, loads: Sequence[EngineLoad], engine: int) -> int:
        """The engine that goes on with a request whose prompt ``engine`` has computed: a ready one, or ``engine``."""
        ...

    def ended(self, num_prompt: int, num_computed: int, num_output: int, others: OpenAnswers) -> None:
        """A request has ended: tokens of its prompt, those that had to be computed, and those of all its answers;
        ``others`` go on."""
        ...


class StaticRoles:
    """The first ``num_prefill`` engines compute prompts, the others write answers. If no engine of a kind is ready,
    those of the other kind take its work."""

    def __init__(self, num_prefill: int, num_engines: int) -> None:
        if not 0 < num_prefill < num_engines:
            raise InvalidArgumentError(
                f"{num_prefill} of {num_engines} engines compute prompts: at least one must, and one must not",
                param="prefill_engines",
            )
        self.num_prefill, self.num_engines = num_prefill, num_engines

    def prompt_costs(self, loads: Sequence[EngineLoad], num_new: Sequence[int]) -> list[float]:
        able = ready_of(loads, range(self.num_prefill)) or ready_of(loads, range(self.num_prefill, self.num_engines))
        return [
            loads[engine].num_prompt + num_new[engine] if engine in able else math.inf for engine in range(len(loads))
        ]

    def decode_engine(self, loads: Sequence[EngineLoad], engine: int) -> int:
        able = ready_of(loads, range(self.num_prefill, self.num_engines))
        return min(able, key=lambda each: (loads[each].num_context, loads[each].num_decodes), default=engine)

    def ended(self, num_prompt: int, num_computed: int, num_output: int, others: OpenAnswers) -> None:
        """The division is fixed."""


class StepSeconds(Protocol):
    """The time of an engine's step."""

    def __call__(self, tokens: int, sequences: int, pairs: float, context: float) -> float:
        """Seconds of a step with so many tokens in all, of so many sequences, with these pairs of attention in chunks
        of prompts, and tokens that decodes attend to."""
        ...


@dataclass(slots=True)
class _Means:
    """Decaying means over requests."""

    prompt: float = 512.0
    computed: float = 512.0
    output: float = 128.0
    square: float = 512.0**2  # of computed
    prompt_square: float = 512.0**2
    open: float = 0.0  # requests with a first token that have not ended
    open_square: float = 0.0
    num_settled: int = 0  # requests that are in these two: while fewer have ended than are open, more and more are
    count: int = 0

    def observe(self, num_prompt: int, num_computed: int, num_output: int, num_open: int) -> None:
        self.count += 1
        if self.count >= num_open:
            self.num_settled += 1
            weight = max(_FORGETTING_OPEN, 1 / self.num_settled)
            self.open += weight * (num_open - self.open)
            self.open_square += weight * (num_open**2 - self.open_square)
        weight = max(_FORGETTING, 1 / self.count)
        self.prompt += weight * (num_prompt - self.prompt)
        self.computed += weight * (num_computed - self.computed)
        self.output += weight * (num_output - self.output)
        self.square += weight * (num_computed**2 - self.square)
        self.prompt_square += weight * (num_prompt**2 - self.prompt_square)

    @property
    def dispersion(self) -> float:
        """The variance of the number of open answers, divided by its mean: 1 if requests come by chance, more if they
        come in crowds."""
        return max(1.0, (self.open_square - self.open**2) / max(1.0, self.open))

    @property
    def variation(self) -> float:
        """The squared coefficient of variation of a prompt's computed tokens."""
        return max(0.0, self.square / max(1.0, self.computed) ** 2 - 1.0)

    @property
    def prompt_variation(self) -> float:
        """The same of all its tokens."""
        return max(0.0, self.prompt_square / max(1.0, self.prompt) ** 2 - 1.0)


class _Row(NamedTuple):
    """Steps with so many decodes: the mean tokens of prompts that fit, the seconds without, of each, and of one decode
    more; the most mean seconds, and those that a step may exceed them by."""

    num_decodes: float
    chunk: float
    bare_s: float
    token_s: float
    decode_s: float
    limit_s: float
    over_s: float

    @property
    def speed(self) -> float:
        """The most prompt tokens a second."""
        return self.chunk / (self.bare_s + self.token_s * self.chunk)


class AutoRoles:
    """Each engine takes either role, by load.

    The first ``num_prefill`` engines compute prompts alone; the others write answers, and compute prompts in what is
    left of ``step_s``, the most seconds that a step with decodes may take. The number is the one with the largest
    predicted goodput, by the step times and past requests: nine tenths of the requests must keep both targets, and what
    may be lost is divided among prompts that are too long, queues of prompts, and chance crowds of decodes. With 0, the
    usual case unless ``step_s`` is short, an answer stays where its prompt was computed, and nothing moves. A prompt
    goes where its first token comes earliest, an answer where the steps of decodes are shortest by their number and
    context. One that finds no room within ``step_s`` stays, so an engine of prompts can take answers, too.

    step       the time of a step; None: until `learn` is told it every engine does both, without a limit of time
    ttft_s     the target: seconds to the first token
    step_s     the target: seconds between two tokens
    max_chunk  most tokens of a step
    limit_s    the most mean seconds of an engine's steps with decodes: the target, or less where answers are moved,
               since these wait for their pages and for the end of a step; 0.0: not known yet. ``most_saved_s``: what
               shorter steps save for those with prompts (`StepLimit`)
    budgets    the most tokens of a step, by engine
    """

    def __init__(
        self,
        num_engines: int,
        step: StepSeconds | None,
        ttft_s: float,
        step_s: float,
        max_chunk: int = 2048,
        rows: int = 256,
    ) -> None:
        self.num_engines = num_engines
        self.ttft_s, self.step_s = ttft_s, step_s
        self.num_prefill = 0
        self.limit_s = self.most_saved_s = 0.0
        self.budgets = [max_chunk] * num_engines
        self.means = _Means()
        self._lengths: deque[int] = deque(maxlen=_SEEN)
        self._prompts: deque[int] = deque(maxlen=_SEEN)  # their computed tokens
        self._too_long = 0.0  # the share of prompts that take longer than the target
        self._context, self._context_share = 1.0, 0.0  # tokens of a decode, and their share of its time
        self._usual = _FIRST_LENGTH
        self._others = OpenAnswers(0, 0)
        self._output = self.means.output  # expected tokens of an answer
        self._rows, self._max_chunk = rows, max_chunk
        self._sizes = _step_sizes(max_chunk)
        self._most_decodes = rows
        self._speeds = [1.0]  # prompt tokens a second beside 0, 1, … decodes
        self._step: StepSeconds | None = None
        self.plans_at_once = True
        self.is_due = False
        if step is not None:
            self.learn(step)

    def learn(self, step: StepSeconds, lock: AbstractContextManager[Any] | None = None) -> None:
        """Choose roles by these times from now on. ``lock`` is held where others might see half of the choice."""
        lock = lock or nullcontext()
        alone = best_chunk(step, self._max_chunk)
        with lock:
            self._alone, self._step = alone, step
            self.is_due = False
        self._plan(lock)

    def prompt_costs(self, loads: Sequence[EngineLoad], num_new: Sequence[int]) -> list[float]:
        if self._step is None:
            return [
                load.num_prompt + self._output * load.num_decodes + new if load.is_ready else math.inf
                for load, new in zip(loads, num_new)
            ]
        speeds, last = self._speeds, len(self._speeds) - 1
        waits_s = _WAIT * self.ttft_s if self.num_prefill else 0.0  # where decodes are
        return [
            (load.num_prompt + new) / speeds[min(round(self._weight(load)), last)]
            + waits_s * (engine >= self.num_prefill)
            if load.is_ready
            else math.inf
            for engine, (load, new) in enumerate(zip(loads, num_new))
        ]

    def decode_engine(self, loads: Sequence[EngineLoad], engine: int) -> int:
        most, weights = self._most_decodes, [self._weight(load) for load in loads]
        own = weights[engine] - 1  # beside the new one
        if engine >= self.num_prefill and own < most:
            return engine
        able = ready_of(loads, range(self.num_prefill, self.num_engines))
        best = min(able, key=weights.__getitem__, default=engine)
        if weights[best] < most or weights[best] < own:
            return best
        waits_s = loads[engine].num_prompt / self._speeds[0] + self._output * self.step_s
        stays = engine >= self.num_prefill or waits_s < self.ttft_s or weights[best] >= _OVERFULL * most
        return engine if stays else best

    def _weight(self, load: EngineLoad) -> float:
        """The time of an engine's decodes as the number of usual ones."""
        share, length = self._context_share, self._context
        context = load.num_context + load.num_decodes * self._output / 2
        return (1.0 - share) * load.num_decodes + share * context / length

    def ended(self, num_prompt: int, num_computed: int, num_output: int, others: OpenAnswers) -> None:
        self.means.observe(num_prompt, num_computed, num_output, others.num)
        self._others = others
        self._lengths.append(num_output)
        self._prompts.append(max(1, num_computed))
        count = self.means.count
        if self._step is None:
            return
        if count % _PLAN_EVERY == 0 or (_FIRST_PLAN <= count < _PLAN_EVERY and count & (count - 1) == 0):
            self.is_due = True
            if self.plans_at_once:
                self.learn(self._step)

    def _plan(self, lock: AbstractContextManager[Any]) -> None:
        """Choose the number of engines for prompts alone and the sizes of steps, and tabulate speeds."""
        with lock:
            (num_open, num_tokens), lengths, prompts = self._others, list(self._lengths), list(self._prompts)
        # While fewer have ended than are open, short answers alone have: the others' tokens so far count, too.
        share = max(0.0, 1.0 - self.means.count / max(1, num_open))
        self._output = self.means.output + share * num_tokens / max(1, num_open)
        self._usual = max(2.0, float(np.median(lengths))) if lengths else _FIRST_LENGTH
        context = self.means.prompt + self._output / 2
        empty_s, full_s = (self._seconds(_TYPICAL, 0, each) for each in (0.0, context))
        self._context, none_s = context, self._seconds(0, 0, 0.0)
        self._context_share = (full_s - empty_s) / max(full_s - none_s, 1e-12)
        long = sorted(prompts)
        fit = bisect_right(long, self.ttft_s, key=lambda each: self._seconds_alone(each))
        self._too_long = 1.0 - fit / len(long) if long else 0.0
        moved_s = self.step_s * max(0.5, 1.0 - _MOVE_STEPS / self._usual)
        limits = [self.step_s, moved_s]
        steps = self._steps()
        tables = [{size: self._table(limit, size, steps) for size in self._sizes} for limit in limits]
        rates = [self._best_size(num_prefill, tables[num_prefill > 0]) for num_prefill in range(self.num_engines)]
        best = max(range(self.num_engines), key=lambda each: rates[each][0])
        if rates[best][0] < _GAIN * rates[0][0]:
            best = 0
        if self.means.count > _PLAN_EVERY and rates[best][0] <= _CHANGE * rates[self.num_prefill][0]:
            best = self.num_prefill
        place = int(best > 0)
        _, size, chosen = rates[best]
        table = _rows(tables[place][size])
        last = round(table[-1].num_decodes) if table else 0
        decodes, speeds = [0.0], [self._alone / self._seconds(0, self._alone, 0.0)]
        for row in table:
            decodes.append(row.num_decodes)
            if row.chunk > 0.0:
                speeds.append(row.speed)
            else:
                speeds.append(self._alone / (MOST_WITHOUT * row.bare_s + self._seconds(0, self._alone, 0.0)))
        with lock:
            self.num_prefill = best
            self.limit_s, self.most_saved_s = (chosen.limit_s, chosen.over_s) if chosen else (limits[place], 0.0)
            self.budgets = [self._alone] * best + [size] * (self.num_engines - best)
            self._most_decodes = min(self._rows, math.ceil(_CROWD * last))
            self._speeds = np.interp(np.arange(last + 1), decodes, speeds).tolist()

    def _best_size(self, num_prefill: int, tables: dict[int, NDArray[np.float64]]) -> tuple[float, int, _Row | None]:
        """Requests a second, the size of steps for them, and its usual row."""
        found = {size: self._rate(num_prefill, table) for size, table in tables.items()}
        best = max(rate for rate, _ in found.values())
        most = max((row.num_decodes for rate, row in found.values() if row and rate >= _NEARLY * best), default=0)
        worth = {}
        for size, (rate, _) in found.items():
            num_decodes, chunk, bare_s, token_s, *_ = tables[size].T
            speeds = (chunk / (bare_s + token_s * chunk))[num_decodes >= most]
            speed = float(speeds.max(initial=0.0))
            worth[size] = (rate * speed**_SPEED, rate)
        size = max(worth, key=worth.__getitem__)
        return best, size, found[size][1]

    def _steps(self) -> list[tuple[int, float, float, list[float]]]:
        """Numbers of decodes, the seconds of steps with them and with some more, and with prompts up to each size."""
        context = self.means.prompt + self._output / 2
        return [
            (
                num_decodes,
                self._seconds(num_decodes, 0, context),
                self._seconds(math.ceil(_CROWD * num_decodes), 0, context),
                [self._seconds(num_decodes, max(0, size - num_decodes), context) for size in self._sizes],
            )
            for num_decodes in _DECODES
            if num_decodes <= self._rows
        ]

    def _table(
        self, limit_s: float, size: int, steps: list[tuple[int, float, float, list[float]]]
    ) -> NDArray[np.float64]:
        """Steps of at most so many tokens, and so many mean seconds, beside more and more decodes, as far as those fit.

        Steps without prompts save time for those with. With s mean seconds and at most t of a step, an answer of n
        tokens takes at most n s + (t - s)."""
        table = []
        place = self._sizes.index(size)
        for num_decodes, bare_s, crowded_s, whole in steps:
            if bare_s > limit_s or num_decodes > size:
                break
            mean_s, whole_s = limit_s, whole[place]
            if whole_s > limit_s:
                mean_s = max(limit_s / 2, (limit_s - whole_s / self._usual) / (1.0 - 1.0 / self._usual))
            most = max(0, size - num_decodes)
            token_s = (whole_s - bare_s) / max(1, most)
            chunk = min(most, max(0.0, mean_s - crowded_s) / token_s) if most else 0
            decode_s = (crowded_s - bare_s) / (math.ceil(_CROWD * num_decodes) - num_decodes)
            table.append(_Row(num_decodes, chunk, bare_s, token_s, decode_s, mean_s, max(0.0, whole_s - mean_s)))
        return np.array(table, np.float64).reshape(len(table), len(_Row._fields))

    def _rate(self, num_prefill: int, table: NDArray[np.float64]) -> tuple[float, _Row | None]:
        """The predicted goodput if so many engines compute prompts alone: requests a second, of which nine tenths keep
        both targets. In each step of the others there are as many tokens of prompts as those engines leave, if they
        fit. Decodes come and go by chance, so that with a mean of n on each of m engines, among which they are
        balanced, there are n + z sqrt(n / m) at times; a step must have room for them. They vary more where requests
        come in crowds (`_Means.dispersion`), and where each one makes steps longer, so that all stay for longer: with
        s seconds of a step, s / (s - n ds/dn) times the variance."""
        if not len(table):
            return 0.0, None
        computed, output = max(1.0, self.means.computed), max(1.0, self._output)
        usual = (min(computed, self._alone) + self._alone) / 2  # between a prompt and a full step
        alone_s = computed * self._seconds(0, usual, 0.0) / usual  # of a prompt
        num_mixed = self.num_engines - num_prefill
        spread = self.means.dispersion * (1.0 + self._context_share**2 * self.means.prompt_variation) / num_mixed
        num_decodes, most, bare_s, token_s, decode_s, limit_s, _ = table.T
        ended = num_mixed * num_decodes / output  # of answers, a step
        most_s = computed * (bare_s + token_s * most) / np.maximum(most, 1.0)
        spread = np.sqrt(spread * num_decodes * bare_s / np.maximum(bare_s - decode_s * num_decodes, 1e-3 * bare_s))
        best, best_row = 0.0, None
        for part, deviations in _PARTS:
            lost = max(_LEAST_LOST, part * _LOST - self._too_long)
            alone = num_prefill / alone_s * float(self._use(num_prefill, alone_s, lost))
            room_s = limit_s - bare_s - decode_s * deviations * spread
            chunk = (ended - alone * bare_s) / (alone * token_s + num_mixed / computed)
            fits = np.minimum(most * self._use(num_mixed, most_s, lost), room_s / np.maximum(token_s, 1e-12))
            chunk = np.minimum(np.maximum(chunk, 0.0), fits)
            step_s = bare_s + token_s * chunk
            rates = np.minimum(ended / step_s, alone + num_mixed * chunk / computed / step_s)
            place = int(np.argmax(np.where(room_s >= 0.0, rates, 0.0)))
            if room_s[place] >= 0.0 and rates[place] > best:
                best, best_row = float(rates[place]), _Row(*table[place].tolist())
        return best, best_row

    def _use(self, num_engines: int, prompt_s: NDArray[np.float64] | float, lost: float) -> NDArray[np.float64]:
        """The share of the time for which so many engines may compute prompts of these mean seconds, so that all but
        this share of them wait short enough for the target (Allen and Cunneen's approximation, Poisson arrivals); 0.5
        if a prompt alone takes too long."""
        left_s = np.maximum(self.ttft_s - np.asarray(prompt_s), 0.0)
        rate = 2.0 * num_engines * left_s / prompt_s / (1.0 + self.means.variation)
        root, bound = math.sqrt(2.0 * (num_engines + 1.0)), math.log(lost)
        use = np.full(np.shape(rate), math.exp(bound / root))
        for _ in range(5):  # Newton's, from below: root log(use) - rate (1 - use) is concave
            use += (bound - root * np.log(use) + rate * (1.0 - use)) / (root / use + rate)
        return np.where(left_s > 0.0, use, 0.5)

    def _seconds(self, num_decodes: int, chunk: float, context: float) -> float:
        prompts = -(-chunk // max(1.0, self.means.computed))
        means = self.means
        pairs = chunk * (means.prompt - means.computed + means.square / (2 * max(1.0, means.computed)))
        assert self._step is not None
        return self._step(num_decodes + round(chunk), num_decodes + int(prompts), pairs, num_decodes * context)

    def _seconds_alone(self, num_tokens: int) -> float:
        """The time of a prompt of so many tokens on an idle engine."""
        assert self._step is not None
        size = min(num_tokens, self._alone)
        return self._step(size, 1, size * num_tokens / 2, 0.0) * num_tokens / size


def _rows(table: NDArray[np.float64]) -> list[_Row]:
    return [_Row(*row) for row in table.tolist()]


def best_chunk(step: StepSeconds, most: int = 2048) -> int:
    """The prompt tokens of a step, a power of two from 256 to ``most``, at which a token costs least."""
    return min(_step_sizes(most), key=lambda size: step(size, 1, size * size / 2, 0.0) / size)


def _step_sizes(most: int) -> list[int]:
    """The powers of two from 256 to ``most``, at least one size."""
    return [256 << place for place in range(most.bit_length()) if 256 << place <= most] or [most]


def ready_of(loads: Sequence[EngineLoad], engines: Sequence[int]) -> list[int]:
    """Those of these engines that are ready."""
    return [engine for engine in engines if loads[engine].is_ready]
