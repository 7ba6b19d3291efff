"""How many of the likeliest proposals of a step are tried: so many that most tokens a second are expected, of those
numbers that may be tried."""

from __future__ import annotations

from runtime.engine.speculation.account import TrialAccount
from runtime.engine.speculation.step_times import WIDTHS, StepTimes

SHORT_S = 2e-3
"""Steps without proposals that are shorter run code and read memory that is warm, and the first step of a shape, which
is recorded, takes as long as dozens of them."""

LEAST_GAIN = 1.02
"""What proposals have to promise against none before the first is tried: times are noisy."""

BETTER, MAY_BE_BETTER = 1.05, 0.95
"""What a number whose steps were not timed has to promise against the best of those that were; the other one where
steps are long, between two numbers whose steps were timed: steps get longer in leaps, where a product takes another
tile, and in front of a leap is the best number, of which a straight line knows nothing."""

STAYS = 1.05
"""So much more is expected of as many as the step before had: another shape's first step takes longer."""

FIRST = 3
"""Proposals for each sequence that are tried first. Then steps of up to twice as many tokens are."""

USUAL = (1, 3, 7, 15, 31)
"""Proposals for each sequence, beside the most, of shapes that no step had yet, where steps are short: few shapes are
recorded sooner than many."""

RUN_STEPS = 8
"""So many steps with proposals follow one another before the account is asked again, where steps are short, unless
nothing is expected of them any more."""

LEAST_STEPS = 3
"""So many of them the account has to pay for before the first."""

COMES_TRUE = 0.8
"""Of what proposals promise, what the account counts on."""


class WidthChoice:
    """Chooses by what steps take and what may be lost."""

    def __init__(self, times: StepTimes, account: TrialAccount) -> None:
        self._times = times
        self._account = account
        self._latest = 0

    def best(
        self, chances: list[float], num_sequences: int, num_asking: int, most: int, curve: list[float], num_in_run: int,
        *, ends_soon: bool,
    ) -> int:  # fmt: skip
        """How many to try.

        ``chances``: that each proposal is kept, in the order in which they are tried, of ``num_asking`` sequences with
        at most ``most`` each, beside which others decode, ``num_sequences`` in all. ``curve``: of their steps
        (`StepTimes.curve`). ``num_in_run``: steps with proposals that came one behind the other before this one.
        ``ends_soon``: none of the sequences has room for ``most``; where steps are short, nothing is recorded for so
        few tokens.
        """
        times, account, plain_s = self._times, self._account, curve[0]
        is_short = plain_s < SHORT_S
        num_steps = LEAST_STEPS if is_short and not num_in_run else 1
        asks = not (is_short and 0 < num_in_run < RUN_STEPS)
        longest_known = times.most_tokens(num_sequences)
        longest = max(FIRST * num_asking, 2 * longest_known - num_sequences)
        longest = min(longest, len(chances))
        least = (1.0 if num_in_run else LEAST_GAIN) * num_sequences / plain_s
        known_rate = new_rate = least
        known_width = new_width = taken = 0
        latest = self._latest if num_in_run else 0
        expected = float(num_sequences)
        for at, width in enumerate(WIDTHS, 1):
            if width > longest:
                break
            while taken < width:
                expected += chances[taken]
                taken += 1
            seconds = curve[at]
            rate = expected / seconds
            if width == latest:
                rate *= STAYS
            if rate <= least:
                continue
            loss_s = num_steps * (seconds - (1.0 + COMES_TRUE * (expected / num_sequences - 1.0)) * plain_s)
            is_first = not times.is_known(num_sequences, width)
            if not is_first if is_short else times.is_timed(num_sequences + width):
                rate /= BETTER if is_first else 1.0
                if rate > known_rate and (not asks or account.allows(loss_s, is_first=is_first)):
                    known_rate, known_width = rate, width
                continue
            if not is_short and num_sequences + width < longest_known:
                rate /= MAY_BE_BETTER
            elif is_first:
                rate /= BETTER
            if (
                rate > new_rate
                and (not is_short or (not ends_soon and _is_usual(width, num_asking, most)))
                and account.allows(loss_s, is_first=is_first)
            ):
                new_rate, new_width = rate, width
        self._latest = new_width if new_width and new_rate > known_rate else known_width
        return self._latest


def _is_usual(width: int, num_asking: int, most: int) -> bool:
    each, rest = divmod(width, num_asking)
    return rest == 0 and (each in USUAL or each == most)
