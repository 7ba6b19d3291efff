"""Steps in which speculation does nothing at all, where steps are so short that even a look costs something."""

from __future__ import annotations

SHARE_LOOKING = 0.004
"""Of the steps' time that looks may take while nothing comes of them."""

FIRST_STEPS = 8
"""Of the first nap. Each may be half as long again as the one before: what proposals are worth is to be known soon."""

MOST_STEPS = 512
"""Without a look."""

_UNSEEN_S = 5e-5
"""What a look costs beside what is seen of it: the step is asked about afterwards, by Python that has not run for long
(40 to 60 microseconds on Zen 3)."""

_PAUSE = 2
"""Steps between one with proposals and those whose time is taken: the first takes longer where steps are short."""

_NUM_SEEN = 2
"""At a nap's end, steps whose time is taken: what a step takes that nobody asks. The second is timed, from the first's
end."""


class Naps:
    """After a look of which nothing came, so many steps are left out that looking takes its share of the time, until
    proposals pay.

    is_asleep   whether the step that was asked for last is left out
    num_resting  steps of the nap that begins of which nothing is asked
    takes_naps  whether a step that is looked at takes longer than one that is not
    """

    def __init__(self) -> None:
        self.is_asleep = False
        self._left = 0
        self._length = 0  # of the nap before

    @property
    def takes_naps(self) -> bool:
        return self._length > 0

    @property
    def is_seen(self) -> bool:
        """Whether the time of the step that was asked for last is taken, which is none of those that rest."""
        return not self.is_asleep or self._left < _NUM_SEEN

    @property
    def num_resting(self) -> int:
        return max(0, self._length - _NUM_SEEN)

    def sleeps_on(self) -> bool:
        """Whether the next step is left out, of those whose time is taken."""
        self.is_asleep = self._left > 0
        if self.is_asleep:
            self._left -= 1
        return self.is_asleep

    def begin(self, spent_s: float, plain_s: float) -> int:
        """A look took so long, and nothing is tried; a step without proposals takes ``plain_s``. Returns the length of
        the nap that begins, 0: none does. ``sleeps_on`` is asked at its end alone, behind ``num_resting`` steps."""
        least = int((spent_s + _UNSEEN_S) / (SHARE_LOOKING * plain_s))
        self._length = min(MOST_STEPS, least, max(FIRST_STEPS, 3 * self._length // 2)) if least > 2 else 0
        self.is_asleep = self._length > 0
        self._left = min(self._length, _NUM_SEEN)
        return self._length

    def pause(self) -> int:
        """A short nap, in which proposals pay: steps without them take their time again behind a few of their kind.
        Returns how many steps come of which nothing is asked."""
        self.is_asleep, self._left = True, _NUM_SEEN
        return _PAUSE

    def end(self) -> None:
        """Something came that is worth a look, or proposals paid."""
        self.is_asleep = False
        self._left = self._length = 0
