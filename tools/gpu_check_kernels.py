"""The kernel table: each case verified on its input, ours and torch's, and only then timed, taking turns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.device.gpu import Gpu
from tools.gpu_check_cases import Case, Inputs, Prepared, cases, numpy_dtype
from tools.gpu_check_timing import Stopwatch


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
    inputs = Inputs(gpu, seed)
    ready = case.prepare(inputs)
    ready.run()
    found = np.empty(ready.shape, numpy_dtype(ready.dtype))
    gpu.read(ready.out, found)
    row = {
        "case": case.name, "shape": case.shape, "least_bytes": case.least_bytes, "flops": case.flops,
        "error_share": error_share(found, ready, case.tolerance, "ours"),
    }  # fmt: skip
    if not has_times:
        return row
    competitors: dict[str, Callable[[], Any]] = {"ours": ready.run}
    if torch is not None:
        try:
            theirs = ready.torch(torch.module, torch.tensor)
            row["torch_error_share"] = error_share(torch.array(theirs()), ready, case.tolerance, "torch's")
            competitors["torch"] = theirs
        except Exception as error:  # an older torch, or one without this kernel: ours is timed alone, and that is said
            row["torch_error"] = f"{type(error).__name__}: {error}"
    times = stopwatch.times(competitors)
    row["times"] = {name: value.as_json() for name, value in times.items()}
    if not stopwatch.is_emulated:
        row["gb_per_s"] = round(case.least_bytes / times["ours"].median_us / 1e3, 1)
        row["tflop_per_s"] = round(case.flops / times["ours"].median_us / 1e6, 2)
    if "torch" in times:
        row["share_of_torch"] = round(times["torch"].median_us / times["ours"].median_us, 3)
    return row


def error_share(found: np.ndarray, ready: Prepared, tolerance: float, whose: str) -> float:
    """The largest difference as a share of the largest value. Raises AssertionError above `tolerance`, and for NaN."""
    difference = np.abs(found.astype(np.float32).reshape(ready.shape) - ready.expected)
    share = float(difference.max() / np.abs(ready.expected).max())
    if not share <= tolerance:
        raise AssertionError(f"{whose} result is wrong: off by {share:.3g} of the largest value, allowed {tolerance:g}")
    return share


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
