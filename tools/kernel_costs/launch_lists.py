"""What a decode step launches, noted while its graph is recorded: an engine on a device that does nothing.

So a model of a step's time follows the kernels that are planned today, not a list that somebody kept. Three layers
stand for all: what repeats in their launches is a layer.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

import models.registry
from models.checkpoints.dummy import DummyCheckpoint
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.packing import packing_of
from runtime.device.compiled_kernel import CompiledKernel
from runtime.device.device import Device
from runtime.device.driver import Driver, cuda_bindings
from runtime.device.emulator.driver.dry_driver import DryDriver
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelCache
from runtime.device.kernel_list import KernelList
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Launch, Specialisation
    from runtime.engine.steps.local_executor import LocalExecutor

NUM_LAYERS = 3
FactsOf = Callable[["Specialisation"], CompiledKernel]


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch, or a copy within the device.

    Attributes:
        name: the kernel's, or "copy".
        blocks, threads, shared_bytes: of the grid, of a block, of its dynamic shared memory.
        is_dependent: whether it may begin before the kernel in front of it has ended.
        num_registers, static_shared_bytes: ptxas's, of a thread and of a block; 0 where the kernel was not compiled.
        product: m, n, k of a matrix product, n being the weight's rows; None of other kernels.
        weight_bytes: of its weight.
        cluster: blocks that share K.
    """

    name: str
    blocks: int = 1
    threads: int = 32
    shared_bytes: int = 0
    is_dependent: bool = False
    num_registers: int = 0
    static_shared_bytes: int = 0
    product: tuple[int, int, int] | None = None
    weight_bytes: int = 0
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step's launches.

    Attributes:
        once: in front of the layers and behind them; of layers that differ from the others, too.
        layer: of one layer.
        num_layers: that launch these.
    """

    once: tuple[Launched, ...]
    layer: tuple[Launched, ...]
    num_layers: int

    @property
    def num_launches(self) -> int:
        return len(self.once) + self.num_layers * len(self.layer)

    @property
    def weight_bytes(self) -> int:
        once, layer = (sum(each.weight_bytes for each in part) for part in (self.once, self.layer))
        return once + self.num_layers * layer


@dataclass(slots=True)
class _Note:
    launch: Launch | None  # None: a copy
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_dependent: bool = False


class _NotingGpu(Gpu):
    """A device that does nothing, and notes what is recorded on it."""

    def __init__(self, arch: str) -> None:
        driver = Driver(DryDriver(arch), cuda_bindings("the kernels' compiler"), arch=arch)
        driver.call("cuInit", 0)
        super().__init__(Device(f"emulated:{arch}"), driver, kernel_cache=KernelList())
        self.noted: list[_Note] = []
        self._is_dependent = False

    @contextmanager
    def captured(self, stream: Any) -> Any:
        self.noted.clear()  # a recording may begin again
        with super().captured(stream):
            yield

    def launch(self, launch: Launch, *arguments: Any, stream: Any = None) -> None:
        self._is_dependent = False
        super().launch(launch, *arguments, stream=stream)
        if self.stream_is_captured and 0 not in launch.grid:
            code = launch.specialisation.kernel.py_func.__code__
            self.noted.append(_Note(launch, dict(zip(code.co_varnames, arguments)), self._is_dependent))

    def copy(self, target: int, source: int, size_bytes: int, stream: Any = None) -> None:
        super().copy(target, source, size_bytes, stream)
        if self.stream_is_captured:
            self.noted.append(_Note(None))

    def _in_chain(self, launch: Launch) -> Launch:
        chained = super()._in_chain(launch)
        self._is_dependent = chained.is_dependent
        return chained


class _Zeros(DummyCheckpoint):
    """Weights that cost nothing to make; with `has_mxfp4` those of experts are as gpt-oss stores them."""

    has_mxfp4 = False

    def quantized(self, name: str) -> QuantizedLayout | None:
        is_matrix = ".experts." in name and len(self._shapes.get(name, ())) == 2
        if not (self.has_mxfp4 and is_matrix):
            return super().quantized(name)
        rows, depth = self._shapes[name]
        return QuantizedLayout("fp4", (rows, depth), (1, 32), np.dtype(ml_dtypes.float8_e8m0fnu))

    def matrix(self, name: str) -> QuantizedMatrix:
        if (layout := self.quantized(name)) is not None:
            self._quantized = {**self._quantized, name: layout}
        return super().matrix(name)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        return np.zeros(self._shapes[name], self._dtype.numpy)


def compiled(arch: str) -> FactsOf:
    """What ptxas says of a kernel; the cache of kernels keeps it."""
    cache = KernelCache()
    return lambda specialisation: cache.get(specialisation, arch, is_ptx=False)


def decode_step(
    config: Mapping[str, Any], *, num_seqs: int = 1, num_proposals: int = 0, context: int = 1024,
    max_model_len: int = 8192, arch: str = "sm_90a", facts_of: FactsOf | None = None,
) -> Step:  # fmt: skip
    """The launches of a step that decodes so many sequences of a model, by its config.json, in bf16: its decode graph,
    or, where each sequence has proposals and `context` tokens, the recording of the step that tries them.

    Meanwhile the process's device of that architecture does nothing. `facts_of` gives registers and whether a kernel
    can be launched dependently; without it all can, and registers are unknown.
    """
    from runtime.bench.scheduling.engines import local
    from runtime.engine.make_engine import build_engine
    from runtime.engine.steps.decode_graphs import GraphKey

    gpu = _NotingGpu(arch)
    num_layers = int(config["num_hidden_layers"])
    is_mxfp4 = (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    weights = type("_Weights", (_Zeros,), {"has_mxfp4": is_mxfp4})
    dummy_weights = patch.object(models.registry, "DummyCheckpoint", weights)
    with gpu.installed(), tempfile.TemporaryDirectory() as folder, dummy_weights:
        shallow = {**config, "num_hidden_layers": min(NUM_LAYERS, num_layers)}
        if "layer_types" in config:
            shallow["layer_types"] = config["layer_types"][: shallow["num_hidden_layers"]]
        (Path(folder) / "config.json").write_text(json.dumps(shallow), encoding="utf-8")
        engine = build_engine(
            folder, device=gpu.device.type, dtype="bfloat16", load_format="dummy", max_model_len=max_model_len,
            max_num_seqs=num_seqs, kv_cache_bytes=8 << 30,
        )  # fmt: skip
        executor = local(engine)
        graphs = executor.graphs
        assert graphs is not None, "decode graphs are on by default"
        if num_proposals:
            _record_verification(executor, num_seqs, num_proposals, context)
        else:
            graphs.want(GraphKey(num_seqs, max_model_len, has_penalties=False, keeps_logits=False))
            graphs.record()
        noted = [
            Launched("copy") if note.launch is None
            else launched_of(note.launch, note.arguments, is_dependent=note.is_dependent, facts_of=facts_of)
            for note in gpu.noted
        ]  # fmt: skip
        engine.close()
    first, length, times = repeated(noted)
    end = first + times * length
    left_out = num_layers - min(NUM_LAYERS, num_layers)
    return Step((*noted[:first], *noted[end:]), tuple(noted[first : first + length]), times + left_out)


def _record_verification(executor: LocalExecutor, num_seqs: int, num_proposals: int, context: int) -> None:
    """Record a step of sequences with so many tokens before it, all of whose tokens are drawn behind. A shape is
    recorded when it comes for the second time; what runs at once before is not noted."""
    from runtime.engine.steps.ragged import Layout
    from runtime.sampling_arrays import SamplingArrays

    graphs, block_size = executor.graphs, executor.limits.block_size
    assert graphs is not None, "decode graphs are on by default"
    tokens, width = num_seqs * (1 + num_proposals), -(-(context + 1 + num_proposals) // block_size)
    places = np.tile(np.arange(context, context + 1 + num_proposals), num_seqs)
    tables = np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width)
    slots = tables.repeat(1 + num_proposals, 0)[np.arange(tokens), places // block_size].astype(np.int64)
    layout = Layout(
        token_ids=np.zeros(tokens, np.int32),
        positions=places.astype(np.int32),
        query_start=np.arange(num_seqs + 1, dtype=np.int32) * np.int32(1 + num_proposals),
        seq_lens=np.full(num_seqs, context + 1 + num_proposals, np.int32),
        slot_mappings=np.tile(slots * block_size + places % block_size, (executor.num_groups, 1)),
        block_tables=np.tile(tables, (executor.num_groups, 1, 1)),
        logits_indices=np.arange(tokens, dtype=np.int32),
        max_query_len=1 + num_proposals,
        max_seq_len=context + 1 + num_proposals,
    )
    for _ in range(2):
        graphs.run_forward(layout, executor._run_model, SamplingArrays.neutral(tokens), may_record=True)
    if not graphs.forwards.num_recorded:
        raise ValueError(f"a step of {num_seqs} sequences with {num_proposals} proposals was not recorded")


def launched_of(
    launch: Launch, arguments: Mapping[str, Any], *, is_dependent: bool = False, facts_of: FactsOf | None = None
) -> Launched:
    """A launch with its arguments by name, of which a matrix product's sizes are read."""
    specialisation = launch.specialisation
    facts = None if facts_of is None else facts_of(specialisation)
    product, weight_bytes = None, 0
    if {"weight", "m", "n", "k"} <= arguments.keys():
        is_gated = any(f"_{gate}" in specialisation.name for gate in ("silu", "gelu_tanh"))
        product = arguments["m"], (2 if is_gated else 1) * arguments["n"], arguments["k"]
        weight_bytes = ITEM_BYTES[specialisation.constants["dtype"]] * product[1] * product[2]
    elif specialisation.name.startswith(("experts_gather", "experts_packed_gather")):
        weight_bytes = _gathered_bytes(launch, arguments)
    return Launched(
        specialisation.name, math.prod(launch.grid), math.prod(launch.block), launch.shared_bytes,
        is_dependent and (facts is None or facts.waits_for_dependency),
        0 if facts is None else facts.num_registers, 0 if facts is None else facts.static_shared_bytes,
        product, weight_bytes, math.prod(launch.cluster),
    )  # fmt: skip


def _gathered_bytes(launch: Launch, arguments: Mapping[str, Any]) -> int:
    """Of the experts that few tokens' choices go over, as if no two had chosen the same."""
    constants = launch.specialisation.constants
    is_gated = constants["activation"] != ""
    rows, depth = (2 if is_gated else 1) * arguments["n"], arguments["k"]
    choices = launch.grid[1] * (1 if is_gated else arguments["top_k"])
    packing = packing_of(constants.get("weight", ""))
    each = ITEM_BYTES[constants["dtype"]] * rows * depth if packing is None else packing.size_bytes(rows, depth, "bf16")
    return choices * each


def repeated(items: Sequence[Launched]) -> tuple[int, int, int]:
    """(first, length, times) of the longest run that stands twice or more, one behind another. Raises ValueError where
    there is none."""
    for length in range(len(items) // 2, 0, -1):
        for first in range(len(items) - 2 * length + 1):
            run, times = items[first : first + length], 1
            while items[first + times * length : first + (times + 1) * length] == run:
                times += 1
            if times > 1:
                return first, length, times
    raise ValueError("no launches repeat: the model has a single layer, or layers of several kinds")
