"""The door itself: what it refuses, naming operation and argument; dispatch; threads; the compile cache."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from runtime import ops
from runtime.device.device import Device
from runtime.dtype import bfloat16, float32, uint8
from runtime.errors import InvalidArgumentError, XservError
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.tensor import arithmetic
from runtime.tensor.tensor import Tensor
from tests.numba_kernels.cpu.cases import normal, paged_case, tensor
from tests.oracles import dense

ROOT = Path(__file__).resolve().parents[2]


def _zeros(*shape: int, dtype: type = np.float32) -> Tensor:
    return tensor(np.zeros(shape, dtype))


def _weight() -> ops.LinearWeight:
    return ops.prepare_linear(_zeros(6, 4))


def _qkv(**changes):
    case = paged_case(np.random.default_rng(0), [(0, 8)], heads=2, kv_heads=1, head_dim=4, block_size=8)
    k_cache, v_cache = case.cache.layer(0)
    arguments = {
        "qkv": _zeros(3, 16), "positions": _zeros(3, dtype=np.int32), "num_q_heads": 2, "num_kv_heads": 1,
        "head_dim": 4, "rope": None, "q_norm": None,
        "k_norm": None, "norm_eps": 1e-6, "k_cache": k_cache, "v_cache": v_cache,
        "slot_mapping": _zeros(3, dtype=np.int64),
    } | changes  # fmt: skip
    return ops.qkv_prepare(arguments.pop("qkv"), arguments.pop("positions"), **arguments)


def _attend(queries, window=None, sinks=None, **changes):
    case = paged_case(np.random.default_rng(0), [(0, 8)], heads=2, kv_heads=1, head_dim=4, block_size=8)
    for name, value in changes.items():
        setattr(case.batch, name, value)
    return ops.attention(queries, *case.cache.layer(0), case.batch, 0, scale=1.0, window=window, sinks=sinks)


REFUSALS = [
    ("linear", "x", lambda: ops.linear(_zeros(2, 5), _weight()), r"shape \(2, 5\), must be \[any, 4\]"),
    ("linear", "x", lambda: ops.linear(_zeros(2, 4, dtype=np.int32), _weight()), "is int32, must be float32"),
    ("linear", "x", lambda: ops.linear(_zeros(4, 2).transpose(0, 1), _weight()), "must be C-contiguous"),
    ("linear", "x", lambda: ops.linear(np.zeros((2, 4), np.float32), _weight()), "must be a Tensor, not ndarray"),
    ("linear", "weight", lambda: ops.linear(_zeros(2, 4), _zeros(6, 4)), "must be a LinearWeight"),
    ("linear", "residual", lambda: ops.linear(_zeros(2, 4), _weight(), residual=_zeros(3, 6)), r"\(3, 6\)"),
    ("linear", "out", lambda: ops.linear(_zeros(2, 4), _weight(), out=_zeros(2, 5)), r"\(2, 5\)"),
    ("embedding", "token_ids", lambda: ops.embedding(_zeros(2), _zeros(5, 3)), "is float32, must be int32"),
    ("embedding", "token_ids", lambda: ops.embedding(tensor(np.array([0, 6], np.int32)), _weight()), "0 to 5"),
    ("embedding", "token_ids", lambda: ops.embedding(tensor(np.array([-1], np.int32)), _zeros(5, 3)), "-1"),
    ("embedding", "table", lambda: ops.embedding(_zeros(2, dtype=np.int32), _zeros(5)), r"\(5,\)"),
    ("add_embedding", "table", lambda: ops.add_embedding(_zeros(1, 2), _zeros(1, dtype=np.int32), _zeros(5, 3)), "3"),
    ("add_embedding", "positions", lambda: ops.add_embedding(_zeros(1, 2), _zeros(2, dtype=np.int32), _zeros(5, 2)),
     r"\(2,\), must be \[1\]"),
    ("gather_rows", "indices", lambda: ops.gather_rows(_zeros(2, 2), tensor(np.array([2], np.int32))), "0 to 1"),
    ("rms_norm", "weight", lambda: ops.rms_norm(_zeros(2, 3), _zeros(4), 1e-6), r"\(4,\)"),
    ("layer_norm", "bias", lambda: ops.layer_norm(_zeros(2, 3), _zeros(3), _zeros(3, dtype=np.float16), 1e-6),
     "float16"),
    ("gelu", "kind", lambda: ops.gelu(_zeros(3), "exact"), "'exact'"),
    ("gelu", "x", lambda: ops.gelu(_zeros(3, dtype=np.int32), "erf"), "int32"),
    ("gelu", "rough", lambda: ops.gelu(_zeros(3), "tanh", rough=True), "'tanh'"),
    ("silu", "out", lambda: ops.silu(_zeros(3), out=_zeros(4)), r"\(4,\)"),
    ("glu", "gate_up", lambda: ops.glu(_zeros(2, 5), "silu"), "5 columns"),
    ("qkv_prepare", "qkv", lambda: _qkv(qkv=_zeros(3, 15)), "15"),
    ("qkv_prepare", "positions", lambda: _qkv(positions=_zeros(3, dtype=np.int64)), "int64"),
    ("qkv_prepare", "slot_mapping", lambda: _qkv(slot_mapping=_zeros(2, dtype=np.int64)), r"\(2,\)"),
    ("qkv_prepare", "q_norm", lambda: _qkv(q_norm=_zeros(5), k_norm=_zeros(4)), r"\(5,\)"),
    ("qkv_prepare", "k_cache", lambda: _qkv(k_cache=_zeros(2, 1, 4, 7)), "multiple of 8"),
    ("qkv_prepare", "k_cache", lambda: _qkv(k_cache=_zeros(2, 2, 4, 8), v_cache=_zeros(2, 2, 8, 16)), "2 heads"),
    ("qkv_prepare", "v_cache", lambda: _qkv(v_cache=_zeros(3, 1, 8, 4)), "rows of 4"),
    ("qkv_prepare", "rope.cos", lambda: _qkv(rope=ops.RopeTable(_zeros(9, 3), _zeros(9, 3), False)), "6 dimensions"),
    ("qkv_prepare", "rope.sin", lambda: _qkv(rope=ops.RopeTable(_zeros(9, 2), _zeros(9, 1), False)), r"\(9, 1\)"),
    ("attention", "q", lambda: _attend(_zeros(8, 8)), r"\(8, 8\)"),
    ("attention", "k_cache", lambda: _attend(_zeros(8, 2, 5)), r"must be \[any, any, 5, any\]"),
    ("attention", "window", lambda: _attend(_zeros(8, 2, 4), window=0), "at least 1"),
    ("attention", "sinks", lambda: _attend(_zeros(8, 2, 4), sinks=_zeros(3)), r"\(3,\), must be \[2\]"),
    ("attention", "sinks", lambda: _attend(_zeros(8, 2, 4), sinks=_zeros(2, dtype=np.float16)), "float16"),
    ("attention", "batch.seq_lens", lambda: _attend(_zeros(8, 2, 4), seq_lens=_zeros(1, dtype=np.int64)), "int64"),
    ("log_softmax_topk", "chosen", lambda: ops.log_softmax_topk(_zeros(1, 5), np.array([5], np.int32), 1), "0 to 4"),
    ("log_softmax_topk", "chosen", lambda: ops.log_softmax_topk(_zeros(1, 5), np.array([1]), 1), "int64"),
    ("log_softmax_topk", "top_n", lambda: ops.log_softmax_topk(_zeros(1, 5), np.zeros(1, np.int32), 6), "0 to 5"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "argument", "call", "words"), REFUSALS, ids=[f"{r[0]}-{r[1]}" for r in REFUSALS])
def test_refuses_by_operation_and_argument(op, argument, call, words):
    with pytest.raises(InvalidArgumentError, match=f"^{op}: {argument} .*{words}") as caught:
        call()
    assert caught.value.param == argument
    assert isinstance(caught.value, XservError)


def test_another_device_is_refused():
    residual = _zeros(2, 6)
    residual.device = residual.storage.device = Device("emulated:sm_90a")
    with pytest.raises(InvalidArgumentError, match=r"^linear: residual is on emulated:sm_90a, the other .* on cpu"):
        ops.linear(_zeros(2, 4), _weight(), residual=residual)


def test_output_must_be_writable_and_apart_from_x():
    frozen = np.zeros((2, 6), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="linear: out is read-only"):
        ops.linear(_zeros(2, 4), _weight(), out=tensor(frozen))
    square, x = ops.prepare_linear(_zeros(4, 4)), _zeros(2, 4)
    with pytest.raises(InvalidArgumentError, match="linear: out shares memory with x"):
        ops.linear(x, square, out=x)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embedding_from_a_table_and_from_packed_panels(dtype):
    rng = np.random.default_rng(0)
    table = normal(rng, (131, 33), arithmetic.Tensor.empty(0, dtype).dtype.numpy)
    ids = rng.integers(0, 131, 50).astype(np.int32)
    expected = table[ids].astype(np.float32)
    np.testing.assert_array_equal(ops.embedding(tensor(ids), tensor(table)).numpy(), expected)
    np.testing.assert_array_equal(ops.embedding(tensor(ids), ops.prepare_linear(tensor(table))).numpy(), expected)
    x = normal(rng, (50, 33))
    target = tensor(x.copy())
    assert ops.add_embedding(target, tensor(ids), tensor(table)) is target
    np.testing.assert_array_equal(target.numpy(), x + expected)


def test_gather_rows_also_of_nothing():
    x = normal(np.random.default_rng(0), (5, 3))
    rows = tensor(np.array([4, 0, 4], np.int32))
    np.testing.assert_array_equal(ops.gather_rows(tensor(x), rows).numpy(), x[[4, 0, 4]])
    assert ops.gather_rows(tensor(x), _zeros(0, dtype=np.int32)).shape == (0, 3)


def test_generic_arithmetic_is_reached_through_the_door():
    assert ops.add is arithmetic.add
    with pytest.raises(AttributeError):
        _ = ops.no_such_operation


def test_kv_cache_spec_counts_its_bytes_and_refuses():
    spec = KVCacheSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=24, block_size=16, dtype=bfloat16)
    cache = KVCache(spec, 5)
    held = sum(pages.array.nbytes for layer in range(3) for pages in cache.layer(layer))
    assert cache.size_bytes == held == 5 * spec.block_bytes[0] == 5 * 16 * spec.bytes_per_token
    for change, words in (({"block_size": 12}, "block_size is 12"), ({"head_dim": 0}, "head_dim is 0")):
        fields = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 8, "dtype": float32}
        with pytest.raises(InvalidArgumentError, match=words):
            KVCacheSpec.uniform(**(fields | change))
    with pytest.raises(InvalidArgumentError, match="dtype is uint8"):
        KVCacheSpec.uniform(1, 1, 8, 8, uint8)
    with pytest.raises(InvalidArgumentError, match="num_blocks is 0"):
        KVCache(spec, 0)


def test_python_threads_may_call_at_once():
    """The pool of threads serves one launch at a time; the door keeps the callers apart."""
    rng = np.random.default_rng(0)
    x, weight = normal(rng, (64, 300)), normal(rng, (400, 300))
    packed = ops.prepare_linear(tensor(weight))
    expected = ops.linear(tensor(x), packed).numpy()
    assert dense.relative_error(expected, dense.linear(x, weight)) < 1e-5
    wrong = []

    def work():
        for _ in range(50):
            if not np.array_equal(ops.linear(tensor(x), packed).numpy(), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_EVERY_KERNEL = """
