"""The sections of gpu_check, most important first.

A section is a family of cases that one process runs. Its cases come from a function ``cases(options)`` of a
module in this folder, which only that process imports: this file needs only Python. `kernels` has cases of single
kernels, `serving` of whole models; `checking` runs them and reports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Result = dict[str, Any]

_KERNELS = sorted((ROOT / "tests" / "numba_kernels" / "cuda").glob("test_*.py"))
EMULATED_TESTS = (
    *(f"numba_kernels/cuda/{path.name}" for path in _KERNELS if path.stem != "test_registry"),
    *(f"runtime/{name}.py" for name in (
        "backends/test_cuda_ops", "backends/test_cuda_sampling", "backends/test_cuda_tensor", "device/test_graph",
        "device/test_launch", "device/test_upload", "linear/test_split_k", "linear/test_dynamic_quantisation",
        "linear/test_reordered_columns", "kv/test_transfer_gpu", "test_latent_ops", "test_scaling",
        "engine/test_gpu_engine", "engine/test_kv_cache_dtype", "engine/test_experts", "engine/test_gpu_swapping",
        "engine/test_pictures", "engine/test_whole_pictures", "engine/test_window_groups", "engine/test_fuzz",
        "engine/speculation/test_dflash", "engine/speculation/test_same_answers",
        "engine/steps/test_decode_arrays", "engine/steps/test_decode_graphs", "engine/steps/test_forward_graphs",
        "engine/steps/test_kept_layers", "engine/steps/test_sampler",
    )),
    *(f"models/{name}.py" for name in (
        "drafters/test_dflash", "drafters/test_eagle3", "test_experts", "test_fuzzed", "test_goldens_gpu",
        "test_goldens_tiers", "test_int8_gpu", "quantized/test_gpu", "quantized/test_mxfp4", "gguf/test_experts",
        "vision/test_vision", "vision/test_llava", "vision/test_gemma3",
    )),
)  # fmt: skip
"""Tests whose emulated devices of the GPU's architecture are the GPU itself here (`stand_in`)."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of cases.

    Attributes:
        device: "cuda:0", or "emulated:sm_90a" to try the check itself.
        is_quick: sizes that an emulated device can run.
        is_dry: the device is a dummy, and only the requested kernels matter.
    """

    device: str
    is_quick: bool = False
    is_dry: bool = False

    @property
    def is_real(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class Case:
    """One check. `run` returns its result as JSON's types, and raises on an error. A result with the one key "skipped"
    has the reason."""

    name: str
    run: Callable[[], Result]


@dataclass(frozen=True, slots=True)
class Section:
    """A family of cases.

    Attributes:
        name: as in the report.
        source: "module:function" in this folder; the function takes `Options` and yields cases. One called "session"
            runs them itself, and also takes the names to skip and the report.
        limit_s: seconds for all of its cases on a GPU, after which the process is killed; a resumed run continues.
        case_limit_s: seconds after which a silent case counts as hanging.
        needs_hardware: whether an emulated device cannot do it.
        is_timed: whether it must have the device to itself.
        models: those of `models` whose serving kernels it needs, beside its cases' launches.
        argument: passed to the function unless None.
    """

    name: str
    source: str
    limit_s: float
    case_limit_s: float = 30.0
    needs_hardware: bool = False
    is_timed: bool = False
    models: tuple[str, ...] = ()
    argument: str | None = None

    @property
    def is_session(self) -> bool:
        return self.source.endswith(":session")

    def start(self, options: Options, *more: Any) -> Any:
        """Calls the function, which yields cases one by one, so that each one's data is made only when needed."""
        module, _, name = self.source.partition(":")
        function = getattr(importlib.import_module(f"tools.gpu.{module}"), name)
        return function(options, *([] if self.argument is None else [self.argument]), *more)


