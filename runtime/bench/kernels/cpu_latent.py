"""`bench kernels --device cpu`: decode attention of latent pages beside the processor's limits.

A row of pages is read once and meets every head twice, so that a step cannot take less than the longer of reading all
rows and of 2 x heads x (width + value_dim) operations a row, at the rate of the unit that multiplies rows of this type.
A replay has the layers of a step, each with pages of its own, so that rows come from memory.
Work and limits are one thread's, by its processor time. Everything timed has just been compared with numpy in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product, starmap
from typing import Any

import numpy as np

from numba_kernels.cpu.layout import ROUNDS_TO_BF16
from numba_kernels.cpu.running.arena import Arena
from numba_kernels.cpu.running.recording import Recording, record
from runtime import ops
from runtime.batch import Batch
from runtime.bench.cpu_rates import medians, one_thread_report, thread_seconds, unit_rates
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.cpu_limits import READ_BUFFER_BYTES
from runtime.dtype import DType, NDArray, float32
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.tensor.tensor import Tensor

HEADS = (16, 20, 64, 128)  # of DeepSeek-V2-Lite, GLM-4.7-Flash, Kimi K2, DeepSeek-V3
SHAPES = ((1, 1024), (1, 8192), (8, 1024), (8, 4096))  # sequences, tokens of each
WIDTH, VALUE_DIM, BLOCK_SIZE, SCALE = 576, 512, 16, 0.05
MOST_ERROR = {"float32": 1e-4, "bfloat16": 2e-2}
_MOST_LAYERS, _PAGE_BYTES = 27, 128 << 20  # DeepSeek-V2-Lite's layers; more pages than these are enough


class Case:
    """A decode of `seqs` sequences of `length` tokens."""

    def __init__(self, dtype: str, heads: int, seqs: int, length: int) -> None:
        rng = np.random.default_rng(0)
        self.dtype, self.heads, self.seqs, self.length = dtype, heads, seqs, length
        blocks = -(-length // BLOCK_SIZE)
        self.layers = min(_MOST_LAYERS, -(-_PAGE_BYTES // self.read_bytes))
        spec = KVCacheSpec.uniform(self.layers, 1, WIDTH, BLOCK_SIZE, DType.parse(dtype), latent_values=VALUE_DIM)
        self.cache = KVCache(spec, seqs * blocks)
        self.pages = [pages for layer in range(self.layers) for pages in self.cache.layer(layer)]
        drawn = rng.standard_normal(4_194_301).astype(np.float32)  # a prime: rows differ
        numbers = Tensor.from_numpy(drawn).to(DType.parse(dtype)).array
        for pages in self.pages:
            pages.array[...] = np.resize(numbers, pages.array.shape)
        self.table = rng.permutation(seqs * blocks).astype(np.int32).reshape(seqs, blocks)
        self.q = rng.standard_normal((seqs, heads, WIDTH)).astype(np.float32)
        self.queries = Tensor.from_numpy(self.q)

    @property
    def unit(self) -> str:
        """The unit that multiplies these rows."""
        return "bfloat16" if self.dtype == "bfloat16" and ROUNDS_TO_BF16 else "float32"

    @property
    def operations(self) -> int:
        """Additions and multiplications with all rows and heads."""
        return 2 * self.heads * (WIDTH + VALUE_DIM) * self.seqs * self.length

    @property
    def read_bytes(self) -> int:
        """The bytes of all rows of a layer."""
        return self.seqs * self.length * WIDTH * DType.parse(self.dtype).itemsize

    def batch(self) -> Batch:
        """A step that decodes one token of each sequence."""
        starts, lengths = np.arange(self.seqs + 1, dtype=np.int32), np.full(self.seqs, self.length, np.int32)
        nothing = Tensor.from_numpy(np.zeros(self.seqs, np.int32))
        return Batch(
            nothing, nothing, Tensor.from_numpy(starts), Tensor.from_numpy(lengths), (),
            (Tensor.from_numpy(self.table),), nothing, max_query_len=1, max_seq_len=self.length,
        )  # fmt: skip

    def run(self, batch: Batch, layer: int) -> Tensor:
        """[seqs, heads * VALUE_DIM]"""
        return ops.latent_attention(self.queries, self.pages[layer], batch, 0, scale=SCALE, value_dim=VALUE_DIM)

    def recording(self) -> Recording:
        """All layers' work, recorded as a decode step is."""
        batch = self.batch()
        with record(Arena()) as recording:
            for layer in range(self.layers):
                self.run(batch, layer)
        return recording

    def verify(self) -> float:
        """The largest error of the first and the last sequence, as a share of the largest number. Raises
        BenchmarkError if it is too large, or NaN."""
        found, most = self.run(self.batch(), 0).numpy().reshape(self.seqs, self.heads, VALUE_DIM), 0.0
        for seq in {0, self.seqs - 1}:
            rows = self.pages[0].to(float32).array[self.table[seq]].reshape(-1, WIDTH)[: self.length].astype(np.float64)
            expected = _attended(self.q[seq].astype(np.float64), rows)
            error = float(np.abs(found[seq] - expected).max() / np.abs(expected).max())
            if not error <= MOST_ERROR[self.dtype]:
                raise BenchmarkError(
                    f"{self.title}: off by {error:.2e} of the largest, at most {MOST_ERROR[self.dtype]}"
                )
            most = max(most, error)
        return most

    @property
    def title(self) -> str:
        return f"{self.dtype}, {self.heads} heads, {self.seqs} x {self.length}"


