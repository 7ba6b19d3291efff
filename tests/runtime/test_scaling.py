"""Multipliers, soft caps and norms over whole rows of q and k, through the door, on the cpu and on an emulated GPU."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import ops
from runtime.device.device import Device
from runtime.dtype import DType, float32
from runtime.errors import InvalidArgumentError
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor
from tests.oracles import dense

DEVICES = ["cpu", pytest.param("emulated:sm_90a", marks=pytest.mark.emulator)]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def tensor(array: np.ndarray, device: str) -> Tensor:
    return Tensor.from_numpy(array).to(device)


def loaded(array: np.ndarray, device: str) -> ops.LinearWeight:
    return ops.prepare_linear(Tensor.from_numpy(array), options=LoadOptions(device=Device(device)))


def of_cpu(value: Tensor) -> np.ndarray:
    return value.to("cpu").to(float32).array


@on_each_device
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 64), (5, 1000)])
def test_add_scaled(device: str, shape: tuple[int, int]) -> None:
    x, y = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    out = of_cpu(ops.add_scaled(tensor(x, device), tensor(y, device), 0.22))
    np.testing.assert_allclose(out, x + 0.22 * y.astype(np.float64), rtol=1e-6, atol=1e-6)


@on_each_device
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 64), (0, 8)])
def test_sigmoid_gate(device: str, shape: tuple[int, int]) -> None:
    x, gate = 4 * np.random.default_rng(3).standard_normal((2, *shape)).astype(np.float32)
    if x.size > 8:
        gate[0, :2] = 200.0, -200.0
    out = of_cpu(ops.sigmoid_gate(tensor(x, device), tensor(gate, device)))
    np.testing.assert_allclose(out, x / (1 + np.exp(-gate.astype(np.float64))), rtol=2e-6, atol=1e-37)
    with pytest.raises(InvalidArgumentError, match="sigmoid_gate: gate"):
        ops.sigmoid_gate(tensor(x, device), tensor(np.zeros((9, 9), np.float32), device))


@on_each_device
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_columns_are_forbidden(device: str, rows: int) -> None:
    x = np.random.default_rng(6).standard_normal((rows, 101)).astype(np.float32)
    logits = tensor(x, device)
    for ids in ([], [0, 17, 50, 99, 100]):
        ops.forbid(logits, tensor(np.array(ids, np.int32), device))
        x[:, ids] = -np.inf
        np.testing.assert_array_equal(of_cpu(logits), x)
    with pytest.raises(InvalidArgumentError, match="forbid: token_ids"):
        ops.forbid(logits, tensor(np.zeros(3, np.float32), device))


@on_each_device
@pytest.mark.exhaustive_cases("emulated")
@pytest.mark.parametrize("rows", [0, 1, 35])
def test_the_best_groups_of_columns_are_kept(device: str, rows: int) -> None:
    rng = np.random.default_rng(8)
    for groups, size, best in ((1, 7, 1), (40, 3, 5), (67, 40, 66)):
        x = rng.standard_normal((rows, groups * size)).astype(np.float32)
        scores = rng.standard_normal((rows, groups)).astype(np.float32)
        scores[:, ::3] = scores[:, :1]  # equal ones
        columns = rng.permutation(groups * size).astype(np.int32).reshape(groups, size)
        logits = tensor(x, device)
        ops.keep_groups(logits, tensor(scores, device), tensor(columns, device), best)
        expected = np.full_like(x, -np.inf)
        for row in range(rows):
            kept = columns[np.argsort(-scores[row], kind="stable")[:best]]
            expected[row, kept] = x[row, kept]
        np.testing.assert_array_equal(of_cpu(logits), expected)
    with pytest.raises(InvalidArgumentError, match="keep_groups: num_best is 68, must be 1 to 67"):
        ops.keep_groups(logits, tensor(scores, device), tensor(columns, device), 68)
    with pytest.raises(InvalidArgumentError, match="keep_groups: columns are 67 groups"):
        ops.keep_groups(tensor(np.zeros((rows, 68), np.float32), device), logits, tensor(columns, device), 1)


@on_each_device
@pytest.mark.parametrize("vocab", [401, 512])
def test_logits_are_scaled_and_capped(device: str, vocab: int) -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((3, 16)).astype(np.float32), rng.standard_normal((vocab, 16)).astype(np.float32)
    weight[7], weight[8] = 1000 * x[0], -1000 * x[0]  # far beyond the cap
    given, linear = tensor(x, device), loaded(weight, device)
    logits = dense.linear(x, weight)
    for scale, softcap in ((0.125, None), (0.5, 30.0), (1.0, 3.5)):
        expected = logits * scale if softcap is None else softcap * np.tanh(logits * scale / softcap)
        out = of_cpu(ops.logits_linear(given, linear, scale=scale, softcap=softcap))
        bound = 1e-5 if softcap is None else 1e-5 * softcap
        assert np.abs(out - expected).max() <= bound * max(1.0, np.abs(expected).max() if softcap is None else 1.0)
    x[1, 3] = np.nan
    assert np.isnan(of_cpu(ops.logits_linear(tensor(x, device), linear, softcap=30.0))[1]).all()
    for softcap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError, match="logits_linear: softcap is"):
            ops.logits_linear(given, linear, softcap=softcap)


@on_each_device
def test_embeddings_are_multiplied(device: str) -> None:
    table = np.random.default_rng(2).standard_normal((9, 20)).astype(np.float32)
    ids = np.array([3, 0, 8, 3], np.int32)
    for rows in (tensor(table, device), loaded(table, device)):
        out = of_cpu(ops.embedding(tensor(ids, device), rows, scale=6.9375))
        np.testing.assert_array_equal(out, table[ids] * np.float32(6.9375))


# q heads, kv heads, head dim, rotary, interleaved
LAYOUTS = [(6, 2, 16, 16, False), (5, 5, 10, 4, True), (4, 1, 64, 32, True), (3, 1, 5, 0, False), (1, 1, 8, 8, False)]


@on_each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive_cases("layout0-emulated", "layout2-emulated", "layout4-emulated")
def test_norms_of_whole_rows_and_scales_of_queries(
    device: str, layout: tuple[int, int, int, int, bool], dtype: str
) -> None:
    if device == "cpu" and dtype == "bfloat16":
        pytest.skip("activations on the cpu are float32")
    q_heads, kv_heads, head_dim, rotary, interleaved = layout
    rng, tokens = np.random.default_rng(head_dim), 7
    qkv = rng.standard_normal((tokens, (q_heads + 2 * kv_heads) * head_dim)).astype(np.float32)
    qkv = of_cpu(Tensor.from_numpy(qkv).to(dtype))
    weights = [rng.standard_normal(count * head_dim).astype(np.float32) for count in (q_heads, kv_heads)]
    positions, slots = rng.integers(0, 50, tokens).astype(np.int32), np.arange(tokens, dtype=np.int64)
    angles = rng.standard_normal((50, rotary // 2)).astype(np.float32)
    cos, sin, q_scales = np.cos(angles), np.sin(angles), rng.uniform(1, 2, 50).astype(np.float32)
    rope = ops.RopeTable(*(tensor(each, device) for each in (cos, sin)), interleaved, tensor(q_scales, device))
    spec = KVCacheSpec.uniform(1, kv_heads, head_dim, 8, DType.parse(dtype), Device(device))
    k_cache, v_cache = KVCache(spec, 1).layer(0)
    q = ops.qkv_prepare(
        tensor(qkv, device).to(dtype), tensor(positions, device), num_q_heads=q_heads, num_kv_heads=kv_heads,
        head_dim=head_dim, rope=rope if rotary else None, q_norm=tensor(weights[0], device),
        k_norm=tensor(weights[1], device), norm_eps=1e-6, k_cache=k_cache, v_cache=v_cache,
        slot_mapping=tensor(slots, device),
    )  # fmt: skip
    parts = np.split(qkv, [q_heads * head_dim, (q_heads + kv_heads) * head_dim], axis=1)
    expected = []
    for part, weight in zip(parts, weights):
        heads = dense.rms_norm(part, weight, 1e-6).reshape(tokens, -1, head_dim)
        if rotary:
            heads = dense.rotate(heads, cos[positions][:, None], sin[positions][:, None], interleaved)
        expected.append(heads)
    if rotary:
        expected[0] *= q_scales[positions][:, None, None]
    keys = of_cpu(k_cache)[0]  # cpu: [heads, dim, token]; GPU: [heads, token, dim rounded up]
    keys = keys.transpose(2, 0, 1) if device == "cpu" else keys.transpose(1, 0, 2)[..., :head_dim]
    tolerance = 1e-5 if dtype == "float32" else 2.0**-7
    assert dense.relative_error(of_cpu(q), expected[0]) < tolerance
    assert dense.relative_error(keys[:tokens], expected[1]) < tolerance


@on_each_device
def test_a_norms_size_is_that_of_a_head_or_of_all_heads(device: str) -> None:
    cache = KVCache(KVCacheSpec.uniform(1, 2, 8, 8, float32, Device(device)), 1).layer(0)
    numbers = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": None, "norm_eps": 1e-6}

    def prepare(q_size: int, k_size: int) -> None:
        ops.qkv_prepare(
            Tensor.zeros((1, 64), "float32", device), Tensor.zeros((1,), "int32", device), **numbers,
            q_norm=Tensor.zeros((q_size,), "float32", device), k_norm=Tensor.zeros((k_size,), "float32", device),
            k_cache=cache[0], v_cache=cache[1], slot_mapping=Tensor.zeros((1,), "int64", device),
        )  # fmt: skip

    for sizes, argument, wanted in (((8, 16), "q_norm", 32), ((32, 8), "k_norm", 16), ((9, 16), "q_norm", 32)):
        with pytest.raises(InvalidArgumentError, match=rf"qkv_prepare: {argument} .*must be \[{wanted}\]"):
            prepare(*sizes)


@pytest.mark.emulator
@pytest.mark.parametrize("shape", [(3, 8), (2, 5)])
def test_gelu_gate_on_a_gpu_is_the_cpu_s(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(6)
    x, up = (rng.standard_normal(size).astype(np.float32) for size in (shape, (shape[0], 3 * shape[1])))
    tensors = [Tensor.from_numpy(each).to("bfloat16") for each in (x, up)]
    expected = ops.gelu_gate(*(each.to("float32") for each in tensors), shape[1])
    actual = ops.gelu_gate(*(each.to("emulated:sm_90a") for each in tensors), shape[1])
    np.testing.assert_allclose(actual.to("cpu").to("float32").array, expected.array, rtol=2.0**-8, atol=1e-6)
