"""Latent attention on the cpu and on emulated GPUs beside numpy in float64, over shuffled pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime import ops
from runtime.backends import backend_of
from runtime.backends.cpu_threads import MAX_WORKERS, set_num_workers
from runtime.batch import Batch
from runtime.device.device import Device
from runtime.dtype import DType, bfloat16, float8_e4m3, float16, float32, int8
from runtime.errors import InvalidArgumentError
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.linear.experts import ExpertsWeight
from runtime.linear.latent import LatentMaps
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor
from tests.oracles.attention import attention as plain_attention

EPS, SCALE = 1e-6, 0.17
DEVICES = ["cpu", *(pytest.param(f"emulated:{arch}", marks=pytest.mark.emulator) for arch in ("sm_80", "sm_90a"))]
CHUNKS = [(0, 9), (30, 1), (17, 4), (0, 1)]  # context and queries of each sequence


def latent_maps(device: Device, dtype: DType, keys: Any, rotary: int, values: Any = None) -> LatentMaps:
    """Maps of keys ``[H, latent, key]`` and of values ``[H, value, latent]`` (none: the first number)."""
    (heads, latent, key), options = keys.shape, LoadOptions(device=device, dtype=dtype)
    values = np.eye(1, latent)[None].repeat(heads, 0) if values is None else values

    def kept(array: Any) -> Any:
        tensor = Tensor.from_numpy(np.ascontiguousarray(array, np.float32)).to(dtype)
        return ops.prepare_linear([tensor], None, options)

    sizes = key, rotary, latent, values.shape[1]
    if device.kind != "cpu":
        return LatentMaps(heads, kept(keys.reshape(-1, key)), kept(values.reshape(-1, latent)), None, *sizes)
    weights = (ExpertsWeight([kept(each) for each in of_heads]) for of_heads in (keys, values))
    return LatentMaps(heads, *weights, None, *sizes)


class Case:
    """Queries, latent rows of whole sequences, and a rotation, in a type's precision."""

    def __init__(
        self, device: str, dtype: DType, heads: int, rotary: int, rest: int, chunks: list[tuple[int, int]],
        *, interleaved: bool = True, block_size: int = 8, has_scales: bool = False, pages: DType | None = None,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(rotary + rest)
        self.device, self.dtype, self.chunks, self.rest = Device.parse(device), dtype, chunks, rest
        self.rotary, self.interleaved, self.block_size = rotary, interleaved, block_size
        lengths = [context + count for context, count in chunks]
        activations = float32 if device == "cpu" else dtype

        def rounded(array: Any, kind: DType) -> Any:
            return Tensor.from_numpy(array.astype(np.float32)).to(kind).to(float32).numpy()

        self.activations = activations
        self.latents = [rounded(rng.standard_normal((length, rest + rotary)), activations) for length in lengths]
        self.q = rounded(rng.standard_normal((sum(count for _, count in chunks), heads, rotary + rest)), activations)
        self.norm = rng.uniform(0.5, 1.5, rest).astype(np.float32)
        angles = np.outer(np.arange(max(lengths)), 0.9 ** np.arange(rotary // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.q_scales = rng.uniform(1, 2, max(lengths)).astype(np.float32) if has_scales else None
        self.maps = latent_maps(self.device, activations, np.stack([np.eye(rest)] * heads), rotary)
        spec = KVCacheSpec.uniform(1, 1, rotary + rest, block_size, pages or dtype, self.device, latent_values=rest)
        widths = [-(-length // block_size) for length in lengths]
        blocks = rng.permutation(sum(widths) + 2)
        self.tables = np.zeros((len(chunks), max(widths)), np.int32)
        for seq, width in enumerate(widths):
            self.tables[seq, :width], blocks = blocks[:width], blocks[width:]
        self.cache = KVCache(spec, sum(widths) + 2)

    def on_device(self, array: Any, dtype: DType | None = None) -> Tensor:
        tensor = Tensor.from_numpy(np.ascontiguousarray(array))
        return (tensor if dtype is None else tensor.to(dtype)).to(self.device)

    def run(self) -> Any:
        """All contexts are written first, then the chunks attend; float32 ``[T, H, rest]``."""
        (pages,) = self.cache.layer(0)
        scales = None if self.q_scales is None else self.on_device(self.q_scales)
        rope = RopeTable(self.on_device(self.cos), self.on_device(self.sin), self.interleaved, scales)
        norm = RmsNorm(self.on_device(self.norm), EPS, 1.0)

        def prepare(q: Any, spans: list[tuple[int, int]]) -> Tensor:
            places = [np.arange(first, end) for first, end in spans]
            slots = [
                self.tables[seq, place // self.block_size] * np.int64(self.block_size) + place % self.block_size
                for seq, place in enumerate(places)
            ]
            rows = np.concatenate([self.latents[seq][place] for seq, place in enumerate(places)])
            given = np.concatenate([q[..., self.rotary :], q[..., : self.rotary]], -1).reshape(len(q), -1)
            return ops.latent_queries(
                self.on_device(given, self.activations), self.on_device(rows, self.activations), self.maps,
                self.on_device(np.concatenate(places).astype(np.int32)), rope=rope, norm=norm, pages=pages,
                slot_mapping=self.on_device(np.concatenate(slots)),
            )  # fmt: skip

        contexts = [(0, context) for context, _ in self.chunks]
        total = sum(end for _, end in contexts)
        if total:
            prepare(np.zeros((total, *self.q.shape[1:]), np.float32), contexts)
        q = prepare(self.q, [(context, context + count) for context, count in self.chunks])
        starts = np.cumsum([0, *(count for _, count in self.chunks)]).astype(np.int32)
        lengths = np.array([context + count for context, count in self.chunks], np.int32)
        nothing = self.on_device(np.zeros(int(starts[-1]), np.int32))
        batch = Batch(
            nothing, nothing, self.on_device(starts), self.on_device(lengths), (), (self.on_device(self.tables),),
            nothing, max_query_len=int(np.diff(starts).max()), max_seq_len=int(lengths.max()),
        )  # fmt: skip
        out = ops.latent_attention(q, pages, batch, 0, scale=SCALE, value_dim=self.rest)
        return out.to(Device.parse("cpu")).to(float32).numpy().reshape(len(self.q), -1, self.rest)

    def rotated(self, x: Any, positions: Any) -> Any:
        """``x [T, ..., rotary]`` in float64."""
        shape = len(positions), *(1,) * (x.ndim - 2), self.rotary // 2
        cos, sin = (table[positions].astype(np.float64).reshape(shape) for table in (self.cos, self.sin))
        half = self.rotary // 2
        low, high = (x[..., ::2], x[..., 1::2]) if self.interleaved else (x[..., :half], x[..., half:])
        found = np.empty(x.shape)
        one, other = low * cos - high * sin, high * cos + low * sin
        if self.interleaved:
            found[..., ::2], found[..., 1::2] = one, other
        else:
            found[..., :half], found[..., half:] = one, other
        return found

    def expected(self, in_bytes: bool = False) -> Any:
        """In float64; with `in_bytes` of rows that are rounded as pages of fp8 are."""
        outs, first = [], 0
        for latent, (context, count) in zip(self.latents, self.chunks, strict=True):
            c, k = latent[:, : self.rest].astype(np.float64), latent[:, self.rest :]
            c = c / np.sqrt((c**2).mean(1, keepdims=True) + EPS) * self.norm
            k = self.rotated(k, np.arange(len(k)))
            if in_bytes:
                k = Tensor.from_numpy(k.astype(np.float32)).to(bfloat16).to(float32).numpy().astype(np.float64)
                c = np.concatenate([in_e4m3(c[:, at : at + 128]) for at in range(0, self.rest, 128)], axis=1)
            rows = np.concatenate([k, c], axis=1)
            q = self.q[first : first + count].astype(np.float64)
            q = np.concatenate(
                [self.rotated(q[..., : self.rotary], np.arange(context, context + count)), q[..., self.rotary :]], -1
            )
            if self.q_scales is not None:
                q *= self.q_scales[context : context + count, None, None]
            outs.append(plain_attention(q, rows[:, None], c[:, None], SCALE))
            first += count
        return np.concatenate(outs)


def in_e4m3(x: Any) -> Any:
    """Rows rounded to e4m3, each with a scale."""
    scale = np.abs(x).max(1, keepdims=True) / 448
    size = np.abs(x / scale)
    step = 2.0 ** (np.clip(np.floor(np.log2(np.maximum(size, 1e-30))), -6, 8) - 3)
    return np.sign(x) * np.minimum(np.rint(size / step) * step, 448) * scale


def error_of(case: Case) -> float:
    expected = case.expected()
    return float(np.abs(case.run() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "heads", "rotary", "rest", "interleaved", "block_size", "tolerance"),
    [
        (float32, 3, 6, 22, True, 8, 2e-6), (float32, 9, 4, 17, False, 16, 2e-6), (bfloat16, 1, 2, 1, True, 8, 2e-2),
        (bfloat16, 5, 8, 32, True, 8, 2e-2),
        pytest.param(bfloat16, 16, 64, 512, True, 16, 2e-2, marks=pytest.mark.exhaustive),
        pytest.param(float16, 5, 10, 130, False, 32, 3e-3, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
@pytest.mark.exhaustive_cases("dtype0.*emulated", "dtype1.*emulated", "sm_80")
def test_beside_numpy(
    device: str, dtype: DType, heads: int, rotary: int, rest: int, interleaved: bool, block_size: int, tolerance: float
) -> None:
    case = Case(device, dtype, heads, rotary, rest, CHUNKS, interleaved=interleaved, block_size=block_size)
    assert error_of(case) <= tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(float32, 2e-6), (bfloat16, 2e-2)])
@pytest.mark.exhaustive_cases("dtype1.*sm", "sm_80")
def test_queries_scaled_by_position(device: str, dtype: DType, tolerance: float) -> None:
    case = Case(device, dtype, 3, 6, 22, CHUNKS, has_scales=True)
    expected, ours = case.expected(), case.run()
    largest = np.abs(expected).max()
    assert np.abs(ours - expected).max() <= tolerance * largest
    case.q_scales = None
    assert np.abs(ours - case.expected()).max() > 3 * tolerance * largest  # without them it is another


@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_long_sequences_on_several_threads_of_the_cpu(dtype: DType) -> None:
    """Segments, each of which is a work item of its own where there are few sequences."""
    case = Case("cpu", dtype, 2, 8, 40, [(2_300, 1)], block_size=16)
    assert error_of(case) <= (2e-6 if dtype is float32 else 2e-2)


@pytest.mark.parametrize("dtype", [float32, bfloat16, float16])
@pytest.mark.parametrize("heads", [3, 20])
def test_a_tokens_bits_on_the_cpu_depend_on_no_batch_chunk_or_thread(dtype: DType, heads: int) -> None:
    """Rows share fours with other tokens' heads or not, chunks end anywhere, and segments are merged by one work item
    or by a launch of their own."""
    long, short = (251, 12), (120, 9)
    together = Case("cpu", dtype, heads, 6, 35, [long, short, (700, 1)], block_size=8)
    q = together.q.copy()  # a run rotates queries in place
    expected = together.run()
    starts = np.cumsum([0, 12, 9])
    for seq, cuts in ((0, (1, 4, 12)), (1, (8, 9)), (2, (1,))):
        done = 0
        for end in cuts:
            part = Case("cpu", dtype, heads, 6, 35, [together.chunks[seq]], block_size=8)
            context = together.chunks[seq][0]
            part.chunks = [(context + done, end - done)]
            part.latents = [together.latents[seq]]
            part.norm, part.cos, part.sin = together.norm, together.cos, together.sin
            for threads in {1, MAX_WORKERS}:
                part.q = q[starts[seq] + done : starts[seq] + end].copy()
                set_num_workers(threads)
                try:
                    np.testing.assert_array_equal(part.run(), expected[starts[seq] + done : starts[seq] + end])
                finally:
                    set_num_workers(MAX_WORKERS)
            done = end


def test_a_nan_in_a_seen_row_is_not_hidden() -> None:
    case = Case("cpu", bfloat16, 5, 4, 36, [(300, 2), (300, 1)], block_size=8)
    case.latents[0][40, 7] = np.nan
    found = case.run()
    assert np.isnan(found[:2]).all()
    assert np.isfinite(found[2]).all()


def test_wrong_arguments_are_refused_by_name() -> None:
    case = Case("cpu", float32, 2, 4, 12, [(0, 3)])
    (pages,) = case.cache.layer(0)
    q = case.on_device(case.q)
    batch: Any = None
    with pytest.raises(InvalidArgumentError, match=r"latent_attention: value_dim is 17, must be from 1 to q's 16"):
        ops.latent_attention(q, pages, batch, 0, scale=1.0, value_dim=17)
    with pytest.raises(InvalidArgumentError, match=r"latent_attention: pages are .* rows of 32"):
        ops.latent_attention(case.on_device(np.zeros((3, 2, 18), np.float32)), pages, batch, 0, scale=1.0, value_dim=8)
    turns = case.on_device(np.ones((3, 2), np.float32))
    short = RopeTable(turns, turns, True, case.on_device(case.norm))
    nothing, slots = case.on_device(np.zeros(3, np.int32)), case.on_device(np.zeros(3, np.int64))
    with pytest.raises(InvalidArgumentError, match=r"latent_queries: rope.q_scales .*12.*3"):
        ops.latent_queries(
            q.view(3, -1), case.on_device(case.latents[0]), case.maps, nothing, rope=short,
            norm=RmsNorm(case.on_device(case.norm), EPS, 1.0), pages=pages, slot_mapping=slots,
        )  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=r"dtype is int8, must be one of float32.*fp8"):
        KVCacheSpec.uniform(1, 1, 16, 8, int8, latent_values=12)


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
@pytest.mark.parametrize(("key", "rotary", "rest", "interleaved"), [(64, 64, 256, True), (10, 6, 18, False)])
@pytest.mark.parametrize("is_scaled", [True, False])
def test_queries_that_are_not_absorbed(
    device: str, key: int, rotary: int, rest: int, interleaved: bool, is_scaled: bool
) -> None:
    """Those of long chunks have their rotated part last; they grow with their position where the model's do."""
    case = Case(device, float32, 3, rotary, rest, [(0, 9)], interleaved=interleaved)
    (pages,) = case.cache.layer(0)
    positions = np.array([4, 0, 8, 2, 7], np.int32)
    q = np.random.default_rng(1).standard_normal((5, 3, key + rotary)).astype(np.float32)
    scales = np.linspace(1, 2, len(case.cos)).astype(np.float32)
    rope = RopeTable(
        case.on_device(case.cos), case.on_device(case.sin), interleaved,
        q_scales=case.on_device(scales) if is_scaled else None,
    )  # fmt: skip
    wide = case.on_device(np.concatenate([q.reshape(5, -1), case.latents[0][positions]], 1))
    maps = latent_maps(case.device, float32, np.zeros((3, rest, key)), rotary)
    norm, width = RmsNorm(case.on_device(case.norm), EPS, 1.0), 3 * (key + rotary)
    out = backend_of(case.device).latent_prepare(
        wide[:, :width], wide[:, width:], maps, case.on_device(positions), rope, norm, pages,
        case.on_device(np.arange(8, 13)),
    )  # fmt: skip
    found = out.to(Device.parse("cpu")).numpy().reshape(q.shape)
    rows = pages.to(Device.parse("cpu")).numpy()[1, 0, :5, : rotary + rest]
    c = case.latents[0][positions, :rest].astype(np.float64)
    c = c / np.sqrt((c**2).mean(1, keepdims=True) + EPS) * case.norm
    k = case.rotated(case.latents[0][positions, rest:].astype(np.float64), positions)
    np.testing.assert_allclose(rows, np.concatenate([k, c], 1), rtol=1e-5, atol=1e-6)
    wanted = np.concatenate([q[..., :key], case.rotated(q[..., key:].astype(np.float64), positions)], -1)
    if is_scaled:
        wanted = wanted * scales[positions, None, None]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "sizes", "tokens", "tolerance"),
    [
        (float32, (3, 10, 6, 18, 13), 9, 2e-6), (bfloat16, (3, 24, 8, 32, 40), 3, 6e-3),
        (bfloat16, (2, 40, 8, 144, 24), 67, 6e-3),
        pytest.param(bfloat16, (5, 8, 4, 26, 13), 21, 6e-3, marks=pytest.mark.exhaustive),
        pytest.param(float16, (3, 128, 64, 512, 128), 18, 1e-3, marks=pytest.mark.exhaustive),
        pytest.param(bfloat16, (2, 192, 64, 512, 256), 130, 6e-3, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
@pytest.mark.exhaustive_cases("dtype0.*sm_90a", "dtype1.*sm_80", "dtype2.*sm_80")
def test_maps_of_queries_and_results(
    device: str, dtype: DType, sizes: tuple[int, ...], tokens: int, tolerance: float
) -> None:
    """Queries that are columns of wider rows through the keys' maps, results through the values', beside float64."""
    heads, key, rotary, rest, value = sizes
    rng, case = np.random.default_rng(tokens), Case(device, dtype, heads, rotary, rest, [(0, 80)], has_scales=True)
    own = case.activations

    def drawn(*shape: int) -> Any:
        return Tensor.from_numpy(rng.standard_normal(shape, np.float32)).to(own).to(float32).numpy()

    keys, values = drawn(heads, rest, key), drawn(heads, value, rest)
    maps = latent_maps(case.device, own, keys, rotary, values)
    q, attended = drawn(tokens, heads * (key + rotary) + rest + rotary), drawn(tokens, heads * rest)
    positions = rng.integers(0, 80, tokens).astype(np.int32)
    rope = RopeTable(case.on_device(case.cos), case.on_device(case.sin), True, q_scales=case.on_device(case.q_scales))
    wide, width = case.on_device(q, own), heads * (key + rotary)
    (pages,) = case.cache.layer(0)
    found = ops.latent_queries(
        wide[:, :width], wide[:, width:], maps, case.on_device(positions), rope=rope,
        norm=RmsNorm(case.on_device(case.norm), EPS, 1.0), pages=pages,
        slot_mapping=case.on_device(np.full(tokens, -1, np.int64)),
    )  # fmt: skip
    per_head = q[:, :width].reshape(tokens, heads, -1).astype(np.float64)
    wanted = np.concatenate(
        [case.rotated(per_head[..., key:], positions), np.einsum("thk,hck->thc", per_head[..., :key], keys)], -1
    ) * case.q_scales[positions, None, None]  # fmt: skip
    results = ops.latent_values(case.on_device(attended, own), maps)
    expected = np.einsum("thc,hvc->thv", attended.reshape(tokens, heads, rest).astype(np.float64), values)
    for ours, theirs in ((found, wanted), (results, expected.reshape(tokens, -1))):
        numbers = ours.to(Device.parse("cpu")).to(float32).numpy()
        assert np.abs(numbers - theirs).max() <= tolerance * np.abs(theirs).max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "sizes", "chunks", "tolerance"),
    [
        (float32, (5, 6, 22, 8), CHUNKS, 2e-5), (bfloat16, (5, 16, 144, 16), CHUNKS, 2e-2),
        pytest.param(bfloat16, (16, 64, 512, 16), [(0, 9), (200, 1), (17, 4)], 2e-2, marks=pytest.mark.exhaustive),
        pytest.param(float16, (20, 64, 256, 16), [(300, 2), (5, 1)], 3e-3, marks=pytest.mark.exhaustive),
        pytest.param(float32, (3, 10, 300, 32), [(700, 2), (5, 1)], 2e-5, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
@pytest.mark.exhaustive_cases("dtype0.*sm_90a", "dtype1.*sm_80")
def test_rows_of_fp8(
    device: str, dtype: DType, sizes: tuple[int, ...], chunks: list[tuple[int, int]], tolerance: float
) -> None:
    """Beside float64 of rows that are rounded alike, and of rows that are not."""
    heads, rotary, rest, block_size = sizes
    case = Case(device, dtype, heads, rotary, rest, chunks, block_size=block_size, pages=float8_e4m3)
    ours, alike, exact = case.run(), case.expected(in_bytes=True), case.expected()
    largest = np.abs(exact).max()
    # A number that lies between two bytes may be rounded either way: of few rows it is seen.
    assert np.sqrt(((ours - alike) ** 2).mean()) <= tolerance / 2 * largest
    assert np.abs(ours - alike).max() <= max(tolerance, 2e-2) * largest
    assert 1e-4 * largest <= np.sqrt(((ours - exact) ** 2).mean()) <= 1.5e-2 * largest


def test_bytes_of_a_token() -> None:
    """DeepSeek's rows are 656 bytes of fp8, with four scales."""
    for device in ("cpu", "emulated:sm_90a"):
        spec = KVCacheSpec.uniform(27, 1, 576, 16, float8_e4m3, Device.parse(device), latent_values=512)
        assert spec.bytes_per_token == 27 * 656
