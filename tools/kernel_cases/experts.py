"""Mixtures of experts: a layer's step as in serving, and single products by each tier for the kernel report.

Experts' matrices are at most `KINDS` distinct ones, each expert's in memory of its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from numba_kernels.cuda.experts import hopper, packed, packed_gather, packed_rows, tensor_core, tiled
from numba_kernels.cuda.gemm import machine_of
from numba_kernels.cuda.gemm.epilogue import LIMIT, SLOPE
from numba_kernels.cuda.gemm.hopper_ring import Tile as HopperTile
from numba_kernels.cuda.gemm.mixed_input import BLOCK_M, BLOCK_N, FEW_ROWS
from numba_kernels.cuda.gemm.packed_factors import row_counts
from numba_kernels.cuda.gemm.packed_stream import ROWS as PACKED_ROWS
from numba_kernels.cuda.gemm.tensor_core import MEDIUM, SKINNY, SMALL, Tile
from numba_kernels.cuda.specialisation import Launch
from runtime import ops
from runtime.bench.kernels.case import TOLERANCE, Array, Case, Inputs, Prepared, sampled
from runtime.device import tensor_map
from runtime.device.gpu import Gpu
from runtime.linear.experts import ExpertsWeight
from runtime.linear.weight import GpuWeight, RowWeight
from runtime.routing import Routing, RoutingRule
from runtime.tensor.tensor import Tensor
from tools.kernel_cases import torch_peers
from tools.kernel_cases.operation import Recorded, put, recorded
from tools.kernel_cases.quantised_layers import FORMATS, Layer, float_layer, packed_layer

KINDS = 17
"""Distinct matrices; a prime, so that no expert shares its with the one that a wrong stride of 2^n would read."""


def copied(weight: GpuWeight) -> GpuWeight:
    """A copy in memory of its own."""
    made, memory = copy.copy(weight), weight.memory
    made.memory = Tensor.empty(memory.shape, memory.dtype, memory.device)
    Gpu.of(memory.device).copy(made.memory.address, memory.address, memory.size_bytes)
    made.memory.storage.freeze()
    made.address = made.memory.address
    if isinstance(made, RowWeight):
        made.weight = made.memory
    return made


@dataclass(frozen=True, slots=True)
class Mixture:
    """A step's tokens over a layer's experts. `format`: "bf16", or one of `quantised_layers.FORMATS`."""

    model: str
    format: str
    tokens: int
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    activation: str = "silu"
    has_bias: bool = False

    @property
    def name(self) -> str:
        sizes = f"{self.top_k} of {self.num_experts} experts, {self.hidden} x {self.inner}"
        return f"{self.model or sizes}, {self.format}"

    def weights(self, gpu: Gpu) -> tuple[tuple[ExpertsWeight, ExpertsWeight], list[list[Layer]]]:
        """Gate and up, and down; and the distinct layers of both."""
        return _weights(gpu, self.format, self.num_experts, self.hidden, self.inner, self.has_bias)

    def choices(self) -> tuple[Array, Array]:
        """The chosen experts, each as often where that is possible, and their shares."""
        rng, shape = np.random.default_rng(0), (self.tokens, self.num_experts)
        ids = np.argsort(rng.random(shape), 1)[:, : self.top_k].astype(np.int32)
        if self.tokens * self.top_k % self.num_experts == 0:
            turns = np.arange(self.tokens * self.top_k).reshape(self.tokens, -1)
            ids = rng.permutation(self.num_experts)[turns % self.num_experts].astype(np.int32)
        return ids, rng.uniform(size=ids.shape).astype(np.float32)

    def routing(self, gpu: Gpu) -> Routing:
        """The same on the device."""
        ids, shares = (put(gpu, each) for each in self.choices())
        for each in (ids, shares):  # the second product reads them before the first has ended
            each.storage.freeze()
        return Routing(ids, shares, RoutingRule(num_experts=self.num_experts, top_k=self.top_k))

    def case(self, *, has_peer: bool = False) -> Case:
        """`has_peer`: compared with dense bfloat16 products of one expert's size over as many rows."""

        def prepare(inputs: Inputs) -> Prepared:
            gpu, (weights, layers) = inputs.gpu, self.weights(inputs.gpu)
            x, chosen = inputs.normal((self.tokens, self.hidden), "bf16"), self.routing(gpu)
            on_gpu, rows = put(gpu, x), sampled(self.tokens)
            ready = recorded(
                gpu, lambda: ops.experts(on_gpu, chosen, *weights, self.activation),  # type: ignore[arg-type]
                rows, _expected(x[rows], ids[rows], shares[rows], layers, self.activation), touched=touched,
            )  # fmt: skip
            if has_peer:
                dense = self._dense(inputs)
                ready.peers, ready.notes["dense_kernels"] = {"bf16": dense}, dense.kernels
                if self.format == "bf16" and self.activation == "silu" and not self.has_bias:
                    ready.torch = torch_peers.of_experts(x, ids, shares, layers)
            return ready

        ids, shares = self.choices()
        touched = np.unique(ids).size
        matrices = ((2 * self.inner, self.hidden), (self.hidden, self.inner))
        weight_bytes = sum(
            2 * n * k if self.format == "bf16" else FORMATS[self.format].packing.size_bytes(n, k, "bf16")
            for n, k in matrices
        )
        return Case(
            self.name, f"{self.tokens} tokens", touched * weight_bytes + 4 * self.tokens * self.hidden,
            2.0 * self.tokens * self.top_k * 3 * self.hidden * self.inner, TOLERANCE["bf16"], prepare, "experts",
        )  # fmt: skip

    def _dense(self, inputs: Inputs) -> Recorded:
        x = put(inputs.gpu, inputs.normal((self.tokens * self.top_k, self.hidden), "bf16"))
        gate_up = float_layer(inputs.gpu, 2 * self.inner, self.hidden).weight
        down = float_layer(inputs.gpu, self.hidden, self.inner).weight
        return Recorded(inputs.gpu, lambda: ops.linear(ops.linear_glu(x, gate_up, "silu"), down))


