"""Runs our and Triton's kernels on one emulated GPU, verifies the results, and counts instructions and memory
traffic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from runtime.bench.kernels.counted import Counts
from runtime.device.assemble import assemble
from tools.comparing.triton_comparison.main_loop import main_loop
from tools.comparing.triton_comparison.ours import EXPERTS, GEMMS, PAGE, PREFILLS, Experts, Prefill, Product, Tier
from tools.comparing.triton_comparison.theirs import (
    launch_attention,
    launch_experts,
    launch_matmul,
    nearest,
    peers,
    text_of,
    tile_of,
)
from tools.kernel_costs.counts import Bench
from tools.kernel_costs.machine_code import disassemble

MATMULS = ((256, 256, 512), (512, 512, 256), (128, 1024, 1024), (1024, 128, 512))
MIXTURES = ((4, 256, 512, 512), (4, 128, 512, 512), (4, 64, 512, 512), (8, 4, 512, 512))
"""Experts, rows of each, n, k."""
TOP_K = 2
ATTENTIONS = ((2, 512, 128),)  # heads, queries and keys, head dim
BF16 = np.dtype(ml_dtypes.bfloat16)
ATTENTION_TOLERANCE = 2e-2
_OPERATION_FLOPS = 2 * 16 * 8 * 16


@dataclass(frozen=True, slots=True)
class Measured:
    """One kernel's counts for one piece of work.

    Attributes:
        name: of our tier, or "triton".
        tile: a block's tile: rows x columns x depth, or queries x keys.
        bytes, sectors: of device memory: requested bytes, and the 32-byte sectors that they touch; without tables.
        table_sectors: those read by single 32-bit integers a lane, of block tables and lengths.
        conflicts: turns of shared memory's banks beyond the fewest.
        barriers: warp instructions that wait at barriers.
        ptx_per_operation: warp instructions of the whole kernel as PTX for each product of 16 x 8 x 16.
        machine_per_operation: machine instructions of the main loop for each product of 16 x 8 x 16.
        mix: of the main loop's machine instructions, by opcode.
        num_registers, spill_bytes: of a thread.
    """

    name: str
    tile: str
    bytes: int
    sectors: int
    table_sectors: int
    conflicts: int
    barriers: int
    ptx_per_operation: float
    machine_per_operation: float
    mix: dict[str, int]
    num_registers: int
    spill_bytes: int


METRICS = {
    "bytes": "bytes", "sectors": "sectors", "conflicts": "bank conflicts", "barriers": "barriers",
    "machine_per_operation": "machine instructions / operation",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One piece of work on one architecture: ours, Triton's nearest configuration, and all of Triton's."""

    work: str
    arch: str
    shape: str
    ours: Measured
    triton: Measured
    configurations: tuple[Measured, ...]

    @property
    def worse(self) -> list[str]:
        """The counts in which ours is worse; one that is not a number counts as worse."""
        return [name for name in METRICS if not getattr(self.ours, name) <= getattr(self.triton, name)]


