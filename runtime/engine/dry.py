"""DRY ("don't repeat yourself"): tokens that would go on repeating what the text has said before are penalised.

The penalty is multiplier * base ** (length - allowed length), where the length is that of the longest end of the text
that has occurred before with this token after it. Ends do not reach over a sequence breaker. It depends on the known
tokens alone. p-e-w, "DRY: A modern repetition penalty", github.com/oobabooga/text-generation-webui/pull/5677; equal to
llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from numba_kernels.sampler_chain import MAX_PENALTY
from runtime.engine.checks import is_integer
from runtime.engine.errors import RequestError

MOST_BREAKER_IDS = 1 << 20
"""Most ids of a request's breakers together."""
_LOG_LARGEST = np.float32(88.7228391)  # ln of the largest float32


class DryBreakers(msgspec.Struct, frozen=True, kw_only=True):
    """Sequence breakers as token ids.

    token_ids  tokens that hold a breaker: never penalised, and a repetition begins after them
    sequences  breakers of several tokens; the text of the first may begin before the breaker

    Raises ``RequestError``.
    """

    token_ids: list[int] = []
    sequences: list[list[int]] = []

    def __post_init__(self) -> None:
        lists = [self.token_ids, *self.sequences]
        if not all(isinstance(each, list) and all(map(is_integer, each)) for each in lists):
            raise RequestError("dry_breakers must hold lists of token ids", param="dry_breakers")
        if any(len(each) < 2 for each in self.sequences):
            raise RequestError("dry_breakers.sequences must have two ids or more each", param="dry_breakers")
        if sum(map(len, lists)) > MOST_BREAKER_IDS:
            raise RequestError(f"dry_breakers must hold at most {MOST_BREAKER_IDS} ids", param="dry_breakers")


NO_BREAKERS = DryBreakers()


class Dry:
    """The penalties of one sequence, with the numbers of ``runtime.sampling_table``."""

    def __init__(self, numbers: Mapping[str, float], breakers: DryBreakers, prompt_ids: NDArray[np.int32]) -> None:
        self._multiplier, self._base = np.float32(numbers["dry_multiplier"]), np.float32(numbers["dry_base"])
        self._allowed, self._last_n = int(numbers["dry_allowed_length"]), int(numbers["dry_penalty_last_n"])
        self._prompt = prompt_ids if self._last_n < 0 else prompt_ids[max(0, len(prompt_ids) - self._last_n) :]
        self._singles = np.unique(np.array(breakers.token_ids, np.int32))
        self._tails: dict[int, list[list[int]]] = {}
        for first, *rest in breakers.sequences:
            self._tails.setdefault(first, []).append(rest)
        self._heads = np.array(sorted(self._tails), np.int32)
        self._most = int(_LOG_LARGEST / np.log(self._base)) if self._base > np.float32(1.000001) else 0

    def most_ids(self, num_outputs: int) -> int:
        """An upper bound of the ids that are penalised after so many output tokens."""
        known = len(self._prompt) + num_outputs
        return known if self._last_n < 0 else min(known, self._last_n)

    def penalties(self, output_ids: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Different ids, and what is subtracted from the logit of each."""
        known = np.concatenate((self._prompt, output_ids))
        latest = known[::-1] if self._last_n < 0 else known[len(known) - min(len(known), self._last_n) :][::-1]
        if len(latest) <= self._allowed:
            return _NOTHING
        limit = self._limit(latest)
        if limit < self._allowed:
            return _NOTHING
        most = limit
        if self._most or self._base == np.float32(1.0):  # longer repetitions have the same penalty
            most = min(limit, self._allowed + self._most)
        lengths: dict[int, int] = {}
        places = np.arange(1, len(latest))  # an earlier end of the text, and the token before it comes next
        length = 0
        while True:
            if length >= self._allowed:
                lengths.update(dict.fromkeys(latest[places - 1].tolist(), length))
            if length == most or not len(places):
                break
            places = places[places + length < len(latest)]
            places = places[latest[places + length] == latest[length]]
            length += 1
        ids = np.array(list(lengths), np.int32)
        exponents = np.fromiter(lengths.values(), np.int64, len(lengths)) - self._allowed
        if self._most:
            exponents = np.minimum(exponents, self._most)
        values = np.minimum(float(self._multiplier) * np.float64(self._base) ** exponents, MAX_PENALTY)
        is_free = np.isin(ids, self._singles)
        return ids[~is_free], values[~is_free].astype(np.float32)

    def _limit(self, latest: NDArray[np.int32]) -> int:
        """The length of the text after the latest breaker."""
        singles = np.isin(latest, self._singles).nonzero()[0]
        first_single = int(singles[0]) if len(singles) else len(latest)
        for place in np.isin(latest, self._heads).nonzero()[0].tolist():
            if place > first_single:
                break
            longest = max((len(rest) for rest in self._tails[int(latest[place])] if _follows(latest, place, rest)),
                          default=-1)  # fmt: skip
            if longest >= 0:
                return place - longest
        return first_single


_NOTHING = np.empty(0, np.int32), np.empty(0, np.float32)


def _follows(latest: NDArray[np.int32], place: int, rest: list[int]) -> bool:
    """Whether these ids come after a place of the reversed text."""
    return len(rest) <= place and latest[place - len(rest) : place][::-1].tolist() == rest
