"""Towers stop within their layers: however a picture is shared out between steps, its bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.registry import load_model
from runtime.device.device import Device
from runtime.device.errors import CaptureError
from runtime.engine.steps.recorder import Recording, open_recorder
from runtime.engine.steps.tower_recordings import MOST_PATCHES, MOST_SIZES, TowerRecordings
from runtime.errors import OutOfMemoryError
from tests.models.golden_weights import golden_tensor
from tests.models.vision import cases, square_cases


def _write_qwen(folder: Path, case: str) -> Path:
    return cases.write_model(folder, case, cases.load_golden(case).shapes)


def _write_square(folder: Path, case: str) -> Path:
    return cases.write_golden(folder, case, square_cases.CASES[case])


FAMILIES: dict[str, Callable[[Path, str], Path]] = {
    "qwen3_vl": _write_qwen,
    "qwen2_5_vl": _write_qwen,
    "gemma3_rest": _write_square,
    "llava_clip_mistral": _write_square,
}


def _pictures(model: Any, case: str) -> list[tuple[np.ndarray[Any, Any], tuple[int, int]]]:
    """Two that may have different sizes: a large one, and another."""
    if case in cases.CASES:
        return [(cases.patches_of(case, index), cases.GRIDS[index]) for index in (2, 0)]
    config = getattr(model.config, "pictures", model.config).tower
    shape = (config.side**2, 3 * config.patch_size**2)
    return [(golden_tensor(f"picture.{index}.weight", shape, 21) * 20, (config.side,) * 2) for index in range(2)]


@pytest.mark.parametrize("case", FAMILIES)
def test_pieces_change_no_bit(tmp_path: Path, case: str) -> None:
    """Nor does what is computed between two of them, nor how large they are, each another one than the last."""
    model: Any = load_model(FAMILIES[case](tmp_path, case))
    picture, another = _pictures(model, case)
    whole = model.tower(*picture)
    for sizes in ((1, 1), (50, 7), (96, 1, 192), (1 << 40,)):
        encoding, other = model.tower.start(*picture), model.tower.start(*another)
        made, num_calls, other_made = None, 0, None
        while made is None:
            other_made = other_made or other.advance(33)
            before, asked = encoding.num_rows, sizes[num_calls % len(sizes)]
            made = encoding.advance(asked)
            assert made is not None or asked <= encoding.num_rows - before < asked + max(asked, 256)
            num_calls += 1
        for part, wanted in zip(made, whole, strict=True):
            assert part.numpy().tobytes() == wanted.numpy().tobytes()


class HostRecorder:
    """Replays work by doing it again; `replays` counts."""

    def __init__(self, device: str) -> None:
        self.device, self.replays = Device.parse(device), 0
        self.error: Exception | None = None
        self._gpu = None if self.device.kind == "cpu" else open_recorder(self.device)

    def record(self, work: Callable[[], None]) -> Recording:
        if self._gpu is not None:
            recording = self._gpu.record(work)
            return Counted(self, recording.replay, recording.release)
        work()
        if self.error is not None:
            raise self.error
        return Counted(self, work, lambda: None)


class Counted:
    """A recording whose replays are counted."""

    result = None

    def __init__(self, recorder: HostRecorder, work: Callable[[], None], release: Callable[[], None]) -> None:
        self._recorder, self._work, self.release = recorder, work, release

    def replay(self) -> None:
        self._recorder.replays += 1
        self._work()


def recordings_of(recorder: HostRecorder) -> TowerRecordings:
    return TowerRecordings(recorder)  # type: ignore[arg-type]


def encoded_bytes(model: Any, recordings: TowerRecordings, picture: Any) -> list[bytes]:
    """A picture's embeddings, as a store of pictures computes them."""
    size = recordings.begin(picture[1], -1)
    made = model.tower.start(*picture, keeper=size).finish()
    found = [part.to("cpu").numpy().tobytes() for part in made]
    if size is not None:
        size.end(is_complete=True)
    return found


@pytest.mark.parametrize(
    ("case", "device"),
    [
        *((case, "cpu") for case in FAMILIES),
        *(pytest.param(case, "emulated:sm_90a", marks=[pytest.mark.emulator, pytest.mark.exhaustive])
          for case in FAMILIES),
    ],
)  # fmt: skip
def test_recorded_sizes_change_no_bit(tmp_path: Path, case: str, device: str) -> None:
    """Pictures of one size, each other numbers: the first as usual, then with kept arrays, recorded, replayed."""
    model: Any = load_model(FAMILIES[case](tmp_path, case), device=device)
    (patches, grid), _ = _pictures(model, case)
    pictures = [((patches * factor).astype(patches.dtype), grid) for factor in (1, 0.5, -1, 0.25, 2)]
    expected = [[part.to("cpu").numpy().tobytes() for part in model.tower(*each)] for each in pictures]
    recorder = HostRecorder(device)
    recordings, replays = recordings_of(recorder), []
    for picture, wanted in zip(pictures, expected, strict=True):
        assert encoded_bytes(model, recordings, picture) == wanted
        replays.append(recorder.replays)
    pieces = replays[3] - replays[2]
    assert pieces >= 4, "two for each layer, at least"
    assert replays == [0, 0, 0, pieces, 2 * pieces]
    recordings.release()
    assert encoded_bytes(model, recordings, pictures[0]) == expected[0]


@pytest.mark.parametrize("error", [CaptureError("no recordings"), OutOfMemoryError("no memory for recordings")])
def test_recorded_sizes_are_few_and_one_pictures_at_a_time(error: Exception) -> None:
    recorder = HostRecorder("cpu")
    recordings = recordings_of(recorder)
    assert recordings.begin((4, 4), -1) is None, "the first picture of a size"
    size = recordings.begin((4, 4), -1)
    assert size is not None
    assert recordings.begin((4, 4), -1) is None, "another one is under way"
    size.end(is_complete=False)  # dropped before its end: its tables may lack some
    again = recordings.begin((4, 4), -1)
    assert again is size
    done: list[int] = []
    size.run(lambda: done.append(1))
    size.end(is_complete=True)
    assert recordings.begin((4, 4), 0) is None, "it has an adapter"
    assert recordings.begin((MOST_PATCHES, 2), -1) is None
    assert recordings.begin((4, 4), -1) is size
    recorder.error = error
    size.run(lambda: done.append(2))  # recorded in vain: done once all the same
    size.run(lambda: done.append(3))
    size.end(is_complete=True)
    assert done == [1, 2, 3]
    assert recordings.begin((4, 4), -1) is None, "it cannot be recorded"

    recordings = recordings_of(recorder)
    for _ in range(2):
        if (size := recordings.begin((4, 4), -1)) is not None:
            size.end(is_complete=True)
    size = recordings.begin((4, 4), -1)
    assert size is not None

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):  # the work itself fails: the picture's rows are not there
        size.run(fail)

    recordings = recordings_of(HostRecorder("cpu"))
    sizes = [(2, number) for number in range(MOST_SIZES + 1)]
    for grid in (*sizes, *sizes):
        if (found := recordings.begin(grid, -1)) is not None:
            found.end(is_complete=True)
    assert recordings.begin(sizes[-1], -1) is not None
    assert recordings.begin(sizes[0], -1) is not None, "made anew: the least recently used one went"