@functools.lru_cache(maxsize=1)  # kept for all token counts, which follow each other
def _weights(
    gpu: Gpu, format: str, num_experts: int, hidden: int, inner: int, has_bias: bool
) -> tuple[tuple[ExpertsWeight, ExpertsWeight], list[list[Layer]]]:
    layers, made = [], []
    for width, depth in ((2 * inner, hidden), (hidden, inner)):
        layers.append(_layers(gpu, format, min(KINDS, num_experts), width, depth, has_bias=has_bias))
        weights = [layers[-1][expert % KINDS].weight for expert in range(num_experts)]
        made.append(ExpertsWeight([each if at < KINDS else copied(each) for at, each in enumerate(weights)]))
    return (made[0], made[1]), layers


def _layers(gpu: Gpu, format: str, count: int, width: int, depth: int, *, has_bias: bool = False) -> list[Layer]:
    make = float_layer if format == "bf16" else functools.partial(packed_layer, name=format)
    return [make(gpu, width=width, depth=depth, seed=seed, has_bias=has_bias) for seed in range(count)]


def _gated(activation: str, gate: Array, up: Array) -> Array:
    slope = 1.0
    if activation == "clamped_silu":
        gate, up, slope = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT) + 1, SLOPE
    found: Array = gate / (1 + np.exp(-slope * gate)) * up
    return found


def _expected(x: Array, ids: Array, shares: Array, layers: list[list[Layer]], activation: str) -> Array:
    """Tokens' sums over their experts, float32; intermediate results are rounded as on the device."""
    total = np.zeros(x.shape, np.float32)
    for kind, (gate_up, down) in enumerate(zip(*layers, strict=True)):
        inner = _gated(activation, *np.split(gate_up.expected(x), 2, 1)).astype(x.dtype)
        share = np.where(ids % len(layers[0]) == kind, shares, 0).sum(1, keepdims=True)
        total += share * down.expected(inner)
    return total


