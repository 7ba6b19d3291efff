"""Shared bytes: how many tensors hold them, when they go, and who may write."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from runtime.device.device import CPU
from runtime.errors import InvalidArgumentError, OutOfMemoryError
from runtime.tensor.storage import ALIGNMENT_BYTES, LARGE_BYTES, Storage
from runtime.tensor.tensor import Tensor


def test_reference_count_is_the_number_of_tensors() -> None:
    tensor = Tensor.zeros((4, 6))
    storage = tensor.storage
    assert storage.reference_count == 1
    views = [tensor.view(24), tensor.transpose(0, 1), tensor[1:, ::-2], tensor[0, 0], tensor.expand(3, 4, 6)]
    assert all(view.storage is storage for view in views)
    assert storage.reference_count == 6
    again = views[0][None]
    del views
    assert storage.reference_count == 2
    also_mine = storage  # a name for the storage is not a tensor, nor is a numpy view
    array = tensor.array
    assert also_mine.reference_count == 2
    del tensor, again
    assert storage.reference_count == 0
    assert array.sum() == 0


def test_memory_goes_with_the_last_holder() -> None:
    class Bytes(bytearray):
        """Memory that a weak reference can watch."""

    source = Bytes(np.ones((8, 4), np.float32).tobytes())
    watch = weakref.ref(source)
    tensor = Tensor.from_numpy(np.frombuffer(source, np.float32).reshape(8, 4))
    view = tensor[2:4].transpose(0, 1)
    del source, tensor
    gc.collect()
    assert watch() is not None
    array = view.numpy()
    storage = weakref.ref(view.storage)
    del view
    gc.collect()
    assert storage() is None  # ours is gone; the bytes stay for who still looks at them
    assert watch() is not None
    assert array.sum() == 8
    del array
    gc.collect()
    assert watch() is None


def test_reference_count_survives_threads() -> None:
    tensor = Tensor.zeros((64,))

    def churn() -> None:
        for _ in range(2000):
            tensor[1:][1:]

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tensor.storage.reference_count == 1


@pytest.mark.parametrize("size_bytes", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 10**6])
def test_allocation(size_bytes: int) -> None:
    storage = Storage.allocate(CPU, size_bytes)
    assert (storage.size_bytes, storage.device, storage.is_read_only) == (size_bytes, CPU, False)
    tensor = Tensor.empty(size_bytes, "u8")
    tensor.array[...] = 255
    assert tensor.array.sum() == 255 * size_bytes
    assert size_bytes < LARGE_BYTES or tensor.array.ctypes.data % ALIGNMENT_BYTES == 0


def test_no_memory_is_our_error() -> None:
    for shape in ((1 << 62,), (1 << 40, 1 << 40)):
        with pytest.raises(OutOfMemoryError, match=r"cpu: no memory for \d+ bytes"):
            Tensor.empty(shape)


def test_a_mapped_file_stays_where_it_is(tmp_path: Path) -> None:
    """As weights come: read-only, at an odd address, closed by whoever opened it."""
    path = tmp_path / "weights"
    path.write_bytes(b"\7" + np.arange(6, dtype=np.float32).tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(mapped, np.float32, 6, 1).reshape(2, 3)
    address = array.ctypes.data
    tensor = Tensor.from_numpy(array)
    del array, mapped
    gc.collect()
    assert address % 4 == 1
    assert tensor.array.ctypes.data == address
    assert tensor.is_read_only
    assert tensor.transpose(0, 1).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (tensor @ tensor.transpose(0, 1)).tolist() == [[5, 14], [14, 50]]
    for write in (lambda: tensor[0].array.fill(1), lambda: tensor.numpy().fill(1)):
        with pytest.raises(ValueError, match="read-only"):
            write()
    for view in (tensor, tensor[1], tensor.view(-1), tensor[::-1]):
        with pytest.raises(InvalidArgumentError, match="read-only"):
            view[...] = 1
    copy = tensor.clone()
    copy[0] = 9
    assert copy.tolist() == [[9, 9, 9], [3, 4, 5]]
    assert not copy.is_read_only
    assert tensor.to("bf16").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_expanded_tensor_is_read_only_and_its_rows_are_not() -> None:
    tensor = Tensor.zeros((1, 3))
    wide = tensor.expand(4, 3)
    assert wide.is_read_only
    assert not wide.array.flags.writeable
    with pytest.raises(InvalidArgumentError, match="read-only"):
        wide[...] = 1
    wide[2, 1] = 5
    assert tensor.tolist() == [[0, 5, 0]]
