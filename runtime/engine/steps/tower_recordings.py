"""Recordings of towers on GPUs by the size of pictures: launched from Python, a layer takes longer than on the device.

A size's arrays (rows, tables, pages of keys) are kept from its second picture on. Its pieces are recorded as a third
one goes through them, since all tables are there by then, and replayed for later ones: one at a time, others of its
size are computed as usual. Pictures with an adapter, and large ones, which keep the device busy longer than Python, are
not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from runtime.device.errors import LaunchError
from runtime.engine.steps.recorder import Recorder, Recording, Recordings
from runtime.errors import DeviceError, OutOfMemoryError

MOST_SIZES = 4
MOST_PATCHES = 4096
MOST_SEEN = 64  # sizes of single pictures that are remembered

T = TypeVar("T")


class RecordedSize:
    """The arrays and recordings of a size, for one picture at a time between `begin` and `end`."""

    def __init__(self, record: Callable[[Callable[[], None]], Recording | None]) -> None:
        self._record = record
        self._kept: list[Any] = []
        self._recordings: list[Recording] = []
        self._is_warm = self.is_busy = False
        self._next_kept = self._next_recording = 0

    def begin(self) -> None:
        self.is_busy, self._next_kept, self._next_recording = True, 0, 0

    def end(self, *, is_complete: bool) -> None:
        self.is_busy = False
        self._is_warm = self._is_warm or is_complete

    def keep(self, make: Callable[[], T]) -> T:
        """The value that an earlier picture made at this place."""
        if self._next_kept == len(self._kept):
            self._kept.append(make())
        self._next_kept += 1
        found: T = self._kept[self._next_kept - 1]
        return found

    def owns(self, *values: object) -> bool:
        """Whether all are kept."""
        return all(any(each is value for each in self._kept) for value in values)

    def run(self, work: Callable[[], None]) -> None:
        """Does a piece's work, which uses nothing but kept arrays and weights."""
        index = self._next_recording
        self._next_recording += 1
        if index < len(self._recordings):
            self._recordings[index].replay()
        elif not self._is_warm:
            work()
        elif (recording := self._record(work)) is not None:
            self._recordings.append(recording)

    def release(self) -> None:
        """A picture under way goes on as usual."""
        for recording in self._recordings:
            recording.release()
        self._recordings.clear()
        self._is_warm = False


class TowerRecordings:
    """The recorded sizes of one tower. Belongs to the thread that encodes."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._sizes: Recordings[tuple[int, int], RecordedSize] = Recordings(MOST_SIZES)
        self._seen: dict[tuple[int, int], None] = {}

    def begin(self, grid: tuple[int, int], adapter: int) -> RecordedSize | None:
        """The size of a picture that begins now; None if it is computed as usual."""
        if adapter >= 0 or grid[0] * grid[1] > MOST_PATCHES or self._sizes.has_given_up:
            return None
        found = self._sizes.take(grid)
        if found is None:
            if grid not in self._seen:
                self._seen[grid] = None
                if len(self._seen) > MOST_SEEN:
                    del self._seen[next(iter(self._seen))]
                return None
            found = RecordedSize(self._record)
            self._sizes.add(grid, found)
        if found.is_busy:
            return None
        found.begin()
        return found

    def _record(self, work: Callable[[], None]) -> Recording | None:
        """Does the work, and records it if that is possible."""
        if self._sizes.has_given_up:
            work()
            return None
        done = 0

        def counted() -> None:
            nonlocal done
            work()
            done += 1

        try:
            recording: Recording = self._recorder.record(counted)
        except (DeviceError, OutOfMemoryError) as error:
            self._sizes.give_up("this model's tower is not recorded", error)
            if not done or isinstance(error, LaunchError):  # else the work is done: it runs before it is recorded
                raise
            return None
        return recording

    def release(self) -> None:
        """Free them all."""
        self._sizes.clear()