# Single products of the kernel report: many rows per expert, and one

_N, _K = 512, 512


def tier_cases() -> Iterator[Case]:
    """Each tier that groups rows by expert."""
    yield _tier("tiled", "bf16", 2, 32, tiled.TILE_ROWS, 16, tiled.plan)
    for tile, rows in ((MEDIUM, 128), (SMALL, 64), (SKINNY, 1)):
        yield _tier(f"tensor_core {tile}", "bf16", 4, rows, tile.block_m, tile.block_n, _with_tile(tile))
    for format in ("mxfp4", "int4 g128", "int8"):
        for tile_rows, rows in ((BLOCK_M, 128), (FEW_ROWS, 1)):
            yield _tier("packed", format, 4, rows, tile_rows, BLOCK_N, _with_packing(format, tile_rows))
    for format in ("mxfp4", "int4 g128"):
        tile_rows = row_counts(FORMATS[format].packing)[-1]
        yield _tier("packed_rows", format, 4, 4, tile_rows, PACKED_ROWS, _with_rows(format))
    for each, rows in ((hopper.ALONE, 128), (hopper.PAIR, 256)):
        yield _tier(f"hopper {each}", "bf16", 4, rows, hopper.tile_rows(each), each.block_n, _by_wgmma(each), maps=True)


def _with_tile(tile: Tile) -> Callable[..., Launch]:
    return lambda tiles, columns, dtype, activation: tensor_core.plan(tiles, columns, dtype, activation, tile)


def _with_packing(format: str, tile_rows: int) -> Callable[..., Launch]:
    name = FORMATS[format].packing.name
    return lambda tiles, columns, dtype, activation: packed.plan(tiles, columns, dtype, name, activation, tile_rows)


def _with_rows(format: str) -> Callable[..., Launch]:
    """On few multiprocessors, so that most warps of a block have columns, as in a model's layer."""
    packing, num_sms = FORMATS[format].packing, 11
    return lambda tiles, columns, _, activation: packed_rows.plan(
        tiles, columns, _K, packing, activation, "sm_90a", num_sms
    )


def _by_wgmma(tile: HopperTile) -> Callable[..., Launch]:
    machine = machine_of("sm_90a", 132)
    return lambda tiles, columns, dtype, activation: hopper.plan(tiles, columns, dtype, activation, tile, machine)


