"""Mapped files and other arrays: what part of a file one is, and how it comes to a device."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from runtime.device.gpu import Gpu
from runtime.device.host_copies import HostCopies
from runtime.device.pinned import LEAST_BYTES, PIECE_BYTES, FileMapping, PinnedBlock, mapped_part, upload_pieces
from runtime.tensor.tensor import Tensor

SIZE = 3 * PIECE_BYTES + 12_345


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "weights"
    found.write_bytes(np.random.default_rng(1).integers(0, 256, SIZE, np.uint8).tobytes())
    return found


def mapping_of(path: Path) -> FileMapping:
    with path.open("rb") as file:
        return FileMapping(file.fileno(), str(path))


def test_an_array_knows_its_place_in_the_file(path: Path) -> None:
    mapping = mapping_of(path)
    array = np.frombuffer(mapping, "<u2", 600, 7 * 2 + 1).reshape(30, 20)
    for part, offset in ((array, 15), (array[3:5], 15 + 3 * 40), (array[2].view(np.uint8)[4:], 15 + 2 * 40 + 4)):
        assert mapped_part(part) == (mapping, offset)
        assert path.read_bytes()[offset:][: part.nbytes] == part.tobytes()
    assert mapped_part(Tensor.from_numpy(array[3:5].view(np.float16)).array) == (mapping, 15 + 3 * 40)
    for other in (array[:, :3], array.T, array.copy(), array[:0], np.zeros(3), np.frombuffer(b"1234", np.uint8)):
        assert mapped_part(other) is None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plain:
        assert mapped_part(np.frombuffer(plain, np.uint8)) is None


def test_the_file_is_closed_with_its_mapping(path: Path) -> None:
    mapping = mapping_of(path)
    descriptor, array = mapping.descriptor, np.frombuffer(mapping, np.uint8)
    del mapping
    gc.collect()
    assert os.fstat(descriptor).st_size == array.size
    del array
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_that_has_become_shorter(path: Path) -> None:
    mapping, target = mapping_of(path), np.zeros(100, np.uint8)
    mapping.read_into(target, SIZE - 100)
    assert target.tobytes() == path.read_bytes()[-100:]
    os.truncate(path, SIZE - 10)
    with pytest.raises(OSError, match=f"ends at byte {SIZE - 10}, shorter than it was") as caught:
        mapping.read_into(target, SIZE - 100)
    assert caught.value.filename == str(path)


@pytest.mark.emulator
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_part_of_a_file_comes_to_the_device(path: Path, num_threads: int) -> None:
    gpu, mapping, offset = Gpu.of("emulated"), mapping_of(path), 77
    block = gpu.allocate(SIZE)
    starts: list[int] = []

    def copy(start: int, piece: PinnedBlock) -> None:
        starts.append(start)
        gpu.upload(block.address + start, piece, stream=gpu.stream)

    def fill(target: np.ndarray, start: int) -> None:
        mapping.read_into(target, offset + start)

    gpu.fill(block.address, 0, SIZE)
    size = SIZE - offset - 5
    upload_pieces(size, fill, copy, gpu.pinned, gpu.stream, num_threads)
    assert sorted(starts) == list(range(0, size, PIECE_BYTES))
    found = np.empty(SIZE, np.uint8)
    gpu.read(block.address, found)
    assert found[:size].tobytes() == path.read_bytes()[offset:][:size]
    assert not found[size:].any()


@pytest.mark.emulator
def test_large_weights_are_read_and_small_ones_are_not(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def read_into(self: FileMapping, target: np.ndarray, offset: int) -> None:
        reads.append(target.size)
        _read_into(self, target, offset)

    _read_into = FileMapping.read_into
    monkeypatch.setattr(FileMapping, "read_into", read_into)
    array = np.frombuffer(mapping_of(path), np.float16, SIZE // 2).reshape(-1, 2)
    target = Tensor.empty((len(array) + 1, 2), Tensor.from_numpy(array).dtype, Gpu.of("emulated").device)
    target[1:] = Tensor.from_numpy(array)
    assert sum(reads) == array.nbytes
    assert np.array_equal(target[1:].to("cpu").array.view(np.uint16), array.view(np.uint16))
    reads.clear()
    few = Tensor.from_numpy(array[: LEAST_BYTES // 4 - 1]).to("emulated")
    assert not reads
    assert np.array_equal(few.to("cpu").array.view(np.uint16), array[: few.shape[0]].view(np.uint16))


@pytest.mark.emulator
def test_what_a_reader_meets_is_raised(path: Path) -> None:
    gpu, mapping = Gpu.of("emulated"), mapping_of(path)
    array = np.frombuffer(mapping, np.uint8)
    block = gpu.allocate(SIZE)
    os.truncate(path, PIECE_BYTES)
    with pytest.raises(OSError, match="shorter than it was"):
        gpu.write(block.address, array)
    gpu.synchronize()


@pytest.mark.emulator
@pytest.mark.parametrize("size", [0, 1, LEAST_BYTES - 1, LEAST_BYTES, SIZE])
def test_arrays_of_all_sizes(size: int) -> None:
    gpu, array = Gpu.of("emulated"), np.random.default_rng(size).integers(0, 256, size + 1, np.uint8)[1:]
    block, found = gpu.allocate(size), np.empty(size, np.uint8)
    gpu.write(block.address, array)
    array[:] = 0  # may be changed as soon as `write` returns
    if size:
        gpu.read(block.address, found)
    assert np.array_equal(found, np.random.default_rng(size).integers(0, 256, size + 1, np.uint8)[1:])


@pytest.mark.emulator
def test_uploads_from_copies_in_pinned_memory(path: Path) -> None:
    gpu, wanted = Gpu.of("emulated"), path.read_bytes()
    copies = HostCopies(gpu.pinned)
    large, small = LEAST_BYTES + 3, 100

    def load() -> list[bytes]:
        whole = np.frombuffer(mapping_of(path), np.uint8)
        with gpu.uploading_from(copies):
            made = [Tensor.from_numpy(part).to("emulated") for part in (whole[5 : 5 + large], whole[9 : 9 + small])]
            Tensor.from_numpy(np.ones(small, np.uint8)).to("emulated")  # of no file
        Tensor.from_numpy(whole[:small]).to("emulated")  # after the block
        return [each.to("cpu").array.tobytes() for each in made]

    expected = [wanted[5 : 5 + large], wanted[9 : 9 + small]]
    assert load() == expected
    assert copies.size_bytes == 0
    copies.make()
    assert copies.size_bytes == large + small
    reserved = gpu.pinned.reserved_bytes
    with path.open("r+b") as file:  # the copies are read, not the file
        file.write(bytes(SIZE))
    assert load() == expected
    copies.make()
    assert load() == expected
    assert gpu.pinned.reserved_bytes == reserved
    copies.drop()
    assert copies.size_bytes == 0
    assert load() == [bytes(large), bytes(small)]
    os.truncate(path, 10)
    with pytest.raises(OSError, match="shorter than it was"):
        copies.make()
    assert copies.size_bytes == 0
    gpu.pinned.check_integrity()
