"""The addend of docs/examples: its file alone adds adapters to every family."""

from __future__ import annotations

import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.registry import load_model
from runtime.batch import Batch
from runtime.linear.addends import DeclaredMap
from runtime.linear.options import LoadSettings
from runtime.tensor.tensor import Tensor
from tests.models import test_toy_family
from tests.models.driver import Array, ModelDriver, logits_of, relative_error, rotary_offset_of
from tests.models.folders import CASES, load_golden, write_model
from tests.models.makers.test_maker import ThreadCommunicator
from tests.models.shared_families import write_shared
from tests.models.test_toy_family import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCABULARY, toy_family

__all__ = ["toy_family"]  # a fixture
NUM_ADAPTERS = 3
ADAPTERS = [1, -1, 0, 1]  # of the sequences of a batch
IDS = [int(token) for token in np.random.default_rng(1).integers(0, 60, 24)]


def recipe() -> dict[str, Any]:
    """The names that the example defines."""
    return runpy.run_path(str(test_toy_family.EXAMPLES / "addend.py"))


def rank_one(outputs: int, inputs: int, seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((NUM_ADAPTERS, inputs)), rng.standard_normal((outputs, NUM_ADAPTERS))
    return (a * 0.3).astype(np.float32), (b * 0.3).astype(np.float32)


class Everywhere:
    """Adapters of every map that takes some."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rank_one = recipe()["RankOne"]

    def addends_of(self, declared: DeclaredMap) -> list[Any]:
        self.names += declared.names
        return [self.rank_one(*rank_one(*declared.shape, seed=len(self.names)))]


def logits_of_mixed(model: Any, ids: list[int], adapters: list[int]) -> dict[int, Array]:
    """Logits of sequences of the same ids, with an adapter each, in two steps."""
    cut = len(ids) // 2
    at = {0: cut, cut: len(ids) - cut}

    def complete(batch: Batch, first: int) -> None:
        batch.adapters = Tensor.from_numpy(np.repeat(np.array(adapters, np.int32), at[first]))

    offset = rotary_offset_of(model, len(ids))
    driver = ModelDriver(model, len(adapters), complete=complete, rotary_offset=offset)
    rows = [driver.step(dict.fromkeys(range(len(adapters)), part)) for part in (ids[:cut], ids[cut:])]
    return {number: np.concatenate([each[number] for each in rows]) for number in range(len(adapters))}


@pytest.mark.usefixtures("toy_family")
def test_rows_of_several_adapters_are_as_merged_weights_in_float64(tmp_path: Path) -> None:
    tensors = test_toy_family.weights()
    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    maps = {
        ("q_proj", "k_proj", "v_proj"): ((q_size, kv_size, kv_size), HIDDEN), ("o_proj",): ((HIDDEN,), q_size),
        ("gate_proj", "up_proj"): ((INNER, INNER), HIDDEN), ("down_proj",): ((HIDDEN,), INNER),
    }  # fmt: skip
    adapters, merged = {}, [{**tensors} for _ in range(NUM_ADAPTERS)]
    for index in range(2):
        for names, (outputs, inputs) in maps.items():
            a, b = rank_one(sum(outputs), inputs, seed=len(adapters))
            adapters[f"model.layers.{index}.{names[0]}"] = a, b
            for name, part in zip(names, np.split(b.astype(np.float64), np.cumsum(outputs)[:-1]), strict=True):
                for number, own in enumerate(merged):
                    own[f"model.layers.{index}.{name}.weight"] = tensors[
                        f"model.layers.{index}.{name}.weight"
                    ] + np.outer(part[:, number], a[number])
    folder = test_toy_family.write_folder(tmp_path, tensors)
    model = load_model(folder, addends=recipe()["RankOneAdapters"](adapters))
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 23).tolist()
    found = logits_of_mixed(model, ids, ADAPTERS)
    expected = [*(test_toy_family.expected_logits(own, ids) for own in merged), None]
    for number, adapter in enumerate(ADAPTERS):
        wanted = test_toy_family.expected_logits(tensors, ids) if adapter < 0 else expected[adapter]
        assert relative_error(found[number], wanted) <= 1e-5
        alone = logits_of_mixed(model, ids, [adapter])[0]
        np.testing.assert_array_equal(found[number], alone)
    np.testing.assert_array_equal(found[1], logits_of(load_model(folder), ids))


@pytest.mark.parametrize("case", CASES)
def test_every_family_hands_its_batch_to_its_maps(tmp_path: Path, case: str) -> None:
    """A map with addends raises an error without the batch."""
    golden, source = load_golden(case), Everywhere()
    folder = write_model(tmp_path, golden)
    model = load_model(folder, addends=source)
    assert len(set(source.names)) >= 2 * model.config.num_layers  # at least attention's, before and after
    ids = golden.prompt_ids
    found = logits_of_mixed(model, ids, [0, -1, 2])
    np.testing.assert_array_equal(found[1], logits_of(load_model(folder), ids))
    np.testing.assert_array_equal(found[2], logits_of_mixed(model, ids, [2])[0])
    assert relative_error(found[0], found[1]) > 1e-3
    assert relative_error(found[0], found[2]) > 1e-3


class Shift:
    """Adds a row to the rows that have an adapter, in each rank's part."""

    def __init__(self, declared: DeclaredMap) -> None:
        rows = np.random.default_rng(len(declared.names)).standard_normal(4096).astype(np.float32)
        whole = [rows[cut] for _, cut, _ in declared.parts]
        columns = next(cut for _, _, cut in declared.parts)
        is_mine = declared.is_segmented or not columns.start  # else ranks add their results
        self.row = np.concatenate(whole) * np.float32(is_mine)

    def add_to(self, residual: Tensor | None, x: Tensor, batch: Batch) -> Tensor | None:
        if batch.adapters is None:
            return residual
        added = Tensor.from_numpy((batch.adapters.numpy()[:, None] >= 0) * self.row)
        return added if residual is None else residual + added


class Shifts:
    def addends_of(self, declared: DeclaredMap) -> list[Shift]:
        return [Shift(declared)]


@pytest.mark.parametrize("exact", [True, False])
def test_ranks_add_what_one_adds(exact: bool, tmp_path: Path) -> None:
    folder = write_shared(tmp_path, "qwen2_moe")
    barrier, shared = threading.Barrier(2), [None, None]
    settings: LoadSettings = {"dtype": "float32", "exact": exact, "addends": Shifts()}

    def run(rank: int) -> dict[int, Array]:
        own: LoadSettings = {**settings, "communicator": ThreadCommunicator(rank, shared, barrier)}
        return logits_of_mixed(load_model(folder, load_format="dummy", **own), IDS, [0, -1])

    one = logits_of_mixed(load_model(folder, load_format="dummy", **settings), IDS, [0, -1])
    with ThreadPoolExecutor(2) as pool:
        for made in pool.map(run, range(2)):
            for number, expected in one.items():
                tolerance = 0 if exact else 2e-5 * np.abs(expected).max()
                np.testing.assert_allclose(made[number], expected, rtol=0, atol=tolerance)