def _tier(
    tier: str, format: str, count: int, rows: int, tile_rows: int, tile_columns: int, plan: Callable[..., Launch], *,
    maps: bool = False,
) -> Case:  # fmt: skip
    """`count` experts of `rows` rows each, without biases; rows are listed in random order."""
    packing = None if format == "bf16" else FORMATS[format].packing
    weight_bytes = _N * _K * 2 if packing is None else packing.size_bytes(_N, _K, "bf16")
    total = count * rows

    def prepare(inputs: Inputs) -> Prepared:
        tiles = np.array(
            [
                (expert, expert * rows + first, min(tile_rows, rows - first), 0)
                for expert in range(count) for first in range(0, rows, tile_rows)
            ],
            np.int32,
        )  # fmt: skip
        layers = _layers(inputs.gpu, format, count, _N, _K)
        weights = [layer.weight.address for layer in layers]
        tokens, x = inputs.rng.permutation(total).astype(np.int32), inputs.normal((total, _K), "bf16")
        out, some = inputs.result(total * _N * 2), sampled(total)
        launch = (
            plan(len(tiles), _N, "bf16", ""), (
                inputs.put(x), inputs.put(np.array([weights, [0] * count], np.int64)), inputs.put(tiles),
                inputs.put(np.array([len(tiles)], np.int32)), inputs.put(tokens), out, _N, _K, count,
                *([_maps(inputs, weights)] if maps else []),
            ),
        )  # fmt: skip
        expected = np.concatenate([layers[row // rows].expected(x[tokens[row : row + 1]]) for row in some])
        inputs.keep(layers)
        return Prepared(inputs.bind(launch), out, (total, _N), "bf16", some, expected)

    row_tiles = count * -(-rows // tile_rows)
    together = 256 // (64 if packing is None else packing.slot)  # rows that a warp copies at once
    if maps:
        together = tile_rows  # tiles are whole
    x_rows = row_tiles * max(min(rows, tile_rows), tile_rows // together)  # the last row is repeated: once per warp
    tiled_bytes = row_tiles * weight_bytes + -(-_N // tile_columns) * x_rows * _K * 2 + total * _N * 2
    if tier == "packed_rows" and packing is not None:  # x's maximum first; each warp reads a tile and addresses
        tiled_bytes += row_tiles * -(-_N // tile_columns) * (rows * _K * 2 + packed_rows.warps_of(packing) * 32)
    name = f"experts {tier}{'' if packing is None else f' {packing.name}'} rows={rows}"
    return Case(
        name, f"{count} x {rows} x {_N} x {_K}", total * (_K + _N) * 2 + count * weight_bytes, 2 * total * _N * _K,
        TOLERANCE["bf16"], prepare, "experts", tiled_bytes if tier != "tiled" else 0, True, tier != "tiled",
    )  # fmt: skip


def _maps(inputs: Inputs, weights: list[int]) -> int:
    layout = hopper.map_layout("bf16", _N, _K)
    maps = b"".join(tensor_map.encode(inputs.gpu.driver, address, layout) for address in weights)
    return inputs.put(np.frombuffer(maps, np.uint8))


def gathered_case(format: str, is_gated: bool) -> Case:
    """A token that has chosen four of six experts: gate and up, or down with its sum."""
    packing, top_k, num_experts = FORMATS[format].packing, 4, 6
    width = 2 * _N if is_gated else _N
    weight_bytes = packing.size_bytes(width, _K, "bf16")
    x_rows = 1 if is_gated else top_k
    out_rows = top_k if is_gated else 1
    activation = "clamped_silu" if packing.scale == "exponent" else "silu"

    def prepare(inputs: Inputs) -> Prepared:
        layers = _layers(inputs.gpu, format, num_experts, width, _K)
        table = inputs.put(np.array([[each.weight.address for each in layers], [0] * num_experts], np.int64))
        chosen, x = np.array([5, 0, 3, 2], np.int32), inputs.normal((x_rows, _K), "bf16")
        ids, given, out = inputs.put(chosen), inputs.put(x), inputs.result(out_rows * _N * 2)
        if is_gated:
            launch = packed_gather.plan_gate_up(top_k, _N, _K, packing, activation, 132, inputs.gpu.arch)
            run = inputs.bind((launch, (given, table, ids, out, _N, _K, num_experts, top_k)))
            expected = [_gated(activation, *np.split(layers[expert].expected(x), 2, 1))[0] for expert in chosen]
        else:
            launch = packed_gather.plan_down(1, top_k, _N, _K, packing, 132, inputs.gpu.arch)
            shares = inputs.put(np.full(top_k, 0.25, np.float32))
            arguments = (given, table, ids, shares, 0, 0, 0, out, 0, _N, _K, num_experts, top_k)
            run = inputs.bind((launch, arguments))
            expected = [sum(layers[expert].expected(x[at : at + 1])[0] for at, expert in enumerate(chosen)) / 4]
        inputs.keep(layers)
        return Prepared(run, out, (out_rows, _N), "bf16", np.arange(out_rows), np.stack(expected))

    x_reads = 2 * top_k * (_N // PACKED_ROWS) * _K * 2  # for the absolute maximum, and for staging
    out_bytes = out_rows * _N * 2
    name = f"experts packed_gather {packing.name} {'gate and up' if is_gated else 'down'}"
    return Case(
        name, f"1 of {top_k} x {width} x {_K}", x_rows * _K * 2 + top_k * weight_bytes + out_bytes,
        2 * top_k * width * _K, TOLERANCE["bf16"], prepare, "experts", top_k * weight_bytes + x_reads + out_bytes, True,
        True,
    )  # fmt: skip
