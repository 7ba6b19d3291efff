"""Decode steps of one sequence as one launch: transformers' tokens, what layers answer, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_kernels.cuda import megakernel
from runtime.engine.errors import RequestError
from runtime.errors import DeviceError, InvalidArgumentError
from tests.models.folders import change_config, load_golden, write_model
from tests.runtime.device.emulated import new_gpu
from tests.runtime.engine.fakes import Collected, make_engine, request, run_to_end
from tests.runtime.engine.graph_cases import new_engine

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize(
    ("golden", "device"),
    [
        ("llama_tied_gqa4", "emulated:sm_80"),
        pytest.param("qwen3_odd", "emulated:sm_90a", marks=pytest.mark.exhaustive),
    ],
)
def test_gives_the_golden_tokens(tmp_path: Path, golden: str, device: str) -> None:
    """Those of Hugging Face transformers, in float32; with norms of heads, and shared keys."""
    case = load_golden(golden)
    engine = new_engine(write_model(tmp_path, case), device, dtype="float32", decode="megakernel")
    expected = case.greedy_ids["float32"][:8]
    engine.add(request("x", case.prompt_ids, max_tokens=len(expected), ignore_eos=True))
    assert run_to_end(engine)["x"].token_ids() == expected
    assert engine.stats().num_graph_steps == len(expected) - 2
    assert engine.stats().num_failed_graphs == 0
    engine.close()


def answers(folder: Path, dtype: str, decode: str) -> dict[str, Collected]:
    """Of one sequence of several parts alone, drawn with a seed, then of two together, which read what it wrote."""
    engine = new_engine(
        folder, "emulated:sm_90a", dtype=dtype, decode=decode, max_model_len=192, num_blocks=60,
        max_num_batched_tokens=192,
    )  # fmt: skip
    prompt = [3 + (5 * place) % 40 for place in range(150)]
    results: dict[str, Collected] = {}
    engine.add(request("alone", prompt, max_tokens=8, ignore_eos=True, logprobs=2, temperature=0.8, seed=3))
    run_to_end(engine, results)
    assert engine.stats().num_graph_steps == 6
    for i in range(2):
        more = [*prompt, *results["alone"].token_ids(), 7 + i]
        engine.add(request(f"both{i}", more, max_tokens=4, ignore_eos=True, logprobs=2))
    run_to_end(engine, results)
    if decode == "megakernel":
        assert engine.stats().prefix_cache_hits > 144, "pages that the kernel wrote are read again"
    engine.close()
    return results


def logprobs_of(collected: Collected) -> list[float]:
    return [entry.logprob for output in collected.outputs for entry in output.logprobs or []]


@pytest.mark.exhaustive
def test_answers_what_layers_answer(tmp_path: Path) -> None:
    folder = write_model(tmp_path, load_golden("llama_default"))
    change_config(folder, max_position_embeddings=192)
    ours, theirs = (answers(folder, "float32", decode) for decode in ("megakernel", "layers"))
    for name, each in ours.items():
        assert each.token_ids() == theirs[name].token_ids(), name
        assert np.allclose(logprobs_of(each), logprobs_of(theirs[name]), rtol=1e-4, atol=1e-4), name


@pytest.mark.exhaustive
def test_in_bfloat16_it_answers_within_its_rounding(tmp_path: Path) -> None:
    """While tokens agree; where they do not, rounding decided between two that were close."""
    folder = write_model(tmp_path, load_golden("llama_default"), "BF16")
    change_config(folder, max_position_embeddings=192)
    ours, theirs = (answers(folder, "bfloat16", decode)["alone"] for decode in ("megakernel", "layers"))
    pairs = list(zip(ours.token_ids(), theirs.token_ids()))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert same >= 2
    assert np.allclose(logprobs_of(ours)[:same], logprobs_of(theirs)[:same], atol=5e-2)


def test_a_step_is_three_kernels(tmp_path: Path) -> None:
    engine = new_engine(write_model(tmp_path, load_golden("llama_tied_gqa4")), "emulated:sm_80", dtype="float32",
                        decode="megakernel")  # fmt: skip
    for i in range(2):
        engine.add(request("one", range(3, 9), max_tokens=3, ignore_eos=True))
        run_to_end(engine)
        for name in ("two", "three")[: 2 * i]:
            engine.add(request(name, range(3, 9), max_tokens=3, ignore_eos=True))
        run_to_end(engine)
    graphs = engine.executor.graphs.recorded()  # type: ignore[attr-defined]
    names = [[kernel.specialisation.name.split("_")[0] for kernel in graph.kernels] for graph in graphs]
    assert sorted(names, key=len)[0] == ["decode", "megakernel", "sampling"]
    assert len(names) == 2
    assert "megakernel" not in sorted(names, key=len)[1], "two sequences go layer by layer"
    engine.close()


@pytest.mark.parametrize(
    ("golden", "dtype", "why"),
    [
        ("llama_linear_gqa2", "float32", "LlamaModel has biases"),
        ("mistral_window", "float32", "windows"),
        ("gpt2_gelu_new", "float32", "is no decoder of Llama's kind"),
        ("gemma2_odd", "float32", "is no decoder of Llama's kind"),
        ("llama_tied_gqa4", "bfloat16", "inner is 100, must be a multiple of 8"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, golden: str, dtype: str, why: str) -> None:
    folder = write_model(tmp_path, load_golden(golden))
    with pytest.raises(InvalidArgumentError, match=f"decode is 'megakernel': .*{why}"):
        new_engine(folder, "emulated:sm_80", dtype=dtype, decode="megakernel")


def test_a_cpu_and_other_modes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="needs a GPU"):
        new_engine(write_model(tmp_path, load_golden("llama_default")), "cpu", decode="megakernel")
    settings: list[dict[str, Any]] = [{"exact": True}, {"decode_graphs": "off"}]
    for each in settings:
        with pytest.raises(RequestError, match="decode is 'megakernel'"):
            make_engine(decode="megakernel", **each)
    with pytest.raises(RequestError, match="decode"):
        make_engine(decode="graphs")  # type: ignore[arg-type]


@pytest.mark.exhaustive
@pytest.mark.planted
def test_a_grid_that_does_not_run_at_once_is_refused() -> None:
    gpu = new_gpu("sm_90a")
    launch = megakernel.plan(
        hidden=64, inner=64, num_q_heads=4, num_kv_heads=1, head_dim=16, block_size=8, vocabulary=97, dtype="f32",
        num_sms=gpu.properties.num_sms, capability=90,
    )  # fmt: skip
    assert launch.grid[0] <= gpu.properties.num_sms
    with pytest.raises(DeviceError, match="cooperative grid of 5000 blocks"):
        gpu.launch(replace(launch, grid=(5000, 1, 1)), *(0,) * 18, *(1,) * 6, 1e-6, 1.0)
