"""`bench overhead`: the host's share of a step."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.overhead import bench_overhead, hollow_engine, loaded_engine
from runtime.device import gpu as gpu_module


@pytest.fixture(autouse=True)
def _devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "_opened", {})


def test_every_part_is_measured() -> None:
    report = bench_overhead(batch_sizes=(3,), context_lens=(5, 200), num_steps=4)
    assert [(result["num_seqs"], result["context_len"]) for result in report["results"]] == [(3, 5), (3, 200)]
    for result in report["results"]:
        assert 0 < max(result["schedule_ms"], result["prepare_ms"], result["commit_ms"]) < result["host_p90_ms"]
        assert 0 < result["graph_host_ms"] <= result["graph_host_p90_ms"]


def test_without_the_gpu_libraries_graphs_are_left_out() -> None:
    script = """
import sys
sys.modules["cuda"] = None
from runtime.bench.scheduling.overhead import bench_overhead
(result,) = bench_overhead(batch_sizes=(2,), context_lens=(5,), num_steps=2)["results"]
print("host_ms" in result, "graph_host_ms" in result)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr


def test_every_step_is_recorded_and_draws_what_the_logits_favour() -> None:
    engine = loaded_engine(5, 40, 200, 0, "cpu")
    drawn: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            drawn.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert len(drawn) == 5
    for token_ids in drawn.values():
        assert token_ids == [1] * len(token_ids)
        assert len(token_ids) > 200
    assert engine.stats().num_graph_steps >= 200


def test_the_host_does_a_fixed_number_of_things_a_step_whatever_the_context() -> None:
    """Time is noisy on a shared machine; the bytecodes that the loop runs are not."""
    import sys

    from runtime.engine.messages import EngineRequest
    from runtime.engine.sampling_params import SamplingParams

    counts = {}
    for context_len in (64, 1024):
        engine = hollow_engine(4, context_len + 40)
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        for index in range(4):
            prompt = [index, *[2] * (context_len - 1)]
            engine.add(EngineRequest(request_id=f"{index}", prompt_token_ids=prompt, params=params))
        engine.step()
        num_lines = 0

        def count(frame: object, event: str, argument: object) -> object:
            nonlocal num_lines
            num_lines += event == "line"
            return count

        before = sys.gettrace()
        gc.collect()
        gc.disable()  # finalisers of other tests' objects are lines, too
        sys.settrace(count)
        try:
            for _ in range(16):
                engine.step()
        finally:
            sys.settrace(before)
            gc.enable()
        counts[context_len] = num_lines
    assert abs(counts[64] - counts[1024]) < 60  # 16 steps; a line for each block of 16 tokens would be 960
    assert counts[64] > 1000


def test_nonsense_is_refused() -> None:
    for arguments in ({"num_steps": 0}, {"batch_sizes": (0,)}, {"context_lens": ()}):
        with pytest.raises(BenchmarkError, match="must be positive"):
            bench_overhead(**arguments)  # type: ignore[arg-type]
