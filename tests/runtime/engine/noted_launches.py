"""What a decode step launches: an engine that records it on a device that does nothing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

import models.checkpoints.dummy
from models.checkpoints.dummy import DummyTensor
from numba_kernels.cuda.specialisation import Launch
from runtime.bench.scheduling.engines import local
from runtime.device.device import Device
from runtime.device.driver import Driver, cuda_bindings
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelList
from runtime.emulator.driver.emulated_driver import DryDriver
from runtime.engine.make_engine import build_engine
from runtime.engine.steps.decode_graphs import GraphKey
from runtime.linear.quantized import QuantizedLayout


class _NotingGpu(Gpu):
    """A device that does nothing, and notes the kernels and copies that are recorded on it."""

    def __init__(self, arch: str) -> None:
        driver = Driver(DryDriver(arch), cuda_bindings("the kernels' compiler"), arch=arch)
        driver.call("cuInit", 0)
        super().__init__(Device(f"emulated:{arch}"), driver, kernel_cache=KernelList())
        self.noted: list[Launch | str] = []

    @contextmanager
    def captured(self, stream: Any) -> Any:
        self.noted.clear()  # a recording may begin again
        with super().captured(stream):
            yield

    def launch(self, launch: Launch, *arguments: Any, stream: Any = None) -> None:
        super().launch(launch, *arguments, stream=stream)
        if self.stream_is_captured and 0 not in launch.grid:
            self.noted.append(launch)

    def copy(self, target: int, source: int, size_bytes: int, stream: Any = None) -> None:
        super().copy(target, source, size_bytes, stream)
        if self.stream_is_captured:
            self.noted.append("copy")


class _Zeros(DummyTensor):
    """Weights that cost nothing to make; those of experts are in MXFP4, as gpt-oss stores them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if ".experts." in self.name and len(self.shape) == 2:
            shape = self.shape[0], self.shape[1]
            self.quantized = QuantizedLayout("fp4", shape, (1, 32), np.dtype(ml_dtypes.float8_e8m0fnu))

    def array(self) -> np.ndarray[Any, Any]:
        return np.zeros(self.shape, self._dtype.numpy)


def kernels_of_a_decode_layer(
    config: Mapping[str, Any], *, num_seqs: int, arch: str = "sm_90a", has_adapters: bool = False,
    quantization: str = "none",
) -> tuple[str, ...]:  # fmt: skip
    """The names of the kernels of `launches_of_a_decode_layer`."""
    launches = launches_of_a_decode_layer(
        config, num_seqs=num_seqs, arch=arch, has_adapters=has_adapters, quantization=quantization
    )
    return tuple(map(_name, launches))


def launches_of_a_decode_layer(
    config: Mapping[str, Any],
    *,
    num_seqs: int,
    arch: str = "sm_90a",
    has_adapters: bool = False,
    quantization: str = "none",
    weights: AbstractContextManager[Any] | None = None,
) -> tuple[Launch | str, ...]:
    """The launches of one layer in the graph that decodes so many sequences of a model, by its config.json, perhaps
    with adapters, or rounded; "copy" for each copy. Meanwhile the process's device of that architecture does nothing.
    `weights` replaces the dummy ones."""
    gpu = _NotingGpu(arch)
    if weights is None:
        weights = patch.object(models.checkpoints.dummy, "DummyTensor", _Zeros)
    with gpu.installed(), tempfile.TemporaryDirectory() as folder, weights:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        engine = build_engine(
            folder, device=gpu.device.type, dtype="bfloat16", load_format="dummy", max_model_len=2048,
            max_num_seqs=num_seqs, kv_cache_bytes=8 << 30, enable_lora=has_adapters, quantization=quantization,
        )  # fmt: skip
        graphs = local(engine).graphs
        assert graphs is not None, "decode graphs are on by default"
        graphs.want(
            GraphKey(
                num_seqs,
                2048,
                has_penalties=False,
                keeps_logits=False,
                has_chains=False,
                has_adapters=has_adapters,
            )
        )
        graphs.record()
        noted = list(gpu.noted)
        engine.close()
    return _repeated(noted)


def _name(noted: Launch | str) -> str:
    return noted if isinstance(noted, str) else noted.specialisation.name


def _repeated(noted: Sequence[Launch | str]) -> tuple[Launch | str, ...]:
    """The longest run of names that stands twice or more, one after another."""
    names = [_name(each) for each in noted]
    for length in range(len(names) // 2, 0, -1):
        for first in range(len(names) - 2 * length + 1):
            run = names[first : first + length]
            if names[first + length : first + 2 * length] == run:
                return tuple(noted[first : first + length])
    raise ValueError("no launches repeat")
