"""The check's kernel table: each case verified on its input, ours and torch's, and only then timed, taking turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from runtime.bench.kernels.cases import (
    Case,
    Prepared,
    attention_case,
    layer_norm_case,
    product_case,
    rms_norm_case,
    softmax_case,
    swiglu_case,
)
from runtime.bench.kernels.table import error_share, prepare, row_of, timed, verify
from runtime.bench.kernels.timing import Stopwatch
from runtime.device.gpu import Gpu


def cases(is_quick: bool) -> Iterator[Case]:
    """Ladders of tiers at one shape, then the shapes that serving has; `is_quick`: small enough to emulate."""
    if is_quick:
        for tier, dtype in (("naive", "f32"), ("tensor_core", "bf16")):
            yield product_case(tier, 32, 48, 64, dtype)
        yield product_case("auto", 1, 64, 128, "bf16")
        yield attention_case("naive", "f32", 1, 0, 17, 4, 2, 32)
        yield attention_case("auto", "bf16", 1, 0, 33, 4, 2, 64)
        yield attention_case("auto", "bf16", 2, 40, 1, 4, 2, 64)
        yield rms_norm_case(4, 128)
        yield layer_norm_case(4, 128)
        yield swiglu_case(4, 64)
        yield softmax_case(2, 300)
        return
    for tier, dtype in (
        ("naive", "f32"), ("tiled", "f32"), ("register", "f32"),
        ("naive", "bf16"), ("tiled", "bf16"), ("register", "bf16"), ("tensor_core", "bf16"),
    ):  # fmt: skip
        yield product_case(tier, 2048, 2048, 2048, dtype)
    yield product_case("auto", 4096, 4096, 4096, "bf16")
    yield product_case("auto", 2048, 6144, 4096, "bf16")
    for rows in (1, 4, 16, 64, 256):
        yield product_case("auto", rows, 4096, 4096, "bf16")
    for rows in (1, 32):
        yield product_case("auto", rows, 24576, 4096, "bf16")
        yield product_case("auto", rows, 2304, 768, "bf16")
    yield product_case("auto", 512, 3072, 768, "f32")
    yield attention_case("naive", "bf16", 1, 0, 1024, 16, 8, 128)
    yield attention_case("flash", "f32", 1, 0, 1024, 12, 12, 64)
    yield attention_case("auto", "bf16", 1, 0, 8192, 32, 8, 128)
    for seqs, queries, *heads in ((1, 2048, 32, 8, 128), (4, 1024, 16, 8, 128), (8, 512, 12, 12, 64)):
        yield attention_case("auto", "bf16", seqs, 0, queries, *heads)
    for seqs, context in ((1, 4095), (1, 16383), (32, 2047)):
        yield attention_case("auto", "bf16", seqs, context, 1, 32, 8, 128)
    for rows in (1, 32, 4096):
        yield rms_norm_case(rows, 4096)
    yield layer_norm_case(4096, 768)
    yield swiglu_case(32, 12288)
    yield swiglu_case(2048, 12288)
    yield softmax_case(32, 151936)


def kernel_table(
    gpu: Gpu, stopwatch: Stopwatch, is_quick: bool, report: Callable[[dict[str, Any]], None], *, has_times: bool = True
) -> list[dict[str, Any]]:
    """The table's rows; `report` is given each as it is done. A wrong result is a row with "error" and no times."""
    torch = None if stopwatch.is_emulated or not has_times else Torch.find(gpu)
    rows = []
    for number, case in enumerate(cases(is_quick)):
        try:
            row = _row(gpu, stopwatch, case, number, torch, has_times)
        except Exception as error:
            row = {"case": case.name, "shape": case.shape, "error": f"{type(error).__name__}: {error}"}
        rows.append(row)
        report(row)
        gpu.synchronize()  # raises where the device is lost: the section ends with the rows so far
        gc.collect()
    return rows


def _row(
    gpu: Gpu, stopwatch: Stopwatch, case: Case, seed: int, torch: Torch | None, has_times: bool
) -> dict[str, Any]:
    _inputs, ready = prepare(gpu, case, seed)
    row = row_of(case, verify(gpu, case, ready, ready.run))
    if not has_times:
        return row
    competitors: dict[str, Callable[[], Any]] = {"ours": ready.run}
    if torch is not None:
        try:
            theirs = ready.torch(torch.module, torch.tensor)
            row["torch_error_share"] = torch_error_share(torch, theirs(), case, ready)
            competitors["torch"] = theirs
        except Exception as error:  # an older torch, or one without this kernel: ours is timed alone, and that is said
            row["torch_error"] = f"{type(error).__name__}: {error}"
    return timed(row, case, competitors, stopwatch)


def torch_error_share(torch: Torch, result: Any, case: Case, ready: Prepared) -> float:
    """`error_share` of the rows that are compared."""
    found = torch.array(result).reshape(ready.shape)
    return error_share(found[ready.rows], ready, case.tolerance, "torch's")


class Torch:
    """torch on the same stream as ours."""

    def __init__(self, module: Any, gpu: Gpu) -> None:
        self.module = module
        self._device = module.device("cuda", gpu.device.index)
        module.cuda.set_device(self._device)
        module.cuda.set_stream(module.cuda.ExternalStream(int(gpu.stream.handle), device=self._device))
        module.backends.cuda.matmul.allow_tf32 = False
        module.set_grad_enabled(False)

    @staticmethod
    def find(gpu: Gpu) -> Torch | None:
        """None where torch is not installed or was built without CUDA; the environment's section says so."""
        try:
            import torch
        except ImportError:
            return None
        return Torch(torch, gpu) if torch.cuda.is_available() else None

    def tensor(self, array: np.ndarray) -> Any:
        if array.dtype.itemsize == 2:
            name = "float16" if array.dtype == np.float16 else "bfloat16"
            return self.module.from_numpy(array.view(np.int16)).to(self._device).view(getattr(self.module, name))
        return self.module.from_numpy(array).to(self._device)

    def array(self, tensor: Any) -> np.ndarray:
        return np.asarray(tensor.float().contiguous().cpu().numpy())
