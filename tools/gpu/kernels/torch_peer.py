"""torch, if installed: the peer of our kernels' times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.bench.kernels.cases import Case, Prepared
from runtime.bench.kernels.table import error_share
from runtime.device.gpu import Gpu


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
        """torch, or None if it is not installed or sees no GPU, which the environment's section reports."""
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


def bind(torch: Torch, case: Case, ready: Prepared) -> tuple[Callable[[], Any], float]:
    """A function that runs torch's call of a case, and its error. Raises AssertionError if it is wrong."""
    assert ready.torch is not None, f"{case.name}: torch has no such call"
    theirs = ready.torch(torch.module, torch.tensor)
    found = torch.array(theirs()).reshape(ready.shape)
    return theirs, error_share(found[ready.rows], ready, case.tolerance, "torch's")