class Comparer:
    """Runs both sides on one architecture. Every result is verified before it is counted."""

    def __init__(self, arch: str, nvdisasm: str) -> None:
        self.arch = arch
        self.nvdisasm = nvdisasm
        self.bench = Bench(arch)
        self._machine: dict[str, tuple[Any, Any]] = {}

    def _code(self, name: str, text: str) -> tuple[Any, Any]:
        if name not in self._machine:
            made = assemble(text, self.arch)
            self._machine[name] = made, main_loop(disassemble(made.cubin, self.nvdisasm))
        return self._machine[name]

    def measured(self, name: str, tile: str, key: str, text: str, counts: Counts) -> Measured:
        """A kernel's counts with those of its machine code; `key` names the text."""
        made, loop = self._code(key, text)
        operations = counts.tensor_flops / _OPERATION_FLOPS
        return Measured(
            name, tile, counts.global_bytes - counts.word_bytes, counts.sectors - counts.word_sectors,
            counts.word_sectors, counts.conflicts, counts.barriers,
            round(counts.warp_instructions / operations, 3), round(loop.instructions_per_operation, 3), loop.mix,
            made.num_registers, made.spill_store_bytes + made.spill_load_bytes,
        )  # fmt: skip

    def product(self, m: int, n: int, k: int, tiers: Sequence[Tier] = GEMMS) -> Iterator[Row]:
        """A row for each of our tiers on this architecture. Raises AssertionError for a wrong result."""
        random = np.random.default_rng(m + n + k)
        x, weight = (random.integers(-2, 3, (rows, k)).astype(BF16) for rows in (m, n))
        expected = (x.astype(np.float32) @ weight.astype(np.float32).T).astype(BF16)
        bench = self.bench

        def run(side: Callable[[Bench, Product], Any]) -> tuple[Counts, Any]:
            found, launched = np.empty((m, n), BF16), []

            def once(bench: Bench) -> None:
                work = Product(m, n, k, bench.put(x), bench.put(weight), bench.put(np.full((m, n), np.nan, BF16)))
                launched.append(side(bench, work))
                bench.gpu.read(work.y, found)

            counts = bench.count("matmul", once)
            if not np.array_equal(found.astype(np.float32), expected.astype(np.float32)):
                raise AssertionError(f"{side} on {self.arch}: the product {m} x {n} x {k} is wrong")
            return counts, launched[0]

        fitting = [tier for tier in tiers if tier.least_rows <= m]
        yield from self._rows("matmul", f"{m} x {n} x {k}", run, fitting, launch_matmul)

    def mixture(self, num_experts: int, rows: int, n: int, k: int, tiers: Sequence[Tier] = EXPERTS) -> Iterator[Row]:
        """A mixture with `rows` rows per expert, three more and three fewer for two of them, by shuffled draws of two a
        token: a row for each of our tiers for as many on this architecture. Raises AssertionError for a wrong
            result."""
        counts = [rows] * num_experts
        counts[0], counts[-1] = rows + 3, rows - 3  # partial tiles
        starts = tuple(np.cumsum([0, *counts]).tolist())
        random = np.random.default_rng(sum(starts) + n + k)
        order = random.permutation(starts[-1]).astype(np.int32)
        x = random.integers(-2, 3, (starts[-1] // TOP_K, k)).astype(BF16)
        weight = random.integers(-2, 3, (num_experts, n, k)).astype(BF16)
        by_expert = [
            x[order[first:end] // TOP_K].astype(np.float32) @ each.astype(np.float32).T
            for each, first, end in zip(weight, starts, starts[1:])
        ]
        in_order = np.concatenate(by_expert).astype(BF16)
        by_draw = np.empty_like(in_order)
        by_draw[order] = in_order

        def run(
            side: Callable[[Bench, Experts], Any], *, expected: np.ndarray[Any, Any] = in_order
        ) -> tuple[Counts, Any]:
            found, launched = np.empty((starts[-1], n), BF16), []

            def once(bench: Bench) -> None:
                y = bench.put(np.full(found.shape, np.nan, BF16))
                work = Experts(n, k, TOP_K, starts, order, bench.put(x), bench.put(weight), y)
                launched.append(side(bench, work))
                bench.gpu.read(y, found)

            counted = self.bench.count("experts", once)
            if not np.array_equal(found.astype(np.float32), expected.astype(np.float32)):
                raise AssertionError(f"{side} on {self.arch}: {num_experts} experts x {rows} x {n} x {k} are wrong")
            return counted, launched[0]

        fitting = [tier for tier in tiers if tier.least_rows <= rows <= tier.most_rows]
        shape = f"{num_experts} experts x {rows} rows x {n} x {k}"
        yield from self._rows(
            "experts", shape, run, fitting, launch_experts, run_peer=functools.partial(run, expected=by_draw)
        )

    def prefill(self, heads: int, length: int, head_dim: int, tiers: Sequence[Tier] = PREFILLS) -> Iterator[Row]:
        """A row for each of our tiers on this architecture. Raises AssertionError for a wrong result."""
        random = np.random.default_rng(head_dim)
        q, k, v = (random.standard_normal((heads, length, head_dim), np.float32).astype(BF16) for _ in range(3))
        wide = [each.astype(np.float64) for each in (q, k, v)]
        scores = wide[0] @ wide[1].transpose(0, 2, 1) * head_dim**-0.5
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ wide[2]
        blocks = -(-length // PAGE)
        order = random.permutation(blocks).astype(np.int32)

        def pages(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            cut = rows.reshape(heads, blocks, PAGE, head_dim).transpose(1, 0, 2, 3)
            made = np.empty_like(cut, order="C")
            made[order] = cut
            return made

        def run(side: Callable[[Bench, Prefill], Any], *, is_paged: bool = True) -> tuple[Counts, Any]:
            found, launched = np.empty(q.shape if not is_paged else (length, heads, head_dim), BF16), []

            def once(bench: Bench) -> None:
                arrays = (q.transpose(1, 0, 2), pages(k), pages(v)) if is_paged else (q, k, v)
                q_at, k_at, v_at = (bench.put(np.ascontiguousarray(array)) for array in arrays)
                out = bench.put(np.full(found.shape, np.nan, BF16))
                work = Prefill(heads, length, head_dim, q_at, k_at, v_at, out, bench.put(order))
                launched.append(side(bench, work))
                bench.gpu.read(out, found)

            counts = self.bench.count("attention", once)
            actual = found.transpose(1, 0, 2) if is_paged else found
            if not np.abs(actual.astype(np.float64) - expected).max() <= ATTENTION_TOLERANCE:
                raise AssertionError(f"{side} on {self.arch}: attention {heads} x {length} x {head_dim} is wrong")
            return counts, launched[0]

        shape = f"{heads} heads, {length} tokens, head dim {head_dim}"
        yield from self._rows(
            "attention", shape, run, tiers, launch_attention,
            lambda facts: facts["numbers"]["HEAD"] == head_dim, functools.partial(run, is_paged=False),
        )  # fmt: skip

    def _rows(
        self, work: str, shape: str, run: Callable[..., tuple[Counts, Any]], tiers: Sequence[Tier],
        launch_peer: Callable[..., None], is_meant: Callable[[dict[str, Any]], bool] = lambda facts: True,
        run_peer: Callable[..., tuple[Counts, Any]] | None = None,
    ) -> Iterator[Row]:  # fmt: skip
        known = {name: facts for name, facts in peers(work, self.arch).items() if is_meant(facts)}
        theirs = {}
        for name, facts in known.items():
            counts, _ = (run_peer or run)(functools.partial(launch_peer, name, facts))
            tile = f"{'x'.join(map(str, tile_of(facts)))}, {facts['stages']} stages, {facts['warps']} warps"
            theirs[name] = self.measured("triton", tile, name, text_of(name), counts)
        spills = {name: each.spill_bytes for name, each in theirs.items()}
        for tier in tiers:
            if self.arch in tier.archs:
                counts, (specialisation, tile) = run(tier.run)
                text = self.bench.ptx_of(specialisation)
                ours = self.measured(tier.name, "x".join(map(str, tile)), specialisation.name, text, counts)
                yield Row(work, self.arch, shape, ours, theirs[nearest(tile, known, spills)], tuple(theirs.values()))


def compare(archs: Sequence[str], nvdisasm: str, text: str = "") -> list[Row]:
    """All rows whose work, architecture or shape contains `text`."""
    rows: list[Row] = []
    for arch in archs:
        comparer = Comparer(arch, nvdisasm)
        for m, n, k in MATMULS:
            if text in f"matmul {arch} {m} x {n} x {k}":
                rows += comparer.product(m, n, k)
        for num_experts, m, n, k in MIXTURES:
            if text in f"experts {arch} {num_experts} x {m} x {n} x {k}":
                rows += comparer.mixture(num_experts, m, n, k)
        for heads, length, head_dim in ATTENTIONS:
            if text in f"attention {arch} {heads} x {length} x {head_dim}":
                rows += comparer.prefill(heads, length, head_dim)
    return rows
