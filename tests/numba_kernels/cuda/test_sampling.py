"""Sampling on the device draws what the cpu kernels draw, which have their own oracle."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import sampling
from runtime import ops
from runtime.device.gpu import Gpu
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor
from tests.numba_kernels.cpu.cases import filled, set_lists
from tests.numba_kernels.cuda.harness import both_archs, empty, get, put
from tests.oracles import sampling as oracle

FILTERS = [
    {}, {"temperature": 0.3}, {"temperature": 3.0}, {"top_k": 1}, {"top_k": 7}, {"top_k": 10_000}, {"top_k": -1},
    {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 1e-9}, {"top_p": 1e-30}, {"top_p": 0.99999994},
    {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.8}, {"top_k": 50, "min_p": 0.02},
    {"top_p": 0.9, "min_p": 0.01, "temperature": 1.7}, {"top_k": 40, "top_p": 0.999, "temperature": 10.0},
    {"top_k": 5, "top_p": 0.99, "min_p": 0.001, "temperature": 0.7}, {"temperature": 0.0, "top_k": 3},
]  # fmt: skip
_ORDER = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "choice_index", "position", "prompt_ids", "prompt_start", "prompt_end", "output_ids", "output_start", "output_end",
    "bias_ids", "bias_values", "bias_start", "bias_end",
)  # fmt: skip


def _sample(
    gpu: Gpu, logits: np.ndarray, params: SamplingArrays, shift: int = 0, **machine
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and statuses; logits begin `shift` elements behind a 16-byte bound. `machine`: in place of the device's
    own, for the plan."""
    rows, vocab = logits.shape
    source = put(gpu, np.concatenate([np.zeros(shift, np.float32), logits.ravel()]))
    held = [put(gpu, getattr(params, name)) for name in _ORDER]
    mask = None if params.allowed_mask is None else put(gpu, params.allowed_mask)
    counts = empty(gpu, logits.shape, np.float32)
    tokens, statuses = (empty(gpu, (rows,), np.int32) for _ in range(2))
    flag, flag_copy = put(gpu, np.array([77], np.int32)), empty(gpu, (1,), np.int32)
    properties = gpu.properties
    own = {
        "max_clusters": gpu.max_clusters, "num_sms": properties.num_sms, "max_shared": properties.shared_bytes_per_block
    }  # fmt: skip
    plan = sampling.plan(rows, vocab, **own | machine)
    work = empty(gpu, (plan.work_bytes,), np.uint8) if plan.work_bytes else None
    gpu.launch(
        plan.launch, source.address + 4 * shift, *(block.address for block in held),
        0 if mask is None else mask.address, 0 if work is None else work.address, counts.address, tokens.address,
        statuses.address, flag.address, flag_copy.address, vocab, -(-vocab // 32),
    )  # fmt: skip
    assert get(gpu, flag_copy, (1,), np.int32) == 77
    np.testing.assert_array_equal(get(gpu, source, (rows * vocab + shift,), np.float32)[shift:], logits.ravel())
    return get(gpu, tokens, (rows,), np.int32), get(gpu, statuses, (rows,), np.int32)


def _check(gpu: Gpu, logits: np.ndarray, params: SamplingArrays, shift: int = 0, **machine) -> None:
    expected = ops.sample(Tensor.from_numpy(logits), params)
    tokens, statuses = _sample(gpu, logits, params, shift, **machine)
    np.testing.assert_array_equal(tokens, expected.token_ids)
    np.testing.assert_array_equal(statuses == sampling.OK, expected.ok)


def _filtered(rng: np.random.Generator, copies: int) -> SamplingArrays:
    """A row for each of `FILTERS`, and that several times, with seeds of their own."""
    params = filled(len(FILTERS) * copies, temperature=1.0)
    for row in range(params.num_rows):
        for name, value in FILTERS[row % len(FILTERS)].items():
            getattr(params, name)[row] = value
    params.seed[:] = rng.integers(0, 2**64, params.num_rows, dtype=np.uint64)
    params.choice_index[:] = rng.integers(0, 4, params.num_rows)
    params.position[:] = rng.integers(0, 100_000, params.num_rows)
    return params


def _packed(allowed: np.ndarray) -> np.ndarray:
    rows, vocab = allowed.shape
    words = -(-vocab // 32)
    padded = np.zeros((rows, words * 32), np.uint64)
    padded[:, :vocab] = allowed
    return (padded.reshape(rows, words, 32) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)


@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 1000, 2052, 5003])
@both_archs
def test_draws_what_the_cpu_draws(gpu, vocab):
    rng = np.random.default_rng(vocab)
    params = _filtered(rng, copies=3)
    logits = rng.standard_normal((params.num_rows, vocab), dtype=np.float32) * 3
    logits[1::3] = np.round(logits[1::3])  # many ties, zeros of both signs
    if vocab > 30:
        logits[2::3, ::3] = -np.inf
    _check(gpu, logits, params, shift=vocab % 3)


