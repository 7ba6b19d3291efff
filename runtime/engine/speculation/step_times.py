"""Measured times of decode steps: plain ones by their sequences, those with drafts by their tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

_KEPT = 8
_QUARTER = 4
"""The lower quartile of the latest times is used, since others use the machine, too."""

_STALE_STEPS = 512
"""Steps without a measurement after which a time is dropped: contexts have grown."""

_UNMEASURED = 8
"""Unmeasured steps that age a time as much as a measured one: some 4,000 of them make it stale, a second if steps are
so short that most are skipped."""

_GUESS, _GUESS_OF_TOKEN, _LEAST = 0.03, 0.5, 0.01
"""The guessed cost of a token, as fractions of a plain step and of a plain step's cost a token (the smaller is used),
while less than two steps with drafts are known; beyond two, half of the cost a token between them, and at least the
last. The guess is too low on purpose, so that promising lengths are tried."""

ANY_S = 1.5e-4
"""Seconds that any draft adds to a step, mostly in Python, until measured. At most half of the cost of the shortest
known draft."""

_DOUBT = 0.5
"""The share of a step's cost over a plain one that is left out after one measurement, which may be disturbed, and
half of it after two. So a step that seemed slow once is tried again."""

_NEAR = 0.15
"""Relative distance in tokens within which a step's time applies to another: less than a tile of products."""

WIDTHS = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 257, 16))
"""Draft tokens that a step may have in all. Steps of the same shape run from one recording."""


_FASTER = 0.7
"""A plain step that takes so much of the known time shows that the machine's speed has changed: earlier times are
dropped."""


_Curve = tuple[int, int, int, list[float]]
"""Number of sequences; most draft tokens; the step at which it is remade; the times."""

_NO_CURVE: _Curve = (0, 0, 0, [])


