"""`bench kernels --device cpu --parts states`: decode of gated delta rules beside the rate at which memory is read.

A step reads each state once and writes it once. The share is that of all these bytes at the scan's speed in the read
rate of the same run. Work and rate are one thread's, by its processor time; states of several layers take turns, so
that none stays in a cache. Everything timed has just been compared with numpy in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product, starmap
from typing import Any

import numpy as np

from numba_kernels.cpu.recurrent.scan import scan_kernel
from numba_kernels.cpu.running.arena import Arena
from numba_kernels.cpu.running.recording import Recording, hold, record
from runtime import ops
from runtime.batch import Batch
from runtime.bench.cpu_rates import medians, one_thread_report, thread_seconds, unit_rates
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.cpu_limits import READ_BUFFER_BYTES
from runtime.dtype import NDArray
from runtime.linear.recurrent import DeltaRule
from runtime.tensor.tensor import Tensor

HEADS = ((16, 16), (16, 32))  # of keys and values: Qwen3.5-0.8B, 4B
SEQUENCES = (1, 8, 32)
DIM, TAPS, CONTEXT, EPS, MOST_ERROR = 128, 4, 100, 1e-6, 1e-4
STATE_BYTES = 256 << 20  # of all layers, at least: more than caches hold


class Case:
    """A decode of `seqs` sequences."""

    def __init__(self, heads: tuple[int, int], seqs: int, state_bytes: int = STATE_BYTES) -> None:
        rng = np.random.default_rng(0)
        (keys, values), self.heads, self.seqs = heads, heads, seqs
        channels = (2 * keys + values) * DIM
        self.bytes = 2 * seqs * values * DIM * DIM * 4
        self.layers = -(-state_bytes // self.bytes)

        def drawn(*shape: int, scale: float = 1.0) -> Tensor:
            array = np.resize(rng.standard_normal(1_000_003).astype(np.float32) * np.float32(scale), shape)
            return Tensor.from_numpy(array)

        self.weights = DeltaRule(
            conv=drawn(channels, TAPS, scale=0.3), dt_bias=drawn(values), norm=drawn(DIM), eps=EPS,
            a=Tensor.from_numpy(-np.exp(rng.uniform(-3, 2, values)).astype(np.float32)), num_key_heads=keys,
            num_value_heads=values, key_dim=DIM, value_dim=DIM,
        )  # fmt: skip
        self.x = drawn(seqs, channels + values * DIM + 2 * values)
        self.pages = [
            (
                Tensor.from_numpy(np.full((2 * seqs, 1), CONTEXT, np.int32)), drawn(2 * seqs, TAPS - 1, channels),
                _aligned((2 * seqs, values, DIM, DIM), drawn(2 * seqs, values, DIM, DIM, scale=0.1).array),
            )
            for _ in range(self.layers)
        ]  # fmt: skip
        table = np.stack([seqs + np.arange(seqs), np.arange(seqs)], axis=1).astype(np.int32)
        nothing = Tensor.from_numpy(np.zeros(seqs, np.int32))
        self.batch = Batch(
            nothing, nothing, Tensor.from_numpy(np.arange(seqs + 1, dtype=np.int32)),
            Tensor.from_numpy(np.full(seqs, CONTEXT + 1, np.int32)), (), (Tensor.from_numpy(table),), nothing,
            max_query_len=1, max_seq_len=CONTEXT + 1,
        )  # fmt: skip

    def run(self, layer: int) -> Tensor:
        return ops.delta_rule(self.x, self.weights, pages=self.pages[layer], batch=self.batch, group=0)

    def recording(self, *, is_scan: bool) -> Recording:
        """All layers' work, recorded as a decode step is; or their scans alone."""
        with record(Arena()) as recording:
            hold(self.batch.query_start.array, self.batch.seq_lens.array, self.batch.block_tables[0].array)
            for layer in range(self.layers):
                self.run(layer)
            if is_scan:
                recording.keep(scan_kernel(True, np.float32).address)
        return recording

    def verify(self) -> float:
        """The largest error of the last sequence, as a share of the largest number. Raises BenchmarkError if it is too
        large, or NaN."""
        seq = self.seqs - 1
        expected = self._expected(seq)
        found = self.run(0).numpy()[seq]
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        if not error <= MOST_ERROR:
            raise BenchmarkError(f"{self.title}: off by {error:.2e} of the largest, at most {MOST_ERROR}")
        return error

    def _expected(self, seq: int) -> NDArray:
        (keys, values), w = self.heads, self.weights
        _, history, states = (plane.array[seq].astype(np.float64) for plane in self.pages[0])
        row, channels = self.x.array[seq].astype(np.float64), (2 * keys + values) * DIM
        mixed = (np.vstack([history, row[:channels]]).T * w.conv.array).sum(1)
        mixed *= _sigmoid(mixed)
        q, k, v = (each.reshape(-1, DIM) for each in np.split(mixed, [keys * DIM, 2 * keys * DIM]))
        q, k = (each / np.sqrt((each**2).sum(1, keepdims=True) + 1e-6) for each in (q, k))
        q, k = (np.repeat(each, values // keys, axis=0) for each in (q / DIM**0.5, k))
        z, (b, a) = row[channels : -2 * values].reshape(values, DIM), np.split(row[-2 * values :], 2)
        decayed = states * np.exp(w.a.array * np.log1p(np.exp(a + w.dt_bias.array)))[:, None, None]
        delta = _sigmoid(b)[:, None] * (v - np.einsum("hkv,hk->hv", decayed, k))
        out = np.einsum("hkv,hk->hv", decayed + k[:, :, None] * delta[:, None], q)
        out *= w.norm.array / np.sqrt((out**2).mean(1, keepdims=True) + EPS)
        found: NDArray = (out * z * _sigmoid(z)).reshape(-1)
        return found

    @property
    def title(self) -> str:
        return f"{self.heads[0]} key and {self.heads[1]} value heads, {self.seqs} sequences"


def _sigmoid(x: NDArray) -> NDArray:
    found: NDArray = 1 / (1 + np.exp(-x))
    return found


def _aligned(shape: tuple[int, ...], values: NDArray) -> Tensor:
    """A tensor that begins with a page of memory, as those of a cache do."""
    memory = np.empty(values.size + 1024, np.float32)
    start = -memory.ctypes.data % 4096 // 4
    placed = memory[start : start + values.size].reshape(shape)
    placed[...] = values
    return Tensor.from_numpy(placed)


def bench_states(
    *, heads: Sequence[tuple[int, int]] = HEADS, sequences: Sequence[int] = SEQUENCES, num_runs: int = 15,
    state_bytes: int = STATE_BYTES, read_buffer_bytes: int = READ_BUFFER_BYTES,
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """The report: {"tiles", "rows", "environment"}. A row has a layer's seconds and its scan's (medians of turns), and
    the share of the read rate that follows."""
    reading = unit_rates(read_buffer_bytes)["read"]

    def measured(each: tuple[int, int], seqs: int) -> dict[str, Any]:
        case = Case(each, seqs, state_bytes)
        report_progress(case.title)
        error = case.verify()
        works: dict[str, Callable[[], float]] = {
            "layer": partial(thread_seconds, case.recording(is_scan=False).replay),
            "scan": partial(thread_seconds, case.recording(is_scan=True).replay), "read": reading,
        }  # fmt: skip
        found = medians(works, num_runs)
        scan = found["scan"] / case.layers
        return {
            "key_heads": each[0], "value_heads": each[1], "sequences": seqs, "error": error, "bytes": case.bytes,
            "layer_seconds": found["layer"] / case.layers, "scan_seconds": scan, "bytes_per_s": case.bytes / scan,
            "read_limit": found["read"], "share": case.bytes / scan / found["read"],
        }  # fmt: skip

    return one_thread_report(starmap(measured, product(heads, sequences)))


def as_lines(report: dict[str, Any]) -> list[str]:
    """A table for people."""
    lines = [
        f"decode of gated delta rules, one thread, tiles {report['tiles']}",
        f"{'heads':<9}{'sequences':>10}{'layer us':>10}{'scan us':>10}{'GB/s':>7}{'read':>7}{'share':>7}",
    ]
    for row in report["rows"]:
        lines.append(
            f"{row['key_heads']:>3} /{row['value_heads']:>3} {row['sequences']:>10}{row['layer_seconds'] * 1e6:>10.0f}"
            f"{row['scan_seconds'] * 1e6:>10.0f}{row['bytes_per_s'] / 1e9:>7.1f}{row['read_limit'] / 1e9:>7.1f}"
            f"{row['share']:>7.0%}"
        )
    return lines