def test_flat_and_peaked_rows(gpu):
    rng = np.random.default_rng(1)
    params = _filtered(rng, copies=4)
    logits = np.zeros((params.num_rows, 3000), np.float32)
    logits[1::4] = rng.standard_normal((len(logits[1::4]), 3000), dtype=np.float32) * 0.01
    logits[2::4] = rng.standard_normal((len(logits[2::4]), 3000), dtype=np.float32) * 40
    logits[3::4] = -np.arange(3000, dtype=np.float32) * 0.05
    _check(gpu, logits, params)


def test_a_large_vocabulary(gpu):
    rng = np.random.default_rng(2)
    params = filled(
        4, temperature=[1.0, 0.8, 0.0, 1.0], top_k=[0, 50, 0, 5], top_p=[1.0, 0.9, 1.0, 0.25], seed=[1, 2, 3, 4]
    )
    logits = rng.standard_normal((4, 151_936), dtype=np.float32) * 2
    logits[3] = 0  # all tie with the fifth
    _check(gpu, logits, params)


MACHINES = [
    {"max_clusters": ((size, 10**6),), "num_sms": 1, "max_shared": shared}
    for size in (2, 4, 8)
    for shared in (200 << 10, sampling.shared_bytes(1, 1))
]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: str(machine["max_clusters"][0][0]))
def test_any_number_of_blocks_draws_the_same(gpu, machine):
    """With their parts of the row in shared memory, and where that is too small."""
    rng = np.random.default_rng(5)
    for vocab, shift in ((5003, 1), (3000, 0), (9, 0)):  # the last has blocks without a token
        params = _filtered(rng, copies=1)
        logits = rng.standard_normal((params.num_rows, vocab), dtype=np.float32) * 3
        logits[1::3] = np.round(logits[1::3] / 3)
        plan = sampling.plan(params.num_rows, vocab, **machine)
        assert plan.launch.cluster[0] == machine["max_clusters"][0][0]
        assert bool(plan.work_bytes) == (machine["max_shared"] < 200 << 10) or vocab == 9
        _check(gpu, logits, params, shift, **machine)


@pytest.mark.exhaustive
def test_a_small_device_without_clusters(gpu):
    """The kernel of one block a row, with the row in shared memory and not."""
    rng = np.random.default_rng(6)
    params = _filtered(rng, copies=1)
    logits = rng.standard_normal((params.num_rows, 3001), dtype=np.float32) * 3
    for shared in (99 << 10, sampling.shared_bytes(1, 1)):
        _check(gpu, logits, params, max_clusters=(), max_shared=shared)


def test_against_float64(gpu):
    """What nobody draws but the oracle: full sorts, over odd vocabularies, equal logits and edges of the filters."""
    rng = np.random.default_rng(7)
    for vocab in (1, 2, 3, 5, 33, 130, 517):
        params = filled(
            48, temperature=rng.choice([0.3, 1.0, 2.5], 48), top_k=rng.choice([0, 1, 3, vocab, vocab + 1], 48),
            top_p=rng.choice([0.0, 1e-30, 0.3, 0.5, 0.97, 1.0], 48), min_p=rng.choice([0.0, 0.1, 1.0], 48),
            seed=rng.integers(0, 2**63, 48), choice_index=rng.integers(0, 4, 48), position=rng.integers(0, 99, 48),
        )  # fmt: skip
        logits = rng.standard_normal((48, vocab), dtype=np.float32) * 2
        logits[::4] = 1.5  # all equal
        logits[1::4, 1::2] = -np.inf
        mask = rng.random((48, vocab)) < 0.5
        mask[:, 0] = True
        params.allowed_mask = _packed(mask)
        tokens, statuses = _sample(gpu, logits, params)
        assert (statuses == sampling.OK).all()
        for row, token in enumerate(tokens.tolist()):
            allowed = oracle.processed(logits[row], allowed=mask[row])
            filters = (getattr(params, name)[row] for name in ("temperature", "top_k", "top_p", "min_p"))
            kept = oracle.kept_tokens(allowed, *(number.item() for number in filters))
            drawn = params.seed[row].item(), params.choice_index[row].item(), params.position[row].item()
            assert token == oracle.sample(*kept, *drawn), (vocab, row)


def test_a_draw_depends_on_its_own_row_alone(gpu):
    rng = np.random.default_rng(8)
    params = _filtered(rng, copies=2)
    logits = rng.standard_normal((params.num_rows, 1001), dtype=np.float32) * 3
    logits[3], logits[7, 5] = -np.inf, np.nan
    together, _ = _sample(gpu, logits, params)
    for row in (0, 4, 8, 20, 33):
        one = SamplingArrays.neutral(1)
        for name in _ORDER:
            getattr(one, name)[:] = getattr(params, name)[row : row + 1]
        assert _sample(gpu, logits[row : row + 1], one)[0] == together[row]


