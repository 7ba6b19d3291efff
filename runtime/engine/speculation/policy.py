"""Decides how many draft tokens of each sequence a step tries, so that speculation pays (docs/speculation.md).

A plain step of n sequences gives n / t(0) tokens a second, one with d draft tokens (n + expected accepted ones) / t(d).
`Acceptance` counts what is accepted, `StepTimes` measures t from the end of one step to the end of the next, and
`DraftPolicy` takes the d with the most tokens a second. `TrialBudget` bounds what finding out may cost, and a drafter
that finds nothing is asked less and less often.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from operator import itemgetter

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.evidence import (
    SEQUENCE_WEIGHT,
    STALE_STEPS,
    WIDTHS,
    Acceptance,
    Draft,
    Ended,
    StepTimes,
)

CREDIT_S, CREDIT_STEPS = 0.02, 2.0
"""The first loss that trials may make: so many seconds, or steps of the first length, whichever is more."""
ALLOWANCE, LOOKING = 0.008, 0.004
"""The parts of the time that trials, and fruitless questions to the drafter, may take."""
ASKED_S = 5e-5
"""The cost of a question beside the drafter's time: cold code of the engine."""
MOST_SETUP_STEPS = 100.0
"""The first step of a shape, which is recorded, is charged at most so many plain steps: the machine may have slept."""
DISTURBED = 4.0
"""A step with drafts counts as at most so many times what plain steps take for its tokens: others use the machine."""

SHORT_S = 2e-3
"""Recording a shape takes dozens of plain steps shorter than this. There all sequences have the same length, one of
`USUAL`, and `EVIDENCE` draft tokens are compared with samples before any is tried."""
USUAL, EVIDENCE = (1, 3, 7, 15, 31), SEQUENCE_WEIGHT
COLD, COLD_FADING = 1.6, 0.75
"""The excess of the first of such steps in a run, as a multiple of later ones', and what is left of that a step later:
code and memory are cold."""
FIRST = 3
"""The draft length that is tried first; then up to twice as many tokens as ever."""
CHANGE = 1.05
"""The gain that another length, or a new shape, has to promise over the present one: times are noisy. In long steps
so much is added for an untimed length below the longest: times rise in leaps, which interpolation does not show."""
COMES_TRUE = 0.8
"""The part of a promised gain that the budget counts on."""
RUN_STEPS = 8
"""Short steps for which a choice is kept, as choosing takes a part of one; its loss counts as often."""

BACK_OFF_STEPS = 8
"""Steps of the first back-off; each is at most half as long again as the one before."""
PAUSE_STEPS = 4
"""Plain steps in a pause while drafts pay, which times them: the last two are timed, as at the end of a back-off."""
PLAIN_EVERY = 64
"""Steps with drafts before a pause."""


class TrialBudget:
    """Plain steps pay in a part of their time; each step with drafts pays in the time that it saved over plain steps
    for its tokens, or takes out the loss. The first step of a shape records graphs for later ones.

    balance_s  how much slower steps with drafts may be, or None while no step is known
    setup_s    the estimated loss of the first step of a shape
    """

    def __init__(self) -> None:
        self.balance_s: float | None = None
        self.setup_s = self._credit_s = self._debt_s = 0.0

    def bound(self, first_s: float, longest_s: float) -> None:
        """Set the time of a step of the first draft length to be tried, and of the highest."""
        self._credit_s, self._debt_s = (max(CREDIT_S, CREDIT_STEPS * each) for each in (first_s, longest_s))
        self.settle(self._credit_s if self.balance_s is None else 0.0)

    def allows(self, loss_s: float, *, is_first: bool = False) -> bool:
        """Whether steps may lose so much, plus the setup if it is the first of its shape."""
        return self.balance_s is not None and loss_s + (self.setup_s if is_first else 0.0) <= self.balance_s

    def earn(self, plain_s: float, num_steps: int = 1) -> None:
        """Credit plain steps."""
        if self.balance_s is not None and self.balance_s < self._credit_s:
            self.balance_s = min(self.balance_s + ALLOWANCE * plain_s * num_steps, self._credit_s)

    def settle(self, gained_s: float) -> None:
        """Credit or debit a step with drafts. Neither gains nor debts grow without end."""
        self.balance_s = min(max((self.balance_s or 0.0) + gained_s, -self._debt_s), 2.0 * self._debt_s)

    def set_up(self, excess_s: float, plain_s: float) -> None:
        """Record that the first step of a shape took so much longer than plain steps for its tokens."""
        excess_s = min(max(0.0, excess_s), MOST_SETUP_STEPS * plain_s)
        self.setup_s = 0.5 * (self.setup_s + excess_s) if self.setup_s else excess_s
        self.settle(-excess_s)