def _attended(q: NDArray, rows: NDArray) -> NDArray:
    scores = q @ rows.T * SCALE
    weights = np.exp(scores - scores.max(1, keepdims=True))
    found: NDArray = weights @ rows[:, WIDTH - VALUE_DIM :] / weights.sum(1, keepdims=True)
    return found


def bench_latent(
    *, dtypes: Sequence[str] = ("bfloat16", "float32"), heads: Sequence[int] = HEADS,
    shapes: Sequence[tuple[int, int]] = SHAPES, num_runs: int = 15, read_buffer_bytes: int = READ_BUFFER_BYTES,
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """The report: {"tiles", "rows", "environment"}. A row has the step's seconds, the rates of its turns (medians), and
    the share of the limit that follows from them."""
    rates = unit_rates(read_buffer_bytes)

    def measured(dtype: str, count: int, shape: tuple[int, int]) -> dict[str, Any]:
        case = Case(dtype, count, *shape)
        report_progress(case.title)
        error = case.verify()
        works: dict[str, Callable[[], float]] = {
            "seconds": partial(thread_seconds, case.recording().replay), "read": rates["read"],
            "operations": rates[case.unit],
        }  # fmt: skip
        found = medians(works, num_runs)
        seconds = found["seconds"] / case.layers
        least = max(case.read_bytes / found["read"], case.operations / found["operations"])
        return {
            "dtype": case.dtype, "heads": case.heads, "sequences": case.seqs, "tokens": case.length,
            "layers": case.layers, "error": error, "seconds": seconds, "bytes_per_s": case.read_bytes / seconds,
            "operations_per_s": case.operations / seconds, "read_limit": found["read"], "unit": case.unit,
            "operations_limit": found["operations"], "share": least / seconds,
        }  # fmt: skip

    return one_thread_report(starmap(measured, product(dtypes, heads, shapes)))


def as_lines(report: dict[str, Any]) -> list[str]:
    """A table for people."""
    lines = [
        f"decode attention of latent pages, one thread, tiles {report['tiles']}",
        f"{'pages':<10}{'heads':>6}{'sequences':>11}{'median us':>11}{'GB/s':>7}{'Gop/s':>7}{'limits':>14}{'share':>7}",
    ]
    for row in report["rows"]:
        limits = f"{row['read_limit'] / 1e9:.0f}, {row['operations_limit'] / 1e9:.0f}"
        shape = f"{row['sequences']} x {row['tokens']}"
        lines.append(
            f"{row['dtype']:<10}{row['heads']:>6}{shape:>11}{row['seconds'] * 1e6:>11.0f}"
            f"{row['bytes_per_s'] / 1e9:>7.1f}{row['operations_per_s'] / 1e9:>7.0f}{limits:>14}{row['share']:>7.0%}"
        )
    return lines
