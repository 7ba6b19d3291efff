"""Ranks and stages of every family, on threads: together they are the model, ranks in exact mode to the bit."""

from __future__ import annotations

import json
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import ModelLoadError
from models.families import known_architectures
from models.registry import declare_model, load_model, stages_of
from runtime.dtype import DType
from runtime.linear.options import LoadSettings
from runtime.tensor.tensor import Tensor
from tests.models.driver import logits_of
from tests.models.folders import change_config, load_golden, write_model
from tests.models.makers.test_maker import ThreadCommunicator
from tests.models.shared_families import FAMILIES, WITHOUT_EXACT_RANKS, WITHOUT_STAGES, write_shared

exhaustive = pytest.mark.exhaustive
Array = np.ndarray[Any, Any]
IDS = [int(token) for token in np.random.default_rng(1).integers(0, 60, 24)]


def logits_of_ranks(
    folder: Path, num_ranks: int, ids: list[int], settings: LoadSettings, **options: Any
) -> list[Array]:
    """Each rank's, which are all tokens' of the whole model."""
    shared: list[Any] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks)

    def run(rank: int) -> Array:
        communicator = ThreadCommunicator(rank, shared, barrier)
        model = load_model(folder, communicator=communicator, **settings, **options)
        declared = declare_model(folder, communicator=communicator, **settings, **options)
        assert declared.weight_bytes == model.weight_bytes
        return logits_of(model, ids)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


@pytest.mark.parametrize(
    "family",
    [each if each in ("deepseek_v2", "gpt_oss") else pytest.param(each, marks=exhaustive) for each in FAMILIES],
)
def test_every_family_in_exact_mode(family: str, tmp_path: Path) -> None:
    """And near enough without."""
    folder = write_shared(tmp_path, family)
    for exact in (True, False) if family not in WITHOUT_EXACT_RANKS else (False,):
        settings: LoadSettings = {"dtype": "float32", "exact": exact}
        expected = logits_of(load_model(folder, load_format="dummy", **settings), IDS)
        for num_ranks in (2, 4):
            for logits in logits_of_ranks(folder, num_ranks, IDS, settings, load_format="dummy"):
                if exact:
                    np.testing.assert_array_equal(logits, expected)
                else:
                    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


