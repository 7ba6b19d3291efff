"""Capsules over a GPU's memory, without a GPU: the structures are read back as a consumer would."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from runtime.device.device import Device
from runtime.dtype import ALL_DTYPES, DType, bfloat16, float32
from runtime.errors import InvalidArgumentError
from runtime.tensor import dlpack
from runtime.tensor.storage import Storage
from runtime.tensor.tensor import Tensor

ADDRESS = 0x7F00_0000_1000


class Owner:
    """Stands for a block of an allocator."""


def pretended(dtype: DType = float32, index: int = 0) -> tuple[Tensor, weakref.ref[Owner]]:
    """A [3, 4] tensor on a CUDA device that need not be there; nothing may touch its memory."""
    owner = Owner()
    storage = Storage(Device(f"cuda:{index}"), 12 * dtype.itemsize, None, owner, ADDRESS)
    return Tensor(storage, dtype, (3, 4), (4, 1)), weakref.ref(owner)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_says_what_the_tensor_is(dtype: DType, version: tuple[int, int] | None) -> None:
    tensor, _ = pretended(dtype, 1)
    view = tensor.transpose(0, 1)[1:]
    held = dlpack.Imported(view.__dlpack__(stream=-1, max_version=version))
    assert held.address == ADDRESS + dtype.itemsize
    assert (held.device_index, held.dtype, held.shape, held.strides) == (1, dtype, (3, 3), (1, 4))
    assert tensor.__dlpack_device__() == (2, 1)
    assert not held.is_read_only


def test_the_consumer_keeps_the_memory_and_its_deleter_lets_go() -> None:
    tensor, owner = pretended()
    capsule = tensor.__dlpack__(stream=-1, max_version=(1, 0))
    held = dlpack.Imported(capsule)
    del tensor, capsule
    gc.collect()
    assert owner() is not None
    del held
    gc.collect()
    assert owner() is None


def test_a_capsule_that_nobody_takes_lets_go() -> None:
    tensor, owner = pretended()
    capsule = tensor.__dlpack__(stream=-1, max_version=(1, 0))
    del tensor
    gc.collect()
    assert owner() is not None
    del capsule
    gc.collect()
    assert owner() is None


def test_a_capsule_is_consumed_once() -> None:
    capsule = pretended()[0].__dlpack__(stream=-1)
    held = dlpack.Imported(capsule)
    with pytest.raises(BufferError, match="consumed before"):
        dlpack.Imported(capsule)
    assert held.shape == (3, 4)


def test_read_only_memory_and_emulated_memory_are_refused() -> None:
    wide = pretended()[0][:1].expand(5, 4)
    with pytest.raises(BufferError, match="read-only"):
        wide.__dlpack__(stream=-1)
    assert dlpack.Imported(wide.__dlpack__(stream=-1, max_version=(1, 0))).is_read_only
    storage = Storage(Device("emulated:sm_80"), 48, None, Owner(), ADDRESS)
    emulated = Tensor(storage, float32, (3, 4), (4, 1))
    for use in (emulated.__dlpack_device__, lambda: dlpack.export(
        emulated, ADDRESS, emulated.device, float32, (3, 4), (4, 1), is_versioned=True, is_read_only=False
    )):  # fmt: skip
        with pytest.raises(BufferError, match="emulated:sm_80 is no GPU's"):
            use()
    assert not hasattr(emulated, "__cuda_array_interface__")
    assert not hasattr(Tensor.zeros(3), "__cuda_array_interface__")


def test_the_cuda_array_interface() -> None:
    described = dlpack.array_interface(
        ADDRESS, Device("cuda:0"), bfloat16, (3, 4), (1, 3), is_contiguous=False, stream=7
    )
    assert described["strides"] == (2, 6)
    assert described["data"] == (ADDRESS, False)

    class Source:
        def __init__(self, **changes: Any) -> None:
            self.__cuda_array_interface__ = described | changes

    assert dlpack.parse_array_interface(Source()) == (ADDRESS, bfloat16, (3, 4), (1, 3))
    for changes in ({"typestr": "<f8"}, {"data": (ADDRESS, True)}, {"strides": (3, 6)}, {"mask": object()}):
        with pytest.raises(InvalidArgumentError, match="from_cuda"):
            dlpack.parse_array_interface(Source(**changes))
    with pytest.raises(InvalidArgumentError, match="has no __cuda_array_interface__"):
        Tensor.from_cuda(np.zeros(3))


def test_memory_that_runs_backwards_starts_at_its_lowest_address() -> None:
    tensor = Tensor.over_device(Device("cuda:0"), ADDRESS + 44, float32, (3, 4), (-4, -1), Owner())
    assert (tensor.storage.address, tensor.storage.size_bytes, tensor.offset) == (ADDRESS, 48, 11)
    assert tensor.address == ADDRESS + 44
