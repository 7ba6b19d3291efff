"""Towers whose heads and columns are shared by ranks give what they give on one, in exact mode bit for bit."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from models.registry import load_model
from models.towers.layers import share_of_tower
from runtime.communicator import DeclaredRank
from runtime.dtype import DType
from runtime.images.patches import FixedRule
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor
from tests.models.golden_weights import golden_tensor
from tests.models.vision import cases, pixtral_cases, square_cases

Array = np.ndarray[Any, Any]

EVEN = {"hidden_size": 128, "num_heads": 8, "num_attention_heads": 8, "intermediate_size": 256}
"""A tower whose heads and widths eight ranks and all segments divide."""


class Meeting:
    """Where threads that are ranks put their numbers."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.slots = Barrier(num_ranks, timeout=120), [np.empty(0)] * num_ranks
        self.num_sums = 0

    def exchange(self, rank: int, numbers: Array) -> list[Array]:
        self.slots[rank] = numbers.copy()
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class ThreadRank:
    """See `Communicator`."""

    def __init__(self, meeting: Meeting, rank: int, num_ranks: int) -> None:
        self.meeting, self.rank, self.num_ranks = meeting, rank, num_ranks

    def all_reduce(self, tensor: Tensor) -> None:
        self.meeting.num_sums += 1
        tensor.array[...] = sum(self.meeting.exchange(self.rank, tensor.array))

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.meeting.num_sums += 1
        return Tensor.from_numpy(np.stack(self.meeting.exchange(self.rank, tensor.array)))

    def all_gather_columns(self, tensor: Tensor, shard: int, columns: int) -> Tensor:
        return Tensor.from_numpy(np.concatenate(self.meeting.exchange(self.rank, tensor.array), axis=1)[:, :columns])

    def sum_buffer(self, shape: tuple[int, ...], dtype: DType) -> None:
        return None


def config_of(family: str, tower: dict[str, Any]) -> dict[str, Any]:
    if family in ("llava", "mistral3"):
        given = square_cases.CASES["llava_clip_mistral"] if family == "llava" else pixtral_cases.CASES["mistral3"]
    else:
        given = square_cases.CASES["gemma3_rest"] if family == "gemma3" else cases.CASES[family]
    config = copy.deepcopy(getattr(given, "config", given))
    heads = "num_attention_heads" if family in ("llava", "mistral3", "gemma3") else "num_heads"
    own = {name: value for name, value in tower.items() if not name.startswith("num_") or name == heads}
    config["vision_config"] |= own
    text = config["text_config"]
    text["num_attention_heads"] = text["num_key_value_heads"] = 16  # of which tests of towers see nothing
    text["head_dim"] = 20
    if family == "qwen2_5_vl":
        text |= {"hidden_size": 320, "head_dim": None}
        config["vision_config"]["out_hidden_size"] = 320
    text["intermediate_size"] = 1024
    return config


def embeddings(folder: Path, num_ranks: int, **settings: Any) -> tuple[list[Array], int]:
    """What each of the tower's tensors is on the last rank, and how many sums ranks had."""
    meeting = Meeting(num_ranks)

    def of_rank(rank: int) -> list[Array]:
        communicator = ThreadRank(meeting, rank, num_ranks) if num_ranks > 1 else None
        model: Any = load_model(folder, load_format="dummy", communicator=communicator, **settings)
        rule = model.patch_rule
        grid = rule.grid if isinstance(rule, FixedRule) else (6, 10)
        width = 3 * rule.num_frames * rule.patch_size**2
        patches = golden_tensor("picture.weight", (grid[0] * grid[1], width), 21) * np.float32(10)
        encoding, made = model.tower.start(patches, grid), None
        while made is None:
            made = encoding.advance(24)
        return [each.numpy().copy() for each in made]

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(of_rank, range(num_ranks)))[-1], meeting.num_sums


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava", "mistral3", "gemma3"])
@pytest.mark.parametrize("tower", [{}, EVEN], ids=["odd", "even"])
def test_two_ranks_give_what_one_gives(tmp_path: Path, family: str, tower: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(family, tower)))
    alone, none = embeddings(tmp_path, 1)
    shared, num_sums = embeddings(tmp_path, 2)
    assert not none
    assert num_sums or not tower
    for mine, wanted in zip(shared, alone, strict=True):
        assert np.isfinite(wanted).all()
        assert np.abs(wanted).max() > 1e-3
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
        assert mine.tobytes() != wanted.tobytes() or not tower


@pytest.mark.parametrize("tower", [{}, EVEN], ids=["odd", "even"])
def test_exact_mode_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path, tower: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_vl", tower)))
    alone, _ = embeddings(tmp_path, 1, exact=True)
    for num_ranks in (2, 4):
        shared, num_sums = embeddings(tmp_path, num_ranks, exact=True)
        assert bool(num_sums) == bool(tower)
        assert [each.tobytes() for each in shared] == [each.tobytes() for each in alone]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("width", "head_dim"), [(16, 72), (5, 4), (4304, 1), (3420, 1), (52, 1), (28, 1)])
@pytest.mark.parametrize("settings", [{}, {"exact": True}, {"quantization": "int8"}], ids=str)
def test_ranks_have_all_columns_once(num_ranks: int, width: int, head_dim: int, settings: dict[str, Any]) -> None:
    if num_ranks == 3 and settings.get("exact"):
        pytest.skip("exact mode has 1, 2, 4 or 8 ranks")
    options = [LoadOptions.parse(communicator=DeclaredRank(rank, num_ranks), **settings) for rank in range(num_ranks)]
    found = [share_of_tower(width, each, head_dim=head_dim) for each in options]
    columns = width * head_dim
    if found[0].inputs is None:
        assert all(each.shard.count == columns and each.outputs is None for each in found)
        return
    ends = [each.shard.first + each.shard.count for each in found]
    assert [each.shard.first for each in found] == [0, *ends[:-1]]
    assert ends[-1] == columns
    unit = 64 if "quantization" in settings else 1
    for each in found:
        assert each.shard.count > 0
        assert each.shard.whole == columns
        assert each.shard.count % head_dim == 0
        assert each.shard.first % unit == 0
