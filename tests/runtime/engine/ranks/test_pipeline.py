"""A model in stages gives what it gives in one piece: the same tokens, and in exact mode the same bits."""

from __future__ import annotations

import signal
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from models.errors import ConfigError
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine, describe_engine
from runtime.engine.messages import EngineOutput
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.ranks.executor import ParallelExecutor
from runtime.engine.sampling_params import SamplingParams
from tests.models.folders import CASES, load_golden, write_model
from tests.oracles.tiles import panel_bytes
from tests.runtime.engine.ranks.test_tensor_parallel import (
    PROMPTS,
    SAMPLED,
    SPLITTABLE,
    everything_of,
    request_of,
    run,
)

exhaustive = pytest.mark.exhaustive
GPU = pytest.param("emulated:sm_90a", marks=[pytest.mark.emulator, exhaustive])


LONGER = SamplingParams(max_tokens=40, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)


def engine_of(folder: Path | None, num_stages: int, num_ranks: int = 1, **settings: Any) -> Engine:
    settings = {"device": "cpu", "seed": 0, **settings}
    return build_engine(folder, pipeline_parallel_size=num_stages, tensor_parallel_size=num_ranks, **settings)


def answers(num_stages: int, num_ranks: int, params: SamplingParams, prompts: Any = PROMPTS, **settings: Any) -> Any:
    """Tokens and log probabilities of each prompt's answer, and the steps that were open at most."""
    found: dict[str, list[Any]] = {str(number): [] for number in range(len(prompts))}
    engine, most = engine_of(None, num_stages, num_ranks, **settings), 0
    try:
        for number, ids in enumerate(prompts):
            engine.add(request_of(str(number), ids, params))
        while engine.has_work:
            for output in engine.step():
                found[output.request_id].append((output.new_token_ids, repr(output.logprobs), output.finish_reason))
            engine.check_invariants()
            most = max(most, 1 + len(engine.scheduler.open_steps))  # the oldest is over
        num_preemptions = engine.scheduler.num_preemptions
    finally:
        engine.close()
    assert ("num_blocks" in settings) == (num_preemptions > 0)
    return list(found.values()), most


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(
            pytest.param(each, marks=exhaustive)
            for each in (
                {"num_blocks": 8, "max_num_seqs": 4, "swap_space_bytes": 1 << 20},
                {"num_blocks": 8, "max_num_seqs": 4, "preemption": "recompute"},
                {"overlap": "on", "max_num_batched_tokens": 16, "max_num_seqs": 4},
                {"speculation": "ngram"},
                {"speculation": "ngram", "overlap": "on"},
                {"quantization": "int8"},
                {"decode_graphs": "off", "max_num_batched_tokens": 64},
            )
        ),
    ],
    ids=str,
)
def test_stages_change_no_bit(device: str, settings: dict[str, Any]) -> None:
    settings = {"exact": True, "max_model_len": 96, "device": device, **settings}
    params = LONGER if "num_blocks" in settings else SAMPLED
    alone, _ = answers(1, 1, params, **settings)
    for num_stages, num_ranks in ((2, 1), (4, 1), (2, 2)) if len(settings) > 3 else ((2, 1),):
        staged, most = answers(num_stages, num_ranks, params, **settings)
        assert staged == alone, (num_stages, num_ranks)
        assert most == num_stages or "speculation" in settings


@exhaustive
@pytest.mark.parametrize("layers", ["1,3", "3,1"])
def test_stages_of_other_sizes_change_no_bit(layers: str) -> None:
    settings: dict[str, Any] = {"exact": True, "max_model_len": 96}
    alone, _ = answers(1, 1, SAMPLED, **settings)
    assert answers(2, 1, SAMPLED, **settings, pipeline_layers=layers)[0] == alone


@exhaustive
def test_chunks_of_a_prompt_lie_in_several_steps() -> None:
    """Which are open at once, and the answer is the same; penalties count what other stages have drawn."""
    prompts = [[(7 * at + number) % 500 for at in range(300 + 40 * number)] for number in range(2)]
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=5, frequency_penalty=0.8, ignore_eos=True)
    settings: dict[str, Any] = {"exact": True, "max_model_len": 400, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    alone, _ = answers(1, 1, params, prompts, **settings)
    for num_stages in (2, 4):
        staged, most = answers(num_stages, 1, params, prompts, **settings)
        assert staged == alone
        assert most == num_stages


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    "case", [each if each == "qwen2_window" else pytest.param(each, marks=exhaustive) for each in CASES]
)
def test_families_in_stages(case: str, device: str, tmp_path: Path) -> None:
    """transformers' greedy tokens, in as many stages as there are layers, up to four, and with two ranks in each of
    two."""
    golden = load_golden(case)
    folder, expected = write_model(tmp_path, golden), golden.greedy_ids["float32"]
    params = SamplingParams(max_tokens=len(expected), temperature=0.0, ignore_eos=True)
    config = EngineConfig(device="cpu")
    num_layers = sum(group.num_layers for group in describe_engine(folder, config).cache_groups)
    shapes = [(min(4, num_layers), 1), *([(2, 2)] if case in SPLITTABLE else [])]
    for num_stages, num_ranks in shapes if case != "qwen2_window" else shapes[:1]:
        engine = engine_of(folder, num_stages, num_ranks, dtype="float32", device=device)
        try:
            for name in "ab":
                engine.add(request_of(name, list(golden.prompt_ids), params))
            outputs = run(engine)
        finally:
            engine.close()
        for name in "ab":
            found = [token for each in outputs if each.request_id == name for token in each.new_token_ids]
            assert found == expected, (num_stages, num_ranks)


