"""Small random models of every family against Hugging Face transformers (`tools/references/generate_reference.py`).

float32 within 1e-4 (1e-5 here) and bfloat16 within 2e-2 of the largest logit, the same best token at every
position, and the same greedy continuation; where bfloat16's diverges, each token is among the other's five
best. `tests/numba_kernels/cpu/test_tiles.py` runs this file under each kind of register tile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from models.base import Model
from models.registry import load_model
from runtime.dtype import bfloat16, float16, float32
from runtime.kv.groups import NO_BLOCK
from tests.models.driver import Array, ModelDriver, greedy, logits_of, relative_error
from tests.models.folders import CASES, Golden, load_golden, write_model
from tests.models.products import compared_products
from tests.oracles.tiles import ROUNDS_ROWS

TOLERANCE = 1e-5  # ten times stricter than promised: an epsilon of 1e-6 for 1e-5 moves logits by no more than 3e-5

WINDOWED = [
    "gemma2_odd",
    "gemma3_odd",
    "gemma4_inputs_odd",
    "gemma4_keys_odd",
    "gpt_oss_odd",
    "mistral_window",
    "olmo3_windows",
    "qwen3_layer_types",
]


@cache
def load_case(case: str, stored_as: str = "F32", dtype: str = "auto") -> tuple[Golden, Model]:
    """A model that is read once, for all tests: none of them changes it."""
    golden = load_golden(case)
    with tempfile.TemporaryDirectory() as folder:
        return golden, load_model(write_model(Path(folder), golden, stored_as), dtype=dtype)


def check_logits(ours: Array, theirs: Array, tolerance: float) -> None:
    assert relative_error(ours, theirs) <= tolerance
    np.testing.assert_array_equal(ours.argmax(1), theirs.argmax(1))


@pytest.mark.parametrize("case", CASES)
def test_float32_logits_and_greedy_continuation(case: str) -> None:
    golden, model = load_case(case)
    assert model.dtype is float32
    check_logits(logits_of(model, golden.prompt_ids), golden.logits["float32"], TOLERANCE)
    chosen, _ = greedy(model, golden.prompt_ids, len(golden.greedy_ids["float32"]), seed=1)
    assert chosen == golden.greedy_ids["float32"]


@pytest.mark.parametrize("case", CASES)
def test_any_chunking_over_shuffled_pages_gives_the_same_logits(case: str) -> None:
    golden, model = load_case(case)
    ids, rng = golden.prompt_ids, np.random.default_rng(len(case))
    cuts = np.sort(rng.choice(np.arange(1, len(ids)), 4, replace=False))
    random_sizes = np.diff([0, *cuts, len(ids)]).tolist()
    for seed, sizes in enumerate(([1] * len(ids), random_sizes)):
        logits = logits_of(model, ids, sizes, block_size=8, seed=seed)
        check_logits(logits, golden.logits["float32"], TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_last_tokens_alone_have_the_same_bits(case: str) -> None:
    golden, model = load_case(case)
    chunks: dict[int, Sequence[int]] = {0: golden.prompt_ids, 1: golden.prompt_ids[:5]}
    rows = [ModelDriver(model, 2, last_alone=last_alone).step(chunks) for last_alone in (False, True)]
    for sequence in chunks:
        np.testing.assert_array_equal(rows[0][sequence][-1], rows[1][sequence][-1])


@pytest.mark.parametrize("case", CASES)
def test_exact_mode(tmp_path: Path, case: str) -> None:
    """Sums in segments, whatever the sizes are; the same bits in any chunks."""
    golden = load_golden(case)
    model = load_model(write_model(tmp_path, golden), exact=True)
    ids = golden.prompt_ids
    logits = logits_of(model, ids)
    check_logits(logits, golden.logits["float32"], TOLERANCE)
    np.testing.assert_array_equal(logits_of(model, ids, [3, 1, len(ids) - 4], block_size=8, seed=1), logits)


@pytest.mark.parametrize("case", WINDOWED)
def test_pages_behind_windows_are_given_up(case: str) -> None:
    golden, model = load_case(case)
    ids = golden.prompt_ids
    for sizes in ([1] * len(ids), [9, 1, len(ids) - 10], [len(ids) - 2, 2]):
        driver = ModelDriver(model, block_size=8, seed=4, in_groups=True)
        starts = np.cumsum([0, *sizes])
        logits = [driver.step({0: ids[start : start + size]})[0] for start, size in zip(starts, sizes)]
        check_logits(np.concatenate(logits), golden.logits["float32"], TOLERANCE)
        if len(sizes) < len(ids):
            continue  # longer chunks see nearly all of so short a prompt
        is_given_up = (driver.block_tables == NO_BLOCK).any(axis=(1, 2))
        assert is_given_up.tolist() == [not kind.is_whole for kind in driver.kinds]


LOSS = {"mistral4_odd": 0.0326}
"""Transformers' own largest error in bfloat16 over 24 seeds, where it is above 2e-2 for ours at the golden's: 0.030. On
average over the seeds ours is 0.0165, transformers' 0.0214 (`test_goldens_gpu.test_bfloat16_over_seeds`)."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("stored_as", "dtype"), [("BF16", "auto"), ("F32", "bfloat16")])
def test_bfloat16(tmp_path: Path, case: str, stored_as: str, dtype: str) -> None:
    golden, model = load_case(case, stored_as, dtype)
    assert model.dtype is bfloat16
    assert model.kv_cache_spec(16).dtype is bfloat16
    theirs = golden.logits["bfloat16"]
    ours = logits_of(model, golden.prompt_ids)
    assert relative_error(ours, theirs) <= LOSS.get(case, 2e-2)
    # A best token may only change where the two best lie closer together than the allowed error.
    margin = np.diff(np.partition(theirs, -2, axis=1)[:, -2:], axis=1)[:, 0]
    is_clear = margin > 4e-2 * np.abs(theirs).max()
    assert is_clear.any()
    np.testing.assert_array_equal(ours.argmax(1)[is_clear], theirs.argmax(1)[is_clear])
    check_divergence(golden, model, tmp_path / "widened")