class _Times:
    """The latest times of one kind of steps."""

    __slots__ = ("latest", "seconds", "seen")

    def __init__(self) -> None:
        self.seen: deque[float] = deque(maxlen=_KEPT)
        self.seconds = 0.0  # the quantile
        self.latest = 0

    def note(self, seconds: float, number: int) -> None:
        self.seen.append(seconds)
        self.seconds = sorted(self.seen)[len(self.seen) // _QUARTER]
        self.latest = number


class _TriedTimes(_Times):
    """Each time beside that of plain steps then, with their number of sequences. Cores are slower when others use them,
    and plain steps, which are timed all the time, show by how much."""

    __slots__ = ("beside", "now")

    def __init__(self) -> None:
        super().__init__()
        self.beside: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self.now: float | None = None  # at the current speed of plain steps; None until computed


class StepTimes:
    """Seconds from the end of one step of decodes to the end of the next, everything in between included."""

    def __init__(self) -> None:
        self._number = 0
        self._passed = 0.0  # steps that count beside the measured ones
        self._plain: dict[int, _Times] = {}  # by sequences
        self._tried: dict[int, _TriedTimes] = {}  # by tokens
        self._shapes: dict[tuple[int, int], int] = {}
        self._curve = _NO_CURVE

    def observe(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Record a step of so many sequences and draft tokens. The first of its shape may have been recorded, and is
        ignored."""
        is_known = self.is_known(num_sequences, num_drafts)
        self._number += 1
        self._shapes[num_sequences, num_drafts] = self._number
        if is_known and num_drafts:
            tried = self._tried.get(num_sequences + num_drafts)
            if tried is None:
                tried = self._tried[num_sequences + num_drafts] = _TriedTimes()
            elif self._is_stale(tried):
                tried.seen.clear()
                tried.beside.clear()
            if len(tried.seen) < _KEPT:
                self._curve = _NO_CURVE
            tried.beside.append((num_sequences, self.plain(num_sequences) or 0.0))
            tried.note(seconds, self._number + int(self._passed))
            tried.now = None
        elif is_known:
            times = self._plain.get(num_sequences)
            if times is None:
                times = self._plain[num_sequences] = _Times()
            elif self._is_stale(times) or seconds < _FASTER * times.seconds:
                times.seen.clear()
            times.note(seconds, self._number + int(self._passed))
            self._curve = _NO_CURVE
            for tried in self._tried.values():
                tried.now = None

    def pass_by(self, num_steps: int) -> None:
        """Age the times by so many unmeasured steps, so that old or disturbed ones are dropped."""
        self._passed += num_steps / _UNMEASURED
        self._curve = _NO_CURVE

    def is_known(self, num_sequences: int, num_drafts: int) -> bool:
        """Whether a step of this shape was seen, not too long ago."""
        return self._number - self._shapes.get((num_sequences, num_drafts), -_STALE_STEPS) < _STALE_STEPS

    def plain(self, num_sequences: int) -> float | None:
        """Seconds of a plain step, or None if unknown."""
        times = self._plain.get(num_sequences)
        return None if times is None or self._is_stale(times) else times.seconds

    def tried(self, num_tokens: int) -> float | None:
        """Seconds of a step with drafts, by all its tokens, at the current speed of plain steps; None if unknown."""
        times = self._tried.get(num_tokens)
        if times is None or self._is_stale(times):
            return None
        if times.now is None:
            found, now, known_for = [], None, 0
            for seconds, (num_sequences, before) in zip(times.seen, times.beside, strict=True):
                if num_sequences != known_for:  # usually all have the same number
                    now, known_for = self.plain(num_sequences), num_sequences
                found.append(seconds * now / before if now is not None and before > 0.0 else seconds)
            times.now = sorted(found)[len(found) // _QUARTER]
        return times.now

    def is_timed(self, num_tokens: int) -> bool:
        """Whether a step with drafts was timed with so many tokens, or within `_NEAR` of them."""
        return any(
            abs(tokens - num_tokens) <= _NEAR * num_tokens and not self._is_stale(times)
            for tokens, times in self._tried.items()
        )

    def most_tokens(self, num_sequences: int) -> int:
        """Tokens of the longest steps with known times."""
        known = (tokens for tokens, times in self._tried.items() if not self._is_stale(times))
        return max(num_sequences, *known, 0)

    def curve(self, num_sequences: int, most: int = WIDTHS[-1]) -> list[float]:
        """Seconds of a plain step, then with each of ``WIDTHS`` up to the first that is ``most`` or more; empty while
        the plain time is unknown. Interpolated linearly between known times; beyond them guessed too low. If all are
        well known it is kept for a few steps: making it takes a part of a short one."""
        kept_sequences, kept_most, until, kept = self._curve
        if kept_sequences == num_sequences and kept_most == most and self._number < until:
            return kept
        plain = self.plain(num_sequences)
        if plain is None:
            return []
        points = [(num_sequences, plain + ANY_S)]
        for tokens in sorted(self._tried):
            seconds = self.tried(tokens)
            if tokens > num_sequences and seconds is not None:
                doubt = _DOUBT ** len(self._tried[tokens].seen)
                points.append((tokens, plain + max(0.0, seconds - plain) * (1.0 - doubt)))
        if len(points) > 1:
            points[0] = num_sequences, plain + min(ANY_S, 0.5 * (points[1][1] - plain))
        curve, places = [plain], [tokens for tokens, _ in points]
        guess = plain * min(_GUESS, _GUESS_OF_TOKEN / num_sequences)
        for width in WIDTHS[: 1 + bisect_left(WIDTHS, most)]:
            tokens = num_sequences + width
            place = bisect_left(places, tokens)
            if place == len(points):
                last, seconds = points[-1]
                slope = guess
                if len(points) > 1:
                    before, earlier = points[-2]
                    each = (seconds - earlier) / (last - before)
                    # Any draft may have a fixed cost, which is in the first of two slopes.
                    slope = max(_LEAST * plain, 0.5 * each if len(points) > 2 else min(guess, each))
                curve.append(seconds + (tokens - last) * slope)
            else:
                (below, first), (above, second) = points[place - 1], points[place]
                curve.append(first + (tokens - below) / (above - below) * (second - first))
        self._curve = num_sequences, most, self._number + _KEPT, curve
        return curve

    def _is_stale(self, times: _Times) -> bool:
        return self._number + int(self._passed) - times.latest >= _STALE_STEPS