Look = Callable[[list[Sequence]], dict[Sequence, Draft]]
"""Asks the drafter about sequences."""


class DraftPolicy:
    """The draft length of each sequence in the next step: `plan`, fed by `observe`.

    most       the highest draft length of a sequence
    fixed      try as many as there are, whether or not it pays: for measurements
    never_backs_off  while requests have predictions, which are asked quickly
    is_held    the next step is planned after the running one's tokens are known, where steps overlap
    pays       drafts pay, as far as is known
    """

    def __init__(self, most: int, *, fixed: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.fixed = fixed
        self.never_backs_off = self.is_held = False
        self.pays = True
        self.times, self.acceptance = StepTimes(), Acceptance(most)
        self._most, self._clock = most, clock
        self._budget = TrialBudget()
        self._back_off = self._asleep = 0  # steps of the latest back-off, and to come of it or of a pause
        self._is_asleep = False  # in the latest step
        self._num_in_run = 0  # steps with drafts since the latest back-off
        self._num_tried = 0  # such steps since the latest pause
        self._chosen: dict[Sequence, int] = {}  # while the choice is kept
        self._width = 0  # of the latest choice, in all
        self._last_end: tuple[int, int, float] | None = None  # of the previous step: number, sequences, end
        self._has_tried = False  # in the previous step

    def wake(self) -> None:
        """Ask the drafter again before the next step."""
        self._back_off = self._asleep = 0

    def plan(self, running: Iterable[Sequence], look: Look) -> dict[Sequence, int]:
        """The draft length of each sequence that only lacks its next token. All its tokens have to be known."""
        self.acceptance.tried = {}
        self._is_asleep = self._asleep > 0 and not self.is_held
        if self._is_asleep:
            self._asleep -= 1
            return {}
        if self._num_tried >= PLAIN_EVERY and not (self.fixed or self.is_held):
            self._num_tried, self._is_asleep, self._asleep = 0, True, PAUSE_STEPS - 1
            return {}
        begun = self._clock()
        decodes = [s for s in running if s.num_tokens + s.num_pending - s.num_computed == 1 and not s.is_drawing_last]
        plain_s = self.times.plain(len(decodes))
        if not decodes or (plain_s is None and not self.fixed):
            return {}
        self.acceptance.compare_all()
        drafts = look(decodes)
        if self.fixed or plain_s is None:
            counts = {sequence: len(draft.ids) for sequence, draft in drafts.items()}
        else:
            counts = self._choose(drafts, len(decodes), plain_s) if drafts else {}
            self.pays = len(counts) > 0 if drafts else self.pays
            if not counts and not self.never_backs_off:
                self._fall_asleep(decodes, self._clock() - begun, plain_s)
        self._num_tried += len(counts) > 0
        self.acceptance.try_or_watch(drafts, counts)
        return counts

    def _fall_asleep(self, decodes: list[Sequence], spent_s: float, plain_s: float) -> None:
        """Nothing came of a question: the next one comes after so many steps that questions take their part of the
        time. Sequences that are only too near their ends for drafts are waited for."""
        left = max(min(self._most, s.max_tokens - s.num_output_tokens - 1) for s in decodes)
        if self._has_tried and left < self._most:
            self._asleep = max(0, left)
            return
        least = int((spent_s + ASKED_S) / (LOOKING * plain_s))
        self._back_off = min(STALE_STEPS, least, max(BACK_OFF_STEPS, 3 * self._back_off // 2)) if least > 2 else 0
        self._asleep = self._back_off
        self._num_in_run = self._num_tried = 0
        self._budget.earn(plain_s, self._back_off)
        self.times.pass_by(self._back_off)

    def _choose(self, drafts: dict[Sequence, Draft], num_decodes: int, plain_s: float) -> dict[Sequence, int]:
        """The most likely draft tokens, as many as give the most tokens a second. A token is accepted only with all
        before it, so chances fall along a draft."""
        is_short, kept = plain_s < SHORT_S, self._chosen
        if (
            self._num_in_run % RUN_STEPS
            and kept.keys() == drafts.keys()
            and self._budget.allows(0.0)
            and all(len(drafts[sequence].ids) >= count for sequence, count in kept.items())
        ):
            return kept
        sequences, chances = list(drafts), list[tuple[float, int, int]]()
        for number, (sequence, draft) in enumerate(drafts.items()):
            if not is_short or self.acceptance.evidence(draft.kind) >= EVIDENCE:
                chance = self.acceptance.chance(sequence, draft.kind)
                chances += [(-(chance**place), place, number) for place in range(1, 1 + len(draft.ids))]
        if len(sequences) > 1:  # short steps use one length for all: another layout of rows costs more than it gains
            chances.sort(key=itemgetter(1) if is_short else None)
        self._width = self._best_width([-chance for chance, _, _ in chances], num_decodes, len(drafts), is_short)
        counts: dict[Sequence, int] = {}
        for _, place, number in chances[: self._width]:
            counts[sequences[number]] = max(counts.get(sequences[number], 0), place)
        self._chosen = counts if is_short else {}
        return counts

    def _best_width(self, chances: list[float], num_decodes: int, num_asked: int, is_short: bool) -> int:
        """How many of the draft tokens with these chances to try."""
        times, budget, is_in_run = self.times, self._budget, self._num_in_run > 0
        curve = times.curve(num_decodes, num_decodes * self._most)
        plain_s = curve[0]
        budget.bound(curve[min(len(curve) - 1, 1 + bisect_left(WIDTHS, FIRST * num_decodes))], max(curve))
        num_steps = RUN_STEPS if is_short else 1
        longest_known = times.most_tokens(num_decodes)
        longest = min(max(FIRST * num_asked, 2 * longest_known - num_decodes), len(chances))
        best_rate, best = (1.0 if is_in_run else CHANGE) * num_decodes / plain_s, 0
        expected, taken = float(num_decodes), 0
        for seconds, width in zip(curve[1:], WIDTHS, strict=False):
            if width > longest:
                break
            expected, taken = expected + sum(chances[taken:width]), width
            is_first = not times.is_known(num_decodes, width)
            if is_short and is_first and (width % num_asked or width // num_asked not in (*USUAL, self._most)):
                continue
            rate = expected / seconds
            is_present = is_in_run and width == self._width
            is_below = not is_short and num_decodes + width < longest_known and not times.is_timed(num_decodes + width)
            if is_present or is_below:
                rate *= CHANGE
            elif is_first:
                rate /= CHANGE
            loss_s = num_steps * (seconds - (1.0 + COMES_TRUE * (expected / num_decodes - 1.0)) * plain_s)
            if rate > best_rate and budget.allows(loss_s, is_first=is_first):
                best_rate, best = rate, width
        return best

    @property
    def observes(self) -> bool:
        """Whether the latest step is to be observed: not most of a back-off, where calls would cost too much."""
        return self._asleep < 2

    def observe(self, ended: Ended) -> None:
        """Take up a step that is over."""
        number, drafted, kept, is_pure = ended
        now = self._clock()
        if drafted:
            self.acceptance.observe(drafted, kept)
        total, num_sequences, place = sum(drafted.values()), len(kept), self._num_in_run
        had_tried, self._has_tried = self._has_tried, total > 0
        self._num_in_run += total > 0
        last, self._last_end = self._last_end, (number, num_sequences, now) if is_pure else None
        if last is None or not is_pure or last[:2] != (number - 1, num_sequences):
            return
        seconds, plain_s = now - last[2], self.times.plain(num_sequences)
        if total and plain_s is not None:
            self._settle(num_sequences, total, sum(kept.values()), seconds, plain_s, place)
        elif total:
            self.times.observe(num_sequences, total, seconds)
        elif not self.is_held:  # a held step is not plain
            if self._is_asleep or plain_s is None or not (had_tried or self._back_off):
                self.times.observe(num_sequences, 0, seconds)
            if not self._is_asleep and plain_s is not None:  # back-offs have paid
                self._budget.earn(plain_s)

    def _settle(
        self, num_sequences: int, num_drafts: int, num_kept: int, seconds: float, plain_s: float, place: int
    ) -> None:
        """Account for a step with drafts; ``place`` is its index in the run."""
        is_first = not self.times.is_known(num_sequences, num_drafts)
        most_s = DISTURBED * plain_s * (1 + num_drafts / num_sequences)
        cold = COLD * COLD_FADING**place if plain_s < SHORT_S else 0.0
        warm_s = plain_s + max(0.0, min(seconds, most_s) - plain_s) / (1.0 + cold)
        self.times.observe(num_sequences, num_drafts, warm_s)
        worth_s = num_kept / num_sequences * plain_s
        if is_first:
            self._budget.set_up(seconds - worth_s, plain_s)
            return
        self._budget.settle(worth_s - min(seconds, most_s))
        if self._back_off and worth_s > (self.times.tried(num_sequences + num_drafts) or seconds):
            self.wake()

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self.acceptance.end(sequence)
        self._chosen.pop(sequence, None)