class ThreadStage:
    """See `Pipeline`."""

    def __init__(self, stage: int, inboxes: list[queue.Queue[Array]]) -> None:
        self.stage, self.num_stages, self._inboxes = stage, len(inboxes), inboxes

    def send(self, x: Tensor) -> None:
        self._inboxes[self.stage + 1].put(x.numpy().copy())

    def receive(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        x = Tensor.from_numpy(self._inboxes[self.stage].get(timeout=60))
        assert (x.shape, x.dtype) == (shape, dtype)
        return x


@pytest.mark.parametrize(
    "family",
    [
        each if each in ("apertus", "exaone4", "phimoe") else pytest.param(each, marks=exhaustive)
        for each in FAMILIES
        if each not in WITHOUT_STAGES
    ],
)
def test_every_family_in_stages(family: str, tmp_path: Path) -> None:
    """Whose layers are the model's, so that every bit is."""
    folder = write_shared(tmp_path, family)
    stages = stages_of(folder, 3, (2, 1, 1), load_format="dummy")
    np.testing.assert_array_equal(logits_of_stages(folder, stages), logits_of_whole(folder))


def logits_of_whole(folder: Path) -> Array:
    return logits_of(load_model(folder, load_format="dummy", dtype="float32"), IDS)


def logits_of_stages(folder: Path, stages: tuple[range, ...]) -> Array:
    """The last stage's, of dummy weights."""
    inboxes: list[queue.Queue[Array]] = [queue.Queue() for _ in stages]

    def run(stage: int) -> Array:
        pipeline = ThreadStage(stage, inboxes)
        model = load_model(folder, load_format="dummy", dtype="float32", pipeline=pipeline, stages=stages)
        if stage != len(stages) - 1:
            no_logits = np.zeros((len(IDS), model.config.vocab_size), np.float32)
            model.compute_logits = lambda hidden, adapters=None: Tensor.from_numpy(no_logits)  # type: ignore[method-assign]
        return logits_of(model, IDS)

    with ThreadPoolExecutor(len(stages)) as pool:
        *_, logits = pool.map(run, range(len(stages)))
    assert all(inbox.empty() for inbox in inboxes)
    return logits


@pytest.mark.parametrize(
    ("sharing", "counts"), [(3, (1, 5)), (3, ()), pytest.param(0, (2, 1, 3), marks=exhaustive), (2, (1, 1, 4))]
)
def test_stages_hand_on_what_all_layers_read(sharing: int, counts: tuple[int, ...], tmp_path: Path) -> None:
    """Inputs of Gemma 4's layers. Those that share pages are in the last stage, which skips rows."""
    folder = change_config(write_model(tmp_path, load_golden("gemma4_inputs_odd")), num_kv_shared_layers=sharing)
    stages = stages_of(folder, len(counts) or 2, counts, load_format="dummy")
    assert sum(map(len, stages)) == 6
    assert not sharing or len(stages[-1]) >= sharing + 2
    np.testing.assert_array_equal(logits_of_stages(folder, stages), logits_of_whole(folder))


def test_layers_that_stages_cannot_share_are_refused(tmp_path: Path) -> None:
    folder, inboxes = write_shared(tmp_path, "gemma4_inputs"), [queue.Queue[Array]() for _ in range(2)]
    with pytest.raises(ModelLoadError, match="2, 2 layers: the last must have at least 4, which share their keys and"):
        stages_of(folder, 2, (2, 2), load_format="dummy")
    with pytest.raises(
        ModelLoadError, match="4 layers cannot be split over 2 stages, of which the last has at least 4"
    ):
        stages_of(folder, 2, load_format="dummy")
    stages = range(2), range(2, 4)
    with pytest.raises(ModelLoadError, match="layer 2 uses the keys and values of layer 0, which another stage has"):
        declare_model(folder, load_format="dummy", pipeline=ThreadStage(1, inboxes), stages=stages)


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [("deepseek_v2_groups", 2), ("deepseek_v2_odd", 3), pytest.param("deepseek_v3_odd", 2, marks=exhaustive)],
)
def test_latent_attention_gives_transformers_logits(case: str, num_ranks: int, tmp_path: Path) -> None:
    golden = load_golden(case)
    folder, expected = write_model(tmp_path, golden), golden.logits["float32"]
    for logits in logits_of_ranks(folder, num_ranks, list(golden.prompt_ids), {"dtype": "float32"}):
        np.testing.assert_allclose(logits[: len(expected)], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("stored_as", ["grouped", pytest.param("tiled", marks=exhaustive)])
def test_value_heads_in_other_orders(stored_as: str, tmp_path: Path) -> None:
    """As Qwen3-Next and llama.cpp store them."""
    folder = change_config(write_shared(tmp_path, "qwen3_5"), linear_attn_stored_as=stored_as)
    settings: LoadSettings = {"dtype": "float32", "exact": True}
    expected = logits_of(load_model(folder, load_format="dummy", **settings), IDS)
    for num_ranks in (2, 4):
        for logits in logits_of_ranks(folder, num_ranks, IDS, settings, load_format="dummy"):
            np.testing.assert_array_equal(logits, expected)


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    folder = change_config(write_shared(tmp_path, "qwen3_5"), linear_num_value_heads=12, linear_attn_stored_as="tiled")
    communicator = ThreadCommunicator(0, [None] * 2, threading.Barrier(2))
    with pytest.raises(ModelLoadError, match="num_key_heads = 4 cannot be split over 2 ranks"):
        declare_model(folder, load_format="dummy", communicator=communicator)


@pytest.mark.parametrize("family", WITHOUT_EXACT_RANKS)
def test_norms_over_all_heads_are_refused_in_exact_mode(family: str, tmp_path: Path) -> None:
    folder = write_shared(tmp_path, family)
    communicator = ThreadCommunicator(0, [None] * 2, threading.Barrier(2))
    with pytest.raises(ModelLoadError, match=r"norms over all heads .* exact cannot be split over 2 ranks"):
        load_model(folder, load_format="dummy", exact=True, communicator=communicator)


def test_experts_whose_rows_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    """In exact mode alone."""
    folder = write_shared(tmp_path, "qwen3_moe")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "hidden_size": 130}))
    communicator = ThreadCommunicator(0, [None] * 4, threading.Barrier(4))
    settings: LoadSettings = {"dtype": "float32", "communicator": communicator}
    with pytest.raises(ModelLoadError, match="hidden_size = 130 of experts cannot be split over 4 ranks in exact mode"):
        load_model(folder, load_format="dummy", exact=True, **settings)
    declare_model(folder, load_format="dummy", **settings)


def test_no_family_is_left_out() -> None:
    """But those that read pictures, and encoders, whose tests are their own."""
    configs = (load_golden(case).folder / "config.json" for case in FAMILIES.values())
    have = {json.loads(path.read_text())["architectures"][0] for path in configs}
    left_out = {name for name, one in known_architectures().items() if one.model_class.generates} - have
    assert all("Conditional" in name or "VL" in name or "Llava" in name for name in left_out), left_out