import numpy as np
from runtime import ops
from runtime.sampling_arrays import SamplingArrays
from tests.numba_kernels.cpu.cases import normal, paged_case, tensor
from tests.oracles import dense
from tests.oracles.attention import attention
rng = np.random.default_rng(0)
for rows in (1, 3, 4, 7, 30):
    x, w = normal(rng, (rows, 1100)), normal(rng, (70, 1100))
    out = ops.linear(tensor(x), ops.prepare_linear(tensor(w)), residual=tensor(np.ones((rows, 70), np.float32)))
    assert dense.relative_error(out.numpy(), dense.linear(x, w) + 1) < 1e-5
for heads in (1, 2, 8):
    case = paged_case(rng, [(70, 5)], heads=heads, kv_heads=1, head_dim=40)
    out = ops.attention(tensor(case.queries), *case.cache.layer(0), case.batch, 0, scale=0.2).numpy()
    expected = attention(case.queries, case.keys[0], case.values[0], 0.2)
    assert dense.relative_error(out.reshape(expected.shape), expected) < 1e-5
x, w = normal(rng, (3, 77)), normal(rng, 77)
assert dense.relative_error(ops.rms_norm(tensor(x), tensor(w), 1e-6).numpy(), dense.rms_norm(x, w, 1e-6)) < 1e-5
assert dense.relative_error(ops.gelu(tensor(x), "erf").numpy(), dense.gelu(x, "erf")) < 1e-5
params = SamplingArrays.neutral(3)
params.temperature[:], params.top_k[:] = 1.0, 1
assert (ops.sample(tensor(x), params).token_ids == x.argmax(-1)).all()
"""


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.exhaustive  # tests/numba_kernels/cpu/test_ahead.py has what processes find each time
def test_a_second_process_compiles_nothing_and_nothing_is_printed(tmp_path):
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    counted = "from numba.core import event\nwith event.install_recorder('numba:run_pass') as passes:\n"
    code = counted + textwrap.indent(_EVERY_KERNEL, "    ") + "print(len(passes.buffer))"
    assert int(_python(code, **cache)) > 1000
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len([path for path in kept if path.suffix == ".o"]) >= 6
    assert _python(code, **cache) == "0\n"
    registries = "import sys\nassert 'numba.np.linalg' not in sys.modules, 'what only a compiler needs was read'\n"
    assert _python(_EVERY_KERNEL + registries, **cache) == ""
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == kept


def test_a_home_that_cannot_be_written_is_no_obstacle(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    code = "import numba_kernels.cpu; print(numba_kernels.cpu.CODE_FOLDER.is_dir())"
    said = _python(code, XDG_CACHE_HOME=str(blocked)).splitlines()
    assert said[0] == "True"
    assert all("cannot be written" in line for line in said[1:])