def sections() -> Iterator[Section]:
    """All sections, the most important first."""
    yield Section("environment", "environment:cases", 40, 30)
    yield Section("bandwidth", "kernels.cases:bandwidth", 30, is_timed=True)
    yield Section("hopper gemm", "kernels.cases:checked", 80, 20, argument="hopper gemm")
    yield Section("gemm", "kernels.cases:checked", 40, 20, argument="gemm")
    yield Section("experts", "kernels.cases:checked", 35, 30, argument="experts")
    yield Section("quantized", "kernels.cases:checked", 40, 20, argument="quantized")
    yield Section("attention", "kernels.cases:checked", 40, 20, argument="attention")
    yield Section("latent", "kernels.cases:checked", 40, 20, argument="latent")
    yield Section("rows", "kernels.cases:checked", 30, 20, argument="rows")
    yield Section("recurrent", "kernels.cases:checked", 40, 20, argument="recurrent")
    yield Section("sampling", "kernels.cases:checked", 35, 20, argument="sampling")
    yield Section(
        "qwen3-8b", "serving.models:batch_1", 50, 45, models=("qwen3-8b",), argument="qwen3-8b", is_timed=True
    )
    yield Section(
        "qwen3-0.6b", "serving.models:batch_1", 40, 35, models=("qwen3-0.6b",), argument="qwen3-0.6b", is_timed=True
    )
    yield Section("goals", "kernels.cases:goals", 70, 60, is_timed=True)
    yield Section("residency", "kernels.chains:cases", 30, 15, is_timed=True)
    yield Section("kernels", "kernels.cases:timed", 65, 30, is_timed=True, argument="kernels")
    yield Section("quantized speed", "kernels.cases:timed", 40, 20, is_timed=True, argument="quantized speed")
    yield Section("hopper packed tuning", "kernels.tuning:hopper_cases", 45, 20, is_timed=True)
    yield Section("experts speed", "kernels.cases:timed", 40, 20, is_timed=True, argument="experts speed")
    yield Section("experts tuning", "kernels.tuning:experts", 20, 10, is_timed=True)
    yield Section("latent speed", "kernels.cases:timed", 40, 20, is_timed=True, argument="latent speed")
    yield Section("sampling speed", "kernels.cases:timed", 35, 20, is_timed=True, argument="sampling speed")
    yield Section("tuning", "kernels.tuning:floats", 60, 20, is_timed=True)
    yield Section("packed tuning", "kernels.tuning:packed", 45, 20, is_timed=True)
    yield Section(
        "qwen3-8b batches", "serving.models:batches", 80, 60, models=("qwen3-8b",), argument="qwen3-8b", is_timed=True
    )
    yield Section(
        "qwen3-0.6b batches", "serving.models:batches", 40, 35, models=("qwen3-0.6b",), argument="qwen3-0.6b",
        is_timed=True,
    )  # fmt: skip
    yield Section(
        "early starts", "serving.early_starts:cases", 60, 50, models=("qwen3-8b",), argument="qwen3-8b", is_timed=True
    )
    yield Section(
        "start over HTTP", "serving.start_over_http:cases", 60, 50, models=("qwen3-8b",), argument="qwen3-8b",
        is_timed=True,
    )  # fmt: skip
    for model in ("gpt-oss-20b", "qwen3-8b int4", "qwen3-8b fp8", "12 layers of qwen3-30b-a3b"):
        yield Section(model, "serving.models:in_short", 30, 25, models=(model,), argument=model, is_timed=True)
    yield Section("verification", "serving.models:verification", 25, 20, argument="qwen3-8b", is_timed=True)
    yield Section("tower", "serving.vision:tower_cases", 20, 15, is_timed=True)
    yield Section("nccl", "collectives:cases", 90, 50)
    yield Section("speculation", "serving.speculation:correctness", 60, 40)
    yield Section("vision", "serving.vision:correctness", 30, 25)
    for name in ("qwen3-0.6b", "qwen3-8b"):
        yield Section(
            f"speculation speed {name}", "serving.speculation:speed", 30, 25, models=(name,), argument=name,
            is_timed=True,
        )  # fmt: skip
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        name = path.stem.removeprefix("test_").removesuffix("_on_hardware")
        yield Section(f"tests {name}", "hardware_tests:session", 90, 60, argument=f"gpu/{path.name}")
    for file in EMULATED_TESTS:
        yield Section(f"emulated {file}", "hardware_tests:session", 90, 60, needs_hardware=True, argument=file)
    for tool in ("memcheck", "racecheck", "synccheck"):
        yield Section(f"sanitizer {tool}", "sanitizer:cases", 105, 60, needs_hardware=True, argument=tool)


def find(name: str) -> Section:
    """The section of that name. Raises KeyError."""
    return {section.name: section for section in sections()}[name]
