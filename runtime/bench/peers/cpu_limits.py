"""The processor's limits: read bandwidth and arithmetic measured by `numba_kernels.cpu.peaks`, and a model's token
rates by them.

A step reads every weight that it uses once and multiplies each with every token; it cannot take less time than the
longer of both, nor a run less than the sum of its steps. Attention's keys and values, norms and sampling are left out,
which makes the limits slightly too high.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.gguf.reader import GgufFile
from numba_kernels.cpu import peaks
from runtime.bench.environment import usable_cores
from runtime.bench.peers.workloads import GGUF, Workload

READ_BUFFER_BYTES = 1 << 30
WARM_UP_S = 0.3
LOOP_S = 0.05
NUM_READS = 3  # of the buffer in one measurement
STEADY_SHARE = 0.9  # least share of the best that other measurements reach on an idle machine
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class CpuLimits:
    """Rates of all usable cores together; None if the processor lacks the instruction.

    read_bytes_per_s       memory that is read once, front to back
    float32_flops_per_s    fused multiply-adds, two operations each
    bfloat16_flops_per_s   vdpbf16ps
    int8_ops_per_s         vpdpbusd
    """

    num_threads: int
    read_bytes_per_s: float
    float32_flops_per_s: float
    bfloat16_flops_per_s: float | None
    int8_ops_per_s: float | None

    @staticmethod
    def of(num_threads: int, rates: Mapping[str, Callable[[], float]]) -> CpuLimits:
        """A measurement by "read" and the units of `unit_loops`."""
        found = {unit: rate() for unit, rate in rates.items()}
        return CpuLimits(num_threads, found["read"], found["float32"], found.get("bfloat16"), found.get("int8"))

    def operations_per_s(self, dtype: str) -> float:
        """The rate of products with weights of `dtype`: by its own instruction, or widened to float32."""
        own = {"bfloat16": self.bfloat16_flops_per_s, "int8": self.int8_ops_per_s, GGUF: self.int8_ops_per_s}.get(dtype)
        return own or self.float32_flops_per_s


def unit_loops() -> dict[str, tuple[Callable[[int], Any], int]]:
    """By unit that the processor has: its loop, and the operations of an iteration."""
    found: dict[str, tuple[Callable[[int], Any], int]] = {"float32": (peaks.fma_loop, peaks.FLOPS_PER_FMA_ITERATION)}
    for unit, feature in (("bfloat16", "avx512bf16"), ("int8", "avx512vnni")):
        if (loop := peaks.dot_loop(feature)) is not None:
            found[unit] = loop, peaks.OPS_PER_DOT_ITERATION[feature]
    return found


RATES = ("read_bytes_per_s", "float32_flops_per_s", "bfloat16_flops_per_s", "int8_ops_per_s")


class LimitMeter:
    """Measures the limits repeatedly, since other load on the machine lowers them: the best measurement is the
    processor's limit.

    measure  a measurement; the first is made at once
    """

    def __init__(self, measure: Callable[[], CpuLimits]) -> None:
        self._measure = measure
        self._seen = [measure()]

    def measure(self) -> None:
        """Measures once more."""
        self._seen.append(self._measure())

    def best(self) -> CpuLimits:
        """The best of each rate so far."""
        first = self._seen[0]
        rates: dict[str, Any] = {
            name: max(getattr(limits, name) for limits in self._seen) for name in RATES if getattr(first, name)
        }
        return replace(first, **rates)

    def report(self) -> dict[str, Any]:
        """The best limits, `num_measured`, and the `lowest` of each rate that was not steady."""
        best = asdict(self.best())
        lowest = {name: min(getattr(limits, name) for limits in self._seen) for name in RATES if best[name]}
        unsteady = {name: rate for name, rate in lowest.items() if rate < STEADY_SHARE * best[name]}
        return {**best, "num_measured": len(self._seen), "lowest": unsteady}


@contextlib.contextmanager
def open_meter(read_buffer_bytes: int = READ_BUFFER_BYTES, loop_s: float = LOOP_S) -> Iterator[LimitMeter]:
    """A meter of this processor, whose loops run on every usable core at once, warmed up."""
    count = usable_cores()
    memory = mmap.mmap(-1, read_buffer_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    buffer[:] = 1
    address = buffer.ctypes.data
    part = read_buffer_bytes // count // (peaks.READ_STREAMS * peaks.READ_BYTES)
    part *= peaks.READ_STREAMS * peaks.READ_BYTES
    with ThreadPoolExecutor(count) as threads:

        def together(work: Callable[[int], Any]) -> float:
            """Seconds until every thread has finished its part."""
            start = time.perf_counter()
            list(threads.map(work, range(count)))
            return time.perf_counter() - start

        def reading() -> float:
            seconds = min(
                together(lambda index: peaks.read_loop(address + index * part, part)) for _ in range(NUM_READS)
            )
            return count * part / seconds

        def arithmetic(loop: Callable[[int], Any], per_iteration: int) -> Callable[[], float]:
            """A function that measures the loop's rate, warmed up."""

            def run(iterations: int) -> float:
                return together(lambda _: loop(iterations))

            run(1)  # compiles it, which must not count as a long run
            iterations = 1000
            while run(iterations) < loop_s:
                iterations *= 2
            warm_until = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < warm_until:
                run(iterations)
            return lambda: count * iterations * per_iteration / run(iterations)

        rates = {"read": reading, **{unit: arithmetic(*loop) for unit, loop in unit_loops().items()}}
        yield LimitMeter(partial(CpuLimits.of, count, rates))


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's multiplied weights: the layers' with every token, the head's with every sampled one.

    Attributes:
        layer_weights, head_weights: without experts.
        size_bytes: of all of these, or None for that of their type.
        expert_weights, expert_bytes: of all experts.
        expert_share: the share of its layer's experts that a token goes to.
    """

    layer_weights: int
    head_weights: int
    size_bytes: int | None = None
    expert_weights: int = 0
    expert_bytes: int = 0
    expert_share: float = 1.0

    @staticmethod
    def of_gguf(path: Path) -> ModelSize:
        """From the matrices of a GGUF file."""
        file = GgufFile(path)
        tensors, name = file.tensors, file.metadata.get("general.architecture")
        used, count = (file.metadata.get(f"{name}.expert_{word}count", 0) for word in ("used_", ""))
        head = tensors.get("output.weight") or tensors["token_embd.weight"]
        matrices = [each for name, each in tensors.items() if name.startswith("blk.") and name.endswith(".weight")]
        layers, experts = ([each for each in matrices if len(each.shape) == axes] for axes in (2, 3))
        size_bytes = sum(each.size_bytes for each in (*layers, head))
        return ModelSize(
            sum(math.prod(each.shape) for each in layers), math.prod(head.shape), size_bytes,
            sum(math.prod(each.shape) for each in experts), sum(each.size_bytes for each in experts),
            float(used) / float(count) if isinstance(used, int) and isinstance(count, int) and count else 1.0,
        )  # fmt: skip

    @staticmethod
    def of(config: Mapping[str, Any]) -> ModelSize:
        """From the config.json of a GPT-2 or a Qwen3."""
        if config["model_type"] == "gpt2":
            hidden, layers = config["n_embd"], config["n_layer"]
            return ModelSize(layers * 12 * hidden * hidden, config["vocab_size"] * hidden)
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
        layer = hidden * (heads * head_dim + 3 * config["intermediate_size"])
        return ModelSize(config["num_hidden_layers"] * layer, config["vocab_size"] * hidden)


def limit_rate(limits: CpuLimits, size: ModelSize, dtype: str, workload: Workload) -> float:
    """The workload's token rate if steps take exactly the time of reading and arithmetic."""

    def step_s(tokens: int, samples: int) -> float:
        size_bytes = size.size_bytes or (size.layer_weights + size.head_weights) * WEIGHT_BYTES[dtype]
        touched = 1.0 - (1.0 - size.expert_share) ** tokens  # of the experts, if tokens choose independently
        reading = (size_bytes + size.expert_bytes * touched) / limits.read_bytes_per_s
        of_layers = size.layer_weights + size.expert_weights * size.expert_share
        operations = 2 * (of_layers * tokens + size.head_weights * samples)
        return max(reading, operations / limits.operations_per_s(dtype))

    prompts = workload.num_prompts
    prefill_s, decode_s = step_s(prompts * workload.prompt_len, prompts), step_s(prompts, prompts)
    if workload.measure == "decode":
        return prompts / decode_s
    if workload.measure == "prefill":
        return prompts * workload.prompt_len / prefill_s
    return prompts * workload.new_tokens / (prefill_s + (workload.new_tokens - 1) * decode_s)
