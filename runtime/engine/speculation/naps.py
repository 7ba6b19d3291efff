"""Pauses in speculation, for steps so short that even looking for drafts has a noticeable cost."""

from __future__ import annotations

SHARE_LOOKING = 0.004
"""Fraction of the steps' time that fruitless looks may take."""

FIRST_STEPS = 8
"""Steps of the first nap. Each may be half as long again as the previous one, so that new gains are noticed soon."""

MOST_STEPS = 512
"""Most steps without a look."""

_UNSEEN_S = 5e-5
"""The unmeasured part of a look's cost, in seconds: the step is reported afterwards, by cold Python code (40 to 60
microseconds on Zen 3)."""

_PAUSE = 2
"""Steps between one with drafts and timed ones: the first takes longer if steps are short."""

_NUM_SEEN = 2
"""Timed steps at a nap's end, for the time of a step without a look. The second is timed, from the first's end."""


class Naps:
    """After a fruitless look, skips so many steps that looking takes its fraction of the time, until drafts pay.

    is_asleep   whether the latest step is skipped
    num_resting  steps at the start of a nap that are not reported
    takes_naps  whether a step with a look takes longer than one without
    """

    def __init__(self) -> None:
        self.is_asleep = False
        self._left = 0
        self._length = 0  # of the previous nap

    @property
    def takes_naps(self) -> bool:
        return self._length > 0

    @property
    def is_seen(self) -> bool:
        """Whether the latest step is timed; resting steps are not."""
        return not self.is_asleep or self._left < _NUM_SEEN

    @property
    def num_resting(self) -> int:
        return max(0, self._length - _NUM_SEEN)

    def sleeps_on(self) -> bool:
        """Whether the next timed step is skipped."""
        self.is_asleep = self._left > 0
        if self.is_asleep:
            self._left -= 1
        return self.is_asleep

    def begin(self, spent_s: float, plain_s: float) -> int:
        """Begin a nap after a fruitless look that took ``spent_s``; a plain step takes ``plain_s``. Returns its length
        in steps, or 0 for none. ``sleeps_on`` is called only at its end, after ``num_resting`` steps."""
        least = int((spent_s + _UNSEEN_S) / (SHARE_LOOKING * plain_s))
        self._length = min(MOST_STEPS, least, max(FIRST_STEPS, 3 * self._length // 2)) if least > 2 else 0
        self.is_asleep = self._length > 0
        self._left = min(self._length, _NUM_SEEN)
        return self._length

    def pause(self) -> int:
        """Begin a short nap while drafts pay: plain steps take their usual time again after a few of their kind.
        Returns how many steps are not reported."""
        self.is_asleep, self._left = True, _NUM_SEEN
        return _PAUSE

    def end(self) -> None:
        """A look was fruitful, or drafts paid."""
        self.is_asleep = False
        self._left = self._length = 0
