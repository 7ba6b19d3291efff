"""Checks of an operation's arguments, each an error that names the operation and the argument.

All arguments are checked before the first launch. `runtime.ops` checks the rules common to all devices; a backend
checks those of its kernels.
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cpu.running.recording import current
from runtime.device.device import CPU, Device
from runtime.dtype import DType
from runtime.errors import InvalidArgumentError
from runtime.sampling_arrays import SAMPLING_FIELDS, Int32Array, SamplingArrays
from runtime.tensor.tensor import Tensor
from runtime.tensor.views import contiguous_strides


def fail(op: str, argument: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{op}: {argument} {message}", param=argument)


def check(
    op: str,
    argument: str,
    tensor: Tensor,
    device: Device,
    dtype: DType | tuple[DType, ...],
    shape: tuple[int | None, ...],
) -> None:
    """Raises unless the tensor is C-contiguous, on this device, of this type and shape (None = any size).

    A recording on the cpu notes that the tensor's memory is used.
    """
    if not isinstance(tensor, Tensor):
        raise fail(op, argument, f"must be a Tensor, not {type(tensor).__name__}")
    found = tensor.device
    if found is not device and found != device:
        raise fail(op, argument, f"is on {tensor.device}, the other arguments are on {device}")
    if tensor.dtype is not dtype:
        dtypes = (dtype,) if isinstance(dtype, DType) else dtype
        if tensor.dtype not in dtypes:
            raise fail(op, argument, f"is {tensor.dtype.name}, must be {' or '.join(d.name for d in dtypes)}")
    actual = tensor.shape
    if actual != shape:  # a plain loop: this function runs hundreds of times a step
        does_fit = len(actual) == len(shape)
        for want, got in zip(shape, actual):
            if want is not None and want != got:
                does_fit = False
        if not does_fit:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise fail(op, argument, f"has shape {actual}, must be [{wanted}]")
    is_on_cpu = found is CPU or found.kind == "cpu"
    if is_on_cpu:
        is_contiguous = tensor.array.flags.c_contiguous
    else:
        is_contiguous = tensor.strides == contiguous_strides(actual) or tensor.is_contiguous
    if not is_contiguous:
        raise fail(op, argument, f"has strides {tensor.strides}, must be C-contiguous")
    if is_on_cpu and (recording := current()) is not None:
        recording.lives_on(tensor.storage, tensor.address, tensor.size_bytes, f"{op}: {argument}")


def check_rows(
    op: str, argument: str, tensor: Tensor, device: Device, dtype: DType | tuple[DType, ...],
    shape: tuple[int | None, int],
) -> None:  # fmt: skip
    """`check` of ``[T, N]`` that may be columns of wider rows."""
    if isinstance(tensor, Tensor) and tensor.ndim == 2 and not tensor.is_contiguous and tensor.strides[1] == 1:
        if shape[0] not in (None, tensor.shape[0]):
            raise fail(op, argument, f"has shape {tensor.shape}, must be [{shape[0]}, {shape[1]}]")
        tensor, shape = tensor[:1], (1, shape[1])
    check(op, argument, tensor, device, dtype, shape)


_LISTS = ("prompt", "prompt_ids"), ("output", "output_ids"), ("bias", "bias_ids"), ("chain", "chain_words")


def check_sampling(op: str, rows: int, vocab: int, params: SamplingArrays) -> None:
    """Raises InvalidArgumentError where an array of the parameters is not what ``logits [rows, vocab]`` need."""
    mask_words = -(-vocab // 32)
    for name, dtype, shape in SAMPLING_FIELDS:
        value = getattr(params, name)
        wanted = (rows,) if shape == "n" else value.shape[:1]
        if value.dtype != dtype or value.shape != wanted or not value.flags.c_contiguous:
            raise fail(op, f"params.{name}", f"is {value.dtype} {value.shape}, must be contiguous {dtype} {wanted}")
    for name, ids in _LISTS if rows else ():
        start, end = getattr(params, f"{name}_start"), getattr(params, f"{name}_end")
        size = getattr(params, ids).size
        if not size and not np.count_nonzero(start) and not np.count_nonzero(end):
            continue  # nearly always
        if start.min() < 0 or end.max() > size or (start > end).any():
            raise fail(op, f"params.{name}_end", f"must lie between {name}_start, from 0 on, and the {size} {ids}")
    if params.bias_values.size != params.bias_ids.size:
        raise fail(op, "params.bias_values", f"has {params.bias_values.size} entries, bias_ids {params.bias_ids.size}")
    mask = params.allowed_mask
    fits = mask is None or (mask.dtype == np.uint32 and mask.shape == (rows, mask_words) and mask.flags.c_contiguous)
    if mask is not None and not fits:
        raise fail(op, "params.allowed_mask", f"is {mask.dtype} {mask.shape}, must be uint32 {(rows, mask_words)}")
    if rows and vocab == 0:
        raise fail(op, "logits", "has no columns")


def check_chosen(op: str, rows: int, vocab: int, chosen: Int32Array, top_n: int) -> None:
    """Raises InvalidArgumentError where `chosen` is not an id a row, or `top_n` more than there are."""
    if chosen.dtype != np.int32 or chosen.shape != (rows,) or not chosen.flags.c_contiguous:
        raise fail(op, "chosen", f"is {chosen.dtype} {chosen.shape}, must be contiguous int32 ({rows},)")
    if rows and (chosen.min() < 0 or chosen.max() >= vocab):
        raise fail(op, "chosen", f"holds {chosen.min()} to {chosen.max()}, must lie in 0 to {vocab - 1}")
    if not 0 <= top_n <= vocab:
        raise fail(op, "top_n", f"is {top_n}, must lie in 0 to {vocab}")