def check_divergence(golden: Golden, model: Model, folder: Path) -> None:
    expected = golden.greedy_ids["bfloat16"]
    chosen, logits = greedy(model, golden.prompt_ids, len(expected))
    at = next((i for i, (a, b) in enumerate(zip(chosen, expected, strict=True)) if a != b), None)
    if at is not None:
        assert expected[at] in np.argsort(logits[at])[-5:]
        # In float32 these weights give transformers' logits to 1e-5, as the last test but one shows.
        widened = load_model(write_model(folder, golden, "BF16"), dtype="float32")
        reference = logits_of(widened, golden.prompt_ids + expected[:at])[-1]
        assert reference.argmax() == expected[at]
        assert chosen[at] in np.argsort(reference)[-5:]


@pytest.mark.parametrize("case", CASES)
def test_weights_rounded_to_bfloat16_with_float32_pages(case: str) -> None:
    """With float32 pages, all that bfloat16 does is to round the weights, and activations where the tile does: every
    product is what the tile defines, and without that rounding float32's tolerance holds."""
    golden, model = load_case(case, "BF16")
    theirs = golden.logits["bfloat16"]
    logits = logits_of(model, golden.prompt_ids, kv_dtype=float32)
    if ROUNDS_ROWS:
        assert relative_error(logits, theirs) <= 2e-2
    else:
        check_logits(logits, theirs, TOLERANCE)
    with compared_products() as errors:
        unrounded = logits_of(model, golden.prompt_ids, kv_dtype=float32)
    check_logits(unrounded, theirs, TOLERANCE)
    assert len(errors) > 4 * model.config.num_layers
    assert max(errors) <= TOLERANCE


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("odd") or case.startswith("gpt2")])
@pytest.mark.parametrize(("stored_as", "dtype"), [("F16", "auto"), ("BF16", "float16")])
@pytest.mark.exhaustive_cases("F16-auto", "deepseek_v2_odd")
def test_float16(case: str, stored_as: str, dtype: str) -> None:
    golden, model = load_case(case, stored_as, dtype)
    assert model.dtype is float16
    assert relative_error(logits_of(model, golden.prompt_ids), golden.logits["bfloat16"]) <= 4e-3


@pytest.mark.parametrize("case", CASES[::4])
def test_bfloat16_widened_to_float32(case: str) -> None:
    golden, model = load_case(case, "BF16", "float32")
    assert model.dtype is float32
    check_logits(logits_of(model, golden.prompt_ids), golden.logits["bfloat16"], TOLERANCE)


# A longrope's sequence that outgrows its original context is the scheduler's to begin anew (test_longrope_threshold).
@pytest.mark.parametrize("case", [case for case in CASES[::3] if "longrope" not in case])
def test_sequences_in_one_batch_do_not_see_each_other(case: str) -> None:
    golden, model = load_case(case)
    ids = golden.prompt_ids
    driver = ModelDriver(model, 3, block_size=8, seed=3)
    reversed_ids = ids[::-1]
    driver.step({1: reversed_ids[:5]})
    first = driver.step({0: ids[:7], 1: reversed_ids[5:6], 2: ids})
    second = driver.step({1: reversed_ids[6:], 0: ids[7:]})
    check_logits(first[2], golden.logits["float32"], TOLERANCE)
    check_logits(np.concatenate([first[0], second[0]]), golden.logits["float32"], TOLERANCE)
    assert relative_error(second[1], logits_of(model, reversed_ids)[6:]) <= 1e-4


@pytest.mark.parametrize("case", ["llama_llama3_gqa4", "llama_linear_gqa2", "mistral_window", "qwen2_window"])
def test_the_older_spelling_runs_the_same(tmp_path: Path, case: str) -> None:
    golden = load_golden(case)
    model = load_model(write_model(tmp_path, golden, config="config_older.json"))
    check_logits(logits_of(model, golden.prompt_ids), golden.logits["float32"], TOLERANCE)