def _everything(device: str, num_stages: int, num_ranks: int) -> list[Any]:
    return everything_of(
        engine_of(
            None, num_stages, num_ranks, device=device, exact=True, max_num_seqs=4, max_num_batched_tokens=64,
            max_model_len=64, num_blocks=16,
        )
    )  # fmt: skip


@exhaustive
@pytest.mark.parametrize("device", ["cpu", "emulated:sm_90a"])
def test_prefixes_grammars_embeddings_logits_and_prompts(device: str) -> None:
    alone = _everything(device, 1, 1)
    for shape in ((2, 1), (2, 2)):
        assert _everything(device, *shape) == alone


def test_each_rank_says_what_it_holds() -> None:
    """In all it is what one holds, but the tied table, which two have."""
    alone = describe_engine(None, EngineConfig(device="cpu", num_blocks=64))
    staged = describe_engine(None, EngineConfig(device="cpu", num_blocks=64, pipeline_parallel_size=2))
    assert alone.ranks == ()
    first, second = staged.ranks
    assert (first.number, first.stage, first.first_layer) == (0, 0, 0)
    assert (second.number, second.stage, second.end_layer) == (1, 1, 4)
    assert 0 < first.end_layer == second.first_layer < 4
    assert first.kv_cache_bytes + second.kv_cache_bytes == staged.kv_cache_bytes == alone.kv_cache_bytes
    assert first.weight_bytes + second.weight_bytes == staged.weight_bytes
    assert staged.weight_bytes == alone.weight_bytes + panel_bytes(640, 256, element_bytes=2)
    assert staged.cache_groups == alone.cache_groups
    both = describe_engine(
        None, EngineConfig(device="cpu", num_blocks=64, pipeline_parallel_size=2, tensor_parallel_size=2)
    )
    assert [(rank.stage, rank.first_layer) for rank in both.ranks] == [
        (0, 0), (0, 0), (1, first.end_layer), (1, first.end_layer)
    ]  # fmt: skip
    assert both.kv_cache_bytes == alone.kv_cache_bytes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "4"}, "the layers of each of pipeline_parallel_size=2"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "4,0"}, "at least 1"),
        ({"pipeline_layers": "1,3"}, "must be the layers of each of pipeline_parallel_size=1"),
        ({"pipeline_parallel_size": 65}, "pipeline_parallel_size must be at most 64, got 65"),
        ({"pipeline_parallel_size": 16, "tensor_parallel_size": 8}, "pipeline_parallel_size is 16 of 8 ranks each"),
        ({"pipeline_parallel_size": 2, "speculation": "eagle3"}, "split over 2 ranks; leave out pipeline_parallel"),
        ({"pipeline_parallel_size": 2, "speculation_acceptance": "rejection"}, "with pipeline_parallel_size 2"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        build_engine(None, device="cpu", **settings)


def test_the_user_may_say_which_layers_a_stage_has() -> None:
    config = EngineConfig(device="cpu", num_blocks=64, pipeline_parallel_size=2, pipeline_layers="1,3")
    assert [(rank.first_layer, rank.end_layer) for rank in describe_engine(None, config).ranks] == [(0, 1), (1, 4)]
    with pytest.raises(ConfigError, match="stages of 1, 2 layers must have 4 together"):
        build_engine(None, device="cpu", pipeline_parallel_size=2, pipeline_layers="1,2")


def test_more_stages_than_layers_are_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="4 layers cannot be split over 5 stages"):
        build_engine(None, device="cpu", pipeline_parallel_size=5)


@exhaustive
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stage_that_ends_is_told_to_every_request(victim: int) -> None:
    """Of three processes beside the engine's: a rank of the first stage, and both of the second."""
    import os

    engine = engine_of(None, 2, 2, max_model_len=64)
    assert isinstance(engine.executor, ParallelExecutor)
    pids = engine.executor.ranks.pids
    client = ThreadEngineClient(engine)
    seen: SimpleQueue[EngineOutput] = SimpleQueue()
    try:
        for number in range(3):
            client.submit(request_of(str(number), [5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True)), seen.put)
        seen.get(timeout=60)
        os.kill(pids[victim], signal.SIGKILL)
        ended: dict[str, str] = {}
        while len(ended) < 3:
            output = seen.get(timeout=10)
            if output.finish_reason:
                ended[output.request_id] = output.finish_reason
        assert "error" in ended.values()
    finally:
        client.close()
        engine.executor.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