@pytest.mark.parametrize("vocab", [70, 1001, 4100])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_masks_bias_and_penalties(gpu, vocab, temperature):
    rng = np.random.default_rng(vocab)
    rows = 24
    logits = rng.standard_normal((rows, vocab), dtype=np.float32) * 2
    params = filled(
        rows,
        temperature=temperature,
        seed=rng.integers(0, 2**63, rows),
        repetition_penalty=rng.uniform(0.5, 2, rows),
        presence_penalty=rng.uniform(-2, 2, rows),
        frequency_penalty=rng.uniform(-2, 2, rows),
        top_p=np.where(np.arange(rows) % 2, 0.9, 1.0),
    )
    params.repetition_penalty[::5] = 1.0
    for field in (params.presence_penalty, params.frequency_penalty, params.repetition_penalty):
        field[:2] = field is params.repetition_penalty  # the first two rows have none
    # Tokens repeat within the lists, and within a row's biases.
    set_lists(params, "prompt", [rng.integers(0, vocab, rng.integers(0, 900)).tolist() for _ in range(rows)])
    set_lists(params, "output", [rng.integers(0, 40, rng.integers(0, 700)).tolist() for _ in range(rows)])
    set_lists(params, "bias", [rng.integers(0, 40, rng.integers(0, 60)).tolist() for _ in range(rows)])
    params.bias_values = rng.choice(np.array([-np.inf, 3, -2, 0.1, 0.7, 5], np.float32), len(params.bias_ids))
    params.allowed_mask = _packed(rng.random((rows, vocab)) < 0.8)
    _check(gpu, logits, params, shift=1)


def test_rows_that_cannot_be_drawn_are_flagged_and_others_unharmed(gpu):
    logits = np.random.default_rng(3).standard_normal((9, 100), dtype=np.float32)
    logits[0, 3], logits[1, 99], logits[2, 50] = np.nan, np.inf, np.nan
    logits[3] = -np.inf
    params = filled(9, temperature=[0, 1, 1, 0, 1, 0, 1, 1, 1])
    set_lists(params, "bias", [[], [], [], [], list(range(100)), [], [], [], [7]])
    params.bias_values = np.full(101, -np.inf, np.float32)
    params.bias_values[-1] = np.inf
    _check(gpu, logits, params)
    tokens, statuses = _sample(gpu, logits, params)
    np.testing.assert_array_equal(
        statuses, [sampling.NOTHING_TO_DRAW] * 5 + [sampling.OK] * 3 + [sampling.NOTHING_TO_DRAW]
    )
    assert (tokens[[0, 1, 2, 3, 4, 8]] == -1).all()


@pytest.mark.parametrize("name", ["prompt", "output", "bias"])
@pytest.mark.parametrize("token", [-1, 5])
def test_ids_outside_the_vocabulary_are_flagged(gpu, name, token):
    params = filled(2, repetition_penalty=1.5)
    set_lists(params, name, [[], [token]])
    params.bias_values = np.zeros(params.bias_ids.size, np.float32)
    tokens, statuses = _sample(gpu, np.zeros((2, 5), np.float32), params)
    np.testing.assert_array_equal(statuses, [sampling.OK, sampling.BAD_ID])
    np.testing.assert_array_equal(tokens, [0, -1])


def test_plan():
    assert sampling.plan(0, 10) is None
    for vocab in (0, sampling.MAX_VOCAB + 1):
        with pytest.raises(ValueError, match=f"vocab is {vocab}, must be 1 to"):
            sampling.plan(1, vocab)


def test_the_blocks_of_a_row_are_chosen_by_how_many_run_at_once():
    hopper = {"max_clusters": ((2, 66), (4, 32), (8, 14)), "num_sms": 132, "max_shared": 227 << 10}
    for num_rows, size in ((1, 8), (14, 8), (20, 4), (256, 4)):
        plan = sampling.plan(num_rows, 151_936, **hopper)
        assert (plan.launch.grid[0], plan.launch.cluster[0], plan.work_bytes) == (num_rows * size, size, 0)
    assert sampling.plan(256, 1000, **hopper).launch.cluster == (1, 1, 1)
    far = sampling.plan(1, 151_936, **hopper | {"max_shared": 99 << 10})
    assert far.launch.cluster == (8, 1, 1)
    assert far.work_bytes == 4 * 151_936
    alone = sampling.plan(3, 151_935, num_sms=108, max_shared=163 << 10)
    assert alone.launch.grid == (3, 1, 1)
    assert alone.work_bytes == 3 * 4 * 151_936
    assert alone.launch.specialisation is not far.launch.specialisation
