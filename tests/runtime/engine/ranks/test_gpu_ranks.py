"""A model on several emulated GPUs, each in a process: transformers' tokens, one rank's bits if exact, no orphan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine
from runtime.engine.sampling_params import SamplingParams
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.ranks.test_tensor_parallel import PROMPTS, everything_of, request_of, run

pytestmark = pytest.mark.emulator

DEVICE = "emulated:sm_90a"
exhaustive = pytest.mark.exhaustive


def engine_of(folder: Path | None, num_ranks: int, **settings: Any) -> Engine:
    settings = {"device": DEVICE, "max_model_len": 64, "num_blocks": 16, "seed": 0, **settings}
    return build_engine(folder, tensor_parallel_size=num_ranks, **settings)


def greedy(folder: Path, ids: list[int], count: int, num_ranks: int, **settings: Any) -> list[int]:
    """Of one prompt of two, so that decode graphs have two rows."""
    engine = engine_of(folder, num_ranks, dtype="float32", **settings)
    try:
        for name in ("a", "b"):
            engine.add(request_of(name, ids, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)))
        outputs = run(engine)
        stats = engine.executor.graph_stats()
        assert (stats.num_failed, stats.num_steps > 0) == (0, True), stats
        return [token for output in outputs if output.request_id == "b" for token in output.new_token_ids]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        ("qwen2_tied", 2),
        *(pytest.param(case, 2, marks=exhaustive) for case in ("mistral_window", "qwen2_window", "qwen3_layer_types")),
        pytest.param("mistral_wide_window", 4, marks=exhaustive),
    ],
)
@pytest.mark.exhaustive
def test_families_on_emulated_ranks(case: str, num_ranks: int, tmp_path: Path) -> None:
    golden = load_golden(case)
    expected = golden.greedy_ids["float32"][:12]
    folder = write_model(tmp_path, golden)
    assert greedy(folder, list(golden.prompt_ids), len(expected), num_ranks) == expected


SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)


def answers(folder: Path | None, num_ranks: int, params: SamplingParams, **settings: Any) -> list[Any]:
    found: dict[str, list[Any]] = {}
    engine = engine_of(folder, num_ranks, **settings)
    try:
        for number, ids in enumerate(PROMPTS):
            engine.add(request_of(str(number), ids, params))
        for output in run(engine):
            found.setdefault(output.request_id, []).append((output.new_token_ids, repr(output.logprobs)))
    finally:
        engine.close()
    return [found[str(number)] for number in range(len(PROMPTS))]


SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 97,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Four ranks can share its segments."""


@exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_blocks": 5, "max_num_seqs": 4, "swap_space_bytes": 1 << 20},  # with preemption
        {"overlap": "off", "max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"speculation": "ngram"},
        {"decode_graphs": "off"},
    ],
    ids=str,
)
def test_exact_mode_has_the_same_bits_on_any_number_of_ranks(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    settings = {"exact": True, "load_format": "dummy", **settings}
    alone = answers(tmp_path, 1, SAMPLED, **settings)
    for num_ranks in (2, 4) if len(settings) == 2 else (2,):
        assert answers(tmp_path, num_ranks, SAMPLED, **settings) == alone


def _everything(device: str, num_ranks: int) -> list[Any]:
    return everything_of(
        engine_of(None, num_ranks, device=device, exact=True, max_num_seqs=4, max_num_batched_tokens=64)
    )


@exhaustive
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_prefixes_grammars_embeddings_and_logits(device: str) -> None:
    assert _everything(device, 2) == _everything(device, 1)


def test_devices_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="tensor_parallel_size must be at most"):
        build_engine(None, device=DEVICE, tensor_parallel_size=65)
