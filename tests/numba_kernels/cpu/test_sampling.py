"""Sampling against a plain oracle with full sorts, and against the distribution that it should draw from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from numba_kernels.cpu.intrinsics.scalars import philox
from numba_kernels.cpu.sampling import FIELDS
from runtime import ops
from runtime.errors import InvalidArgumentError
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from tests.numba_kernels.cpu.cases import filled, normal, set_lists, tensor
from tests.oracles import sampling as oracle

FILTERS = [
    {}, {"temperature": 0.3}, {"temperature": 3.0}, {"top_k": 1}, {"top_k": 7}, {"top_k": 10_000}, {"top_k": -1},
    {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 1e-9}, {"min_p": 0.05}, {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8}, {"top_k": 50, "min_p": 0.02}, {"top_p": 0.9, "min_p": 0.01, "temperature": 1.7},
    {"top_k": 5, "top_p": 0.99, "min_p": 0.001, "temperature": 0.7}, {"top_k": 40, "top_p": 0.999, "temperature": 10.0},
]  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 1000, 5003])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_what_the_oracle_draws(vocab, filters):
    rng = np.random.default_rng(vocab)
    rows = 3
    logits = normal(rng, (rows, vocab)) * 3
    if vocab > 30:
        logits[1] = np.round(logits[1])  # many ties
        logits[2, ::3] = -np.inf
    settings = {"temperature": 1.0, **filters}
    params = filled(rows, seed=[3, 2**63 + 5, 77], choice_index=[0, 1, 2], position=[0, 9, 100_000], **settings)
    drawn = ops.sample(tensor(logits), params)
    assert drawn.ok.all()
    for row in range(rows):
        ids, probabilities = oracle.kept_tokens(logits[row], **settings)
        seed, choice, position = (int(v[row]) for v in (params.seed, params.choice_index, params.position))
        assert drawn.token_ids[row] == oracle.sample(ids, probabilities, seed, choice, position)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_distribution(filters):
    """Chi-square over 20,000 draws: below its mean + 5 standard deviations, and nothing outside the kept set."""
    logits = normal(np.random.default_rng(5), (1, 37)) * 2
    draws = 20_000
    settings = {"temperature": 1.0, **filters}
    params = filled(draws, position=np.arange(draws), seed=11, **settings)
    tokens = ops.sample(tensor(np.repeat(logits, draws, 0)), params).token_ids
    ids, probabilities = oracle.kept_tokens(logits[0], **settings)
    assert set(tokens) <= set(ids)
    expected = probabilities * draws
    common = expected > 5
    counts = np.array([(tokens == token).sum() for token in ids])
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = max(1, common.sum() - 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_a_draw_depends_on_seed_choice_and_position_alone():
    logits = normal(np.random.default_rng(1), (1, 500))
    many = np.repeat(logits, 64, 0)
    rows = np.arange(64)
    params = filled(64, temperature=1.0, seed=rows // 16, choice_index=rows // 4 % 4, position=rows % 4)
    tokens = ops.sample(tensor(many), params).token_ids
    assert len(set(tokens.tolist())) > 30
    for row in (0, 17, 63):
        one = filled(1, temperature=1.0, seed=row // 16, choice_index=row // 4 % 4, position=row % 4)
        assert ops.sample(tensor(logits), one).token_ids[0] == tokens[row]


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1009, 50257])
def test_greedy_takes_the_lowest_id_of_the_largest(vocab):
    logits = np.round(normal(np.random.default_rng(vocab), (5, vocab)) * 2)
    original = logits.copy()
    expected = logits.argmax(-1)
    for temperature in (0.0, 9e-6):
        drawn = ops.sample(tensor(logits), filled(5, temperature=temperature, top_k=3, top_p=0.5))
        np.testing.assert_array_equal(drawn.token_ids, expected)
        assert drawn.ok.all()
    np.testing.assert_array_equal(logits, original)


def test_masks_bias_and_penalties_act_before_the_argmax():
    rng = np.random.default_rng(2)
    rows, vocab = 40, 70
    logits = normal(rng, (rows, vocab)) * 2
    prompts = [rng.integers(0, vocab, rng.integers(0, 30)).tolist() for _ in range(rows)]
    outputs = [rng.integers(0, vocab, rng.integers(0, 30)).tolist() for _ in range(rows)]
    biases = [
        [(int(t), float(v)) for t, v in zip(rng.choice(vocab, 5, replace=False), rng.choice([-np.inf, 3, -2, 100], 5))]
        for _ in range(rows)
    ]
    allowed = rng.random((rows, vocab)) < 0.8
    repetition, presence, frequency = rng.uniform(0.5, 2, rows), rng.uniform(-2, 2, rows), rng.uniform(-2, 2, rows)
    params = filled(rows, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    set_lists(params, "prompt", prompts)
    set_lists(params, "output", outputs)
    set_lists(params, "bias", [[t for t, _ in row] for row in biases])
    params.bias_values = np.array([v for row in biases for _, v in row], np.float32)
    padded = np.zeros((rows, 96), np.uint64)
    padded[:, :vocab] = allowed
    params.allowed_mask = (padded.reshape(rows, 3, 32) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)
    drawn = ops.sample(tensor(logits), params)
    assert drawn.ok.all()
    changed = 0
    for row in range(rows):
        expected = oracle.processed(
            logits[row], allowed=allowed[row], bias=biases[row], prompt=prompts[row], output=outputs[row],
            repetition=repetition[row], presence=presence[row], frequency=frequency[row],
        )  # fmt: skip
        assert drawn.token_ids[row] == expected.argmax()
        changed += int(expected.argmax() != logits[row].argmax())
    assert changed > 10


def test_rows_that_cannot_be_drawn_are_flagged_and_others_unharmed():
    logits = normal(np.random.default_rng(3), (8, 100))
    logits[0, 3], logits[1, 99], logits[2, 50] = np.nan, np.inf, np.nan
    logits[3] = -np.inf
    params = filled(8, temperature=[0, 1, 1, 0, 1, 0, 1, 1])
    set_lists(params, "bias", [[], [], [], [], list(range(100)), [], [], []])
    params.bias_values = np.full(100, -np.inf, np.float32)
    drawn = ops.sample(tensor(logits), params)
    np.testing.assert_array_equal(drawn.ok, [False] * 5 + [True] * 3)
    assert (drawn.token_ids[:5] == -1).all()
    assert drawn.token_ids[5] == logits[5].argmax()


def test_a_large_vocabulary_with_equal_logits():
    """The worst case of the selection: every token in one bucket."""
    logits = np.zeros((1, 151_936), np.float32)
    drawn = ops.sample(tensor(logits), filled(1, temperature=1.0, top_k=5, top_p=0.25))
    ids, probabilities = oracle.kept_tokens(logits[0], top_k=5, top_p=0.25)
    assert len(ids) == -(-151_936 // 4)  # all tie with the fifth
    assert drawn.token_ids[0] == oracle.sample(ids, probabilities, 0, 0, 0)


def test_the_kernels_arguments_are_the_fields_in_their_order():
    names = [name for name, _, _ in SAMPLING_FIELDS]
    assert FIELDS.names[1 : 1 + len(names)] == names


def test_no_rows():
    drawn = ops.sample(tensor(np.empty((0, 10), np.float32)), SamplingArrays.neutral(0))
    assert drawn.token_ids.shape == drawn.ok.shape == (0,)


@pytest.mark.parametrize("field", ["temperature", "top_k", "seed", "prompt_ids", "bias_values", "output_start"])
def test_refuses_arrays_of_another_type_or_length(field):
    logits = tensor(np.zeros((2, 5), np.float32))
    for change in (lambda a: a.astype(np.float64), lambda a: np.concatenate([a, a, a[:1]])[:, None]):
        params = SamplingArrays.neutral(2)
        setattr(params, field, change(getattr(params, field)))
        with pytest.raises(InvalidArgumentError, match=f"sample: params.{field} is"):
            ops.sample(logits, params)


@pytest.mark.parametrize("name", ["prompt", "output", "bias"])
@pytest.mark.parametrize("token", [-1, 5])
def test_refuses_ids_outside_the_vocabulary(name, token):
    params = filled(2, repetition_penalty=1.5)
    set_lists(params, name, [[], [token]])
    params.bias_values = np.zeros(params.bias_ids.size, np.float32)
    with pytest.raises(InvalidArgumentError, match="outside the vocabulary of 5"):
        ops.sample(tensor(np.zeros((2, 5), np.float32)), params)


@pytest.mark.parametrize(("start", "end"), [(0, 4), (-1, 2), (2, 1), (4, 4)])
@pytest.mark.parametrize("name", ["prompt", "output", "bias"])
def test_refuses_a_range_that_leaves_its_list(name, start, end):
    params = SamplingArrays.neutral(2)
    params.prompt_ids = params.output_ids = params.bias_ids = np.zeros(3, np.int32)
    params.bias_values = np.zeros(3, np.float32)
    getattr(params, f"{name}_start")[1], getattr(params, f"{name}_end")[1] = start, end
    with pytest.raises(InvalidArgumentError, match=f"params.{name}_end must lie between {name}_start, from 0 on, and"):
        ops.sample(tensor(np.zeros((2, 5), np.float32)), params)


def test_draws_that_share_a_list_read_it_up_to_their_own_end():
    """Row j has penalties of the first j ids; the same draws with a copy of the list each give the same tokens."""
    rng = np.random.default_rng(6)
    rows, vocab = 24, 20
    logits = np.repeat(normal(rng, (1, vocab)), rows, 0)
    output = rng.integers(0, vocab, rows).tolist()
    values = {"temperature": np.arange(rows) % 3 * 0.5, "seed": 5, "position": np.arange(rows)}
    values |= {"repetition_penalty": 1.5, "frequency_penalty": 1.5}
    copied, shared = filled(rows, **values), filled(rows, **values)
    for name in ("prompt", "output", "bias"):
        set_lists(copied, name, [output[:end] for end in range(rows)])
        setattr(shared, f"{name}_ids", np.array(output, np.int32))
        getattr(shared, f"{name}_end")[:] = np.arange(rows)
    copied.bias_values = np.full(copied.bias_ids.size, 0.25, np.float32)
    shared.bias_values = np.full(shared.bias_ids.size, 0.25, np.float32)
    drawn = ops.sample(tensor(logits), shared)
    np.testing.assert_array_equal(drawn.token_ids, ops.sample(tensor(logits), copied).token_ids)
    shared.output_end[:] = rows
    assert (ops.sample(tensor(logits), shared).token_ids != drawn.token_ids).any()


PHILOX = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX)
def test_known_answers(counter, key, words):
    """Of Philox4x32-10: the vectors of Random123 (kat_vectors), against the kernels and the oracle."""
    assert tuple(oracle.philox(counter, key)) == words
    assert tuple(int(w) for w in philox(*(np.uint32(v) for v in (*counter, *key)))) == words
