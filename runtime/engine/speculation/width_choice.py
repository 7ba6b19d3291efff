"""Chooses how many of the likeliest draft tokens of a step are tried: the permitted number with the most expected
tokens a second."""

from __future__ import annotations

from runtime.engine.speculation.account import TrialAccount
from runtime.engine.speculation.step_times import WIDTHS, StepTimes

SHORT_S = 2e-3
"""Plain steps that are shorter run warm code and memory, and the first step of a shape, which is recorded, takes as
long as dozens of them."""

LEAST_GAIN = 1.02
"""The gain over plain steps that drafts have to promise before the first is tried: times are noisy."""

BETTER, MAY_BE_BETTER = 1.05, 0.95
"""The gain that an untimed number has to promise over the best timed one; the other is for long steps, between two
timed numbers: times rise in leaps, where a product takes another tile, and the best number is just before a leap, which
interpolation does not show."""

STAYS = 1.05
"""The bonus of the previous step's number: another shape's first step takes longer."""

FIRST = 3
"""Draft length that is tried first. Then up to twice as many tokens."""

USUAL = (1, 3, 7, 15, 31)
"""Draft lengths, beside the highest, of new shapes if steps are short: few shapes are recorded sooner than many."""

RUN_STEPS = 8
"""Steps with drafts between two checks of the account, if steps are short, unless no gain is expected any more."""

LEAST_STEPS = 3
"""How many of them the account has to pay for before the first."""

COMES_TRUE = 0.8
"""The fraction of the promised gain that the account counts on."""


class WidthChoice:
    """Chooses by the times of steps and the permitted loss."""

    def __init__(self, times: StepTimes, account: TrialAccount) -> None:
        self._times = times
        self._account = account
        self._latest = 0

    def best(
        self, chances: list[float], num_sequences: int, num_asking: int, most: int, curve: list[float], num_in_run: int,
        *, ends_soon: bool,
    ) -> int:  # fmt: skip
        """The number of draft tokens to try.

        ``chances`` are the acceptance chances in the order of trial, of ``num_asking`` sequences with at most ``most``
        each; with those that only decode there are ``num_sequences``. ``curve`` has the times of their steps
        (`StepTimes.curve`). ``num_in_run`` counts the directly preceding steps with drafts. ``ends_soon`` means that no
        sequence has room for ``most``; if steps are short, nothing is recorded for so few tokens.
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
