"""Launches that are noted down: replays see what lies at the addresses, errors come out, memory is shared."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest

from numba_kernels.cpu.running import pool
from numba_kernels.cpu.running.arena import Arena
from numba_kernels.cpu.running.recording import NotRecordableError, current, record
from runtime import ops
from runtime.batch import Batch
from runtime.errors import InvalidArgumentError
from runtime.tensor.tensor import Tensor
from tests.numba_kernels.cpu.cases import normal, paged_case, tensor


def test_an_arena_never_gives_the_same_bytes_twice():
    """Random arrays come and go: what is alive does not overlap, and in the end all is one gap again."""
    rng = random.Random(1)
    arena = Arena()
    alive: list[tuple[np.ndarray, int]] = []
    most = 0
    for stamp in range(2000):
        if alive and rng.random() < 0.5:
            array, value = alive.pop(rng.randrange(len(alive)))
            assert (array == value).all()
        else:
            array = arena.new_array((rng.randrange(1, 40), rng.randrange(0, 2000)), np.float32)
            assert array.ctypes.data % 64 == 0
            assert arena.holds(array.ctypes.data) or array.size == 0
            array[...] = stamp
            alive.append((array, stamp))
            most = max(most, sum(array.nbytes for array, _ in alive))
    for array, value in alive:
        assert (array == value).all()
    assert not arena.holds(np.zeros(1).ctypes.data)
    size = arena.size_bytes
    array = None
    alive.clear()
    assert all(segment.gaps == [(0, segment.memory.nbytes)] for segment in arena._segments)
    assert size < 1.2 * most, "much more than was ever alive at once"
    kept = arena.borrowed(arena.new_array((3, 5), np.int32))
    assert kept.shape == (3, 5)
    assert arena.size_bytes == size
    with pytest.raises(ValueError, match="not of this arena"):
        arena.borrowed(np.zeros(4))


def layers(x: Tensor, norm: Tensor, weights: list[ops.LinearWeight]) -> Tensor:
    for weight in weights:
        x = ops.linear(ops.rms_norm(x, norm, 1e-6), weight, residual=x)
        x = ops.silu(x)
    return x


def test_replays_equal_what_is_done_at_once():
    """Also after the helpers went to sleep, with inputs that have changed, and with little memory."""
    rng = np.random.default_rng(1)
    norm = tensor(normal(rng, 256))
    weights = [ops.prepare_linear(tensor(normal(rng, (256, 256)) / 16)) for _ in range(40)]
    x = tensor(normal(rng, (70, 256)))
    arena = Arena()
    with record(arena) as recording:
        result = layers(x, norm, weights)
        assert current() is recording
    assert current() is None
    assert len(recording) == 120
    assert arena.size_bytes <= 1 << 20
    for turn in range(4):
        x.array[...] = normal(rng, x.shape)
        expected = layers(x, norm, weights).array
        if turn == 2:
            pool._help(pool._address, 0, 0)  # a moment for others
            pool._helpers.rouse()
        recording.replay()
        assert np.array_equal(result.array, expected)


def test_errors_come_out_of_replays():
    rng = np.random.default_rng(2)
    table = tensor(normal(rng, (10, 8)))
    ids = tensor(np.array([3, 0, 9], np.int32))
    with record(Arena()) as recording:
        rows = ops.embedding(ids, table)
        doubled = ops.silu(rows)
    for bad in (10, -1):
        recording.replay()
        before = doubled.array.copy()
        ids.array[1] = bad
        with pytest.raises(InvalidArgumentError, match=r"embedding: token_ids holds .* must lie in 0 to 9"):
            recording.replay()
        assert np.array_equal(doubled.array, before), "a launch after the failed one has run"
        ids.array[1] = 4
        recording.replay()
        assert np.array_equal(rows.array, table.array[[3, 4, 9]])


def test_temporary_arrays_cannot_be_recorded():
    """Whether they outlive the recording or not: it is refused where they are met."""
    rng = np.random.default_rng(3)
    x, weight, ids = tensor(normal(rng, (4, 16))), tensor(normal(rng, (8, 16))), np.arange(4, dtype=np.int32)
    with record(Arena()):
        kept = tensor(x.array * 2)
        with pytest.raises(NotRecordableError, match="silu: x is an array that no recorded kernel has made"):
            ops.silu(kept)
    with pytest.raises(NotRecordableError, match="rms_norm: weight is an array"), record(Arena()):
        ops.rms_norm(x, tensor(np.ones(16, np.float32)), 1e-6)
    with pytest.raises(NotRecordableError, match="source of pack_panel lies in memory"), record(Arena()):
        ops.linear(x, ops.prepare_linear(weight))
    with pytest.raises(NotRecordableError, match="chosen of logprobs lies in memory"), record(Arena()):
        ops.log_softmax_topk(x, ids, 2)
    with pytest.raises(NotRecordableError, match="add is not a kernel"), record(Arena()):
        x + x
    with pytest.raises(ZeroDivisionError), record(Arena()):
        raise ZeroDivisionError
    assert current() is None


def test_what_a_recording_reads_lives_as_long():
    """Weights and inputs of which nobody else holds anything, and parts of them at addresses of their own."""
    rng = np.random.default_rng(6)
    values, matrix = normal(rng, (9, 16)), normal(rng, (40, 16))
    expected = ops.silu(ops.linear(tensor(values[3:7]), ops.prepare_linear(tensor(matrix)))).numpy().copy()
    x, weight = tensor(values.copy()), ops.prepare_linear(tensor(matrix))
    with record(Arena()) as recording:
        result = ops.silu(ops.linear(x[3:7], weight))
    storage = weakref.ref(x.storage)
    del x, weight
    gc.collect()
    assert storage() is not None
    noise = [np.full(shape, np.nan, np.float32) for shape in [(9, 16), (1, 16, 48, 1), (48,)] * 200]
    recording.replay()
    np.testing.assert_array_equal(result.numpy(), expected)
    assert len(noise) == 600
    del recording
    assert storage() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_recorded_for_any_lengths(dtype):
    """One recording serves sequences from nothing to several segments, with the bits of the eager operation."""
    rng = np.random.default_rng(4)
    longest = 2300
    case = paged_case(rng, [(longest - 1, 1), (longest - 1, 1)], heads=4, kv_heads=1, head_dim=32)
    k_cache, v_cache = (pages.to(dtype) for pages in case.cache.layer(0))
    q, lengths = tensor(case.queries), case.batch.seq_lens
    fields = {name: getattr(case.batch, name) for name in Batch.__slots__ if name not in ("plans", "max_seq_len")}

    def attend(max_seq_len: int) -> Tensor:
        batch = Batch(**fields, max_seq_len=max_seq_len)
        return ops.attention(q, k_cache, v_cache, batch, 0, scale=0.3)

    with record(Arena()) as recording:
        result = attend(longest)
    for first, second in ((longest, longest), (1, 1024), (1025, 7), (2048, 2049), (longest, 63)):
        lengths.array[:] = first, second
        recording.replay()
        assert np.array_equal(result.array, attend(max(first, second)).array)
    lengths.array[:] = 0, 5
    recording.replay()
    assert not result.array[0].any(), "who sees no key gets zeros"
    lengths.array[1] = longest + 100
    with pytest.raises(InvalidArgumentError, match=f"seq_lens holds {longest + 100}, limit 2304"):
        recording.replay()


def test_attention_is_recorded_for_any_chunks():
    """One recording serves every cut of 40 tokens into three sequences' chunks, whatever stands before them."""
    rng = np.random.default_rng(5)
    longest = 1100
    case = paged_case(rng, [(longest - 38, 38), (longest - 1, 1), (longest - 1, 1)], heads=8, kv_heads=4, head_dim=16)
    k_cache, v_cache = case.cache.layer(0)
    q, lengths, starts = tensor(case.queries), case.batch.seq_lens, case.batch.query_start
    fields = {name: getattr(case.batch, name) for name in Batch.__slots__ if name not in ("plans", "max_query_len")}

    def attend() -> Tensor:
        return ops.attention(q, k_cache, v_cache, Batch(**fields, max_query_len=38), 0, scale=0.3)

    with record(Arena()) as recording:
        result = attend()
    for chunks in ((38, 1, 1), (1, 1, 38), (20, 17, 3), (1, 38, 1), (16, 16, 8)):
        starts.array[1:] = np.cumsum(chunks)
        lengths.array[:] = [rng.integers(count, longest + 1) for count in chunks]
        recording.replay()
        assert np.array_equal(result.array, attend().array), chunks
