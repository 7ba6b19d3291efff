"""A model that mixes windows and full attention gives the same bits whether pages behind a window are given up or
kept, whatever else happens to its requests; and a prompt of several windows holds few of its pages."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.base import Model
from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from runtime.kv.cache import KVCacheSpec
from runtime.kv.kinds import FULL, Window
from tests.runtime.engine.fakes import request, run_to_end
from tests.runtime.engine.test_fuzz import Answers, fuzz, templates

WINDOW, VOCAB_SIZE, MAX_MODEL_LEN = 24, 97, 160
MIXED = ("sliding_attention",) * 5 + ("full_attention",)
SETTINGS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 48, "block_size": 8, "seed": 0,
}  # fmt: skip


def write_model(folder: Path, layer_types: Sequence[str]) -> Path:
    """A Qwen3 whose layers are of these types; its weights are dummies."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": len(layer_types), "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "use_sliding_window": True,
        "sliding_window": WINDOW, "layer_types": list(layer_types), "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build(folder: Path, device: str = "cpu", **settings: Any) -> Engine:
    return build_engine(folder, device=device, dtype="float32", load_format="dummy", **{**SETTINGS, **settings})


def build_keeping_all(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    """An engine whose cache knows no windows: one group, whose pages are all kept."""
    make_spec = Model.kv_cache_spec

    def without_windows(*arguments: Any) -> KVCacheSpec:
        spec = make_spec(*arguments)
        return dataclasses.replace(spec, layers=tuple(each._replace(kind=FULL) for each in spec.layers))

    with monkeypatch.context() as patch:
        patch.setattr(Model, "kv_cache_spec", without_windows)
        engine = build(folder, **settings)
    assert engine.limits.cache_kinds == (FULL,)
    return engine


def make_requests(count: int, longest: int = MAX_MODEL_LEN) -> list[EngineRequest]:
    """Many kinds, whose prompts share beginnings; each wants log probabilities."""
    return [
        msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, logprobs=2))
        for each in templates(random.Random(1), count, VOCAB_SIZE, longest)
    ]


def answers(engine: Engine, requests: list[EngineRequest]) -> dict[tuple[str, int], Any]:
    """By request and choice: ids, and the bits of their log probabilities."""
    for each in requests:
        engine.add(each)
    results = run_to_end(engine)
    return {
        (each.request_id, index): [
            (output.new_token_ids, output.logprobs) for output in results[each.request_id].of(index)
        ]
        for each in requests
        for index in range(each.params.n)
    }


@pytest.mark.parametrize(
    "layer_types",
    [
        pytest.param(MIXED, id="mixed"),
        pytest.param(("sliding_attention",) * 3, id="all windows", marks=pytest.mark.exhaustive),
    ],
)
def test_pages_given_up_change_no_bit(
    layer_types: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs and eager steps, both loops, prefixes found or not, victims swapped or computed again."""
    folder = write_model(tmp_path, layer_types)
    requests = make_requests(24)
    expected = answers(build_keeping_all(folder, monkeypatch, num_blocks=400), requests)
    num_blocks = 52 if layer_types is MIXED else 9
    for settings in (
        {"num_blocks": 1200},
        {"num_blocks": num_blocks, "overlap": "on", "preemption": "swap", "swap_space_bytes": 1 << 24},
        {"num_blocks": num_blocks, "decode_graphs": "off", "enable_prefix_caching": False},
    ):
        engine = build(folder, **settings)
        assert set(engine.limits.cache_kinds) == ({FULL, Window(WINDOW)} if layer_types is MIXED else {Window(WINDOW)})
        assert answers(engine, requests) == expected, settings
        stats = engine.stats()
        if "overlap" in settings:
            assert stats.num_swaps > 0
        elif "decode_graphs" in settings:
            assert stats.num_preemptions > stats.num_swaps == 0
        else:
            assert stats.prefix_cache_hits > 0
        engine.close()


def test_random_load_leaves_every_page_its_owner(tmp_path: Path) -> None:
    """As the demo model's in `test_fuzz`, with six block tables a sequence."""
    folder = write_model(tmp_path, MIXED)
    lone = build(folder, num_blocks=200, max_num_seqs=2, enable_prefix_caching=False)
    engine = build(folder, num_blocks=52, overlap="on", preemption="swap", swap_space_bytes=1 << 18)
    pages = fuzz(engine, Answers(lone), num_steps=150, seed=3, failure_rate=0.01)
    stats = engine.stats()
    assert min(stats.num_swaps, stats.swapped_in_blocks, stats.prefix_cache_hits) > 0
    assert pages.num_compared > 150 * 150


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_pages_given_up_change_no_bit_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path, ("sliding_attention", "full_attention"))
    requests = make_requests(3, 80)
    gpu = {"device": "emulated:sm_80", "exact": True}
    expected = answers(build_keeping_all(folder, monkeypatch, num_blocks=40, **gpu), requests)
    engine = build(folder, num_blocks=60, **gpu)
    assert answers(engine, requests) == expected
    assert engine.stats().num_graph_steps > 0
    engine.close()


def test_a_long_prompt_holds_a_window_and_a_chunk(tmp_path: Path) -> None:
    """Six groups of one layer, one of which sees all: at most 35 % of what all-full layers hold while it decodes."""
    engine = build(write_model(tmp_path, MIXED), enable_prefix_caching=False, num_blocks=120)
    engine.add(request("one", [index % 90 for index in range(150)], max_tokens=10))
    (sequence,) = engine.requests["one"].sequences
    held: dict[bool, int] = {}
    while engine.has_work:
        engine.step()
        is_decode = sequence.num_output_tokens > 1
        held[is_decode] = max(held.get(is_decode, 0), len(sequence.held_blocks))
    num_pages = 160 // 8
    in_window, chunk = 24 // 8 + 1, 48 // 8
    assert held[False] <= num_pages + 5 * (in_window + chunk)
    assert held[True] <= num_pages + 5 * in_window <= 0.35 * 6 * num_pages
