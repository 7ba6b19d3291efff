"""The engine on emulated GPUs, checkers on: the same answers as on the cpu, whatever the batch and preemption."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime import LLM, SamplingParams
from runtime.device.gpu import Gpu
from runtime.engine.make_engine import build_engine
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.fakes import Collected, collect, run_to_end
from tests.runtime.engine.test_real_models import check_logprobs, check_same, hundred_requests

ROOT = Path(__file__).parents[3]
MODELS = ROOT.parent / "shared" / "data" / "models"
DEVICES = ("emulated:sm_80", "emulated:sm_90a")

pytestmark = pytest.mark.emulator


@pytest.mark.exhaustive  # test_gpu_swapping and test_fuzz hold answers against the cpu's each time
@pytest.mark.parametrize("device", DEVICES)
def test_the_demo_model_answers_as_on_the_cpu(device: str) -> None:
    questions = ["What is 17 plus 25?", "What is 81 minus 36?", "Hello!"]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
    answers = {}
    for where in ("cpu", device):
        with LLM(device=where, dtype="float32", max_model_len=256, kv_cache_bytes=1 << 22, compile_ahead=False) as llm:
            outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
            answers[where] = [output.outputs[0] for output in outputs]
    assert answers[device][0].text.strip() == "42"
    assert answers[device][1].text.strip() == "45"
    for ours, theirs in zip(answers[device], answers["cpu"], strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        for mine, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert mine.keys() == other.keys()
            for token, logprob in mine.items():
                assert logprob.logprob == pytest.approx(other[token].logprob, abs=1e-3)


@pytest.mark.parametrize("device", [DEVICES[1], pytest.param(DEVICES[0], marks=pytest.mark.exhaustive)])
@pytest.mark.skipif(not MODELS.is_dir(), reason="needs ../shared/data/models")
@pytest.mark.exhaustive
def test_stories260k_continues_as_transformers_does(device: str) -> None:
    runs = json.loads((MODELS / "expected.json").read_text())["stories260K"]["greedy"][:2]
    with LLM(
        str(MODELS / "stories260K"), device=device, skip_tokenizer_init=True, max_num_batched_tokens=7,
        kv_cache_bytes=1 << 22, compile_ahead=False,
    ) as llm:  # fmt: skip
        params = [
            SamplingParams(temperature=0.0, max_tokens=min(40, len(run["output_ids"])), ignore_eos=True) for run in runs
        ]
        outputs = llm.generate([run["prompt_ids"] for run in runs], params)
        for run, output in zip(runs, outputs, strict=True):
            chosen = output.outputs[0].token_ids
            assert chosen == run["output_ids"][: len(chosen)]
        path = MODELS / "stories260K" / "golden_logits_0.npy"
        if path.exists():
            theirs = np.load(path)[:24]
            ids = (runs[0]["prompt_ids"] + runs[0]["output_ids"])[: len(theirs)]
            ours = llm.logits(ids)
            assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.exhaustive  # `test_fuzz` does the like each time
def test_a_hundred_requests_equal_their_lone_runs_on_the_cpu(tmp_path: Path) -> None:
    rng = random.Random(1)
    folder = write_model(tmp_path, load_golden("qwen3_tied_gqa4"))
    options = {"dtype": "float32", "max_model_len": 64, "block_size": 8, "seed": 0}
    device = DEVICES[0]
    engine = build_engine(folder, device=device, num_blocks=16, max_num_seqs=16, max_num_batched_tokens=64, **options)
    requests = hundred_requests(rng, 64, engine.info.vocab_size)
    results: dict[str, Collected] = {}
    arriving = list(requests)
    while arriving or engine.has_work:
        for _ in range(min(len(arriving), rng.choice([0, 1, 3]))):
            engine.add(arriving.pop(0))
        collect(engine.step(), results)
        engine.check_invariants()
    assert engine.scheduler.num_preemptions > 10
    lone = build_engine(folder, device="cpu", num_blocks=16, max_num_seqs=2, **options)
    num_near_ties = 0
    for each in requests:
        lone.add(each)
        expected = run_to_end(lone)[each.request_id]
        for index in range(each.params.n):
            ours = results[each.request_id]
            num_near_ties += check_same(lone, each, ours.token_ids(index), expected.token_ids(index))
            if ours.token_ids(index) == expected.token_ids(index):
                assert ours.finish_reason(index) == expected.finish_reason(index)
                check_logprobs(ours, expected, index)
    assert num_near_ties <= 3
    Gpu.of(device).allocator.check_integrity()


@pytest.mark.exhaustive  # tests/models/test_goldens_tiers.py does it each time
@pytest.mark.parametrize("gemm", ["naive", "tiled", "register", "tensor_core", "hopper"])
def test_every_tier_of_the_matrix_product_gives_the_answer(tmp_path: Path, gemm: str) -> None:
    golden = load_golden("llama_default")
    is_narrow = gemm in ("tensor_core", "hopper")
    folder = write_model(tmp_path, golden, "BF16" if is_narrow else "F32")
    with LLM(
        folder, device=DEVICES[1], gemm=gemm, skip_tokenizer_init=True, kv_cache_bytes=1 << 22, compile_ahead=False
    ) as llm:
        ours = llm.logits(golden.prompt_ids)
    theirs = golden.logits["bfloat16" if is_narrow else "float32"]
    assert np.abs(ours - theirs).max() <= (2e-2 if is_narrow else 1e-4) * np.abs(theirs).max()


@pytest.mark.exhaustive  # tests/runtime/test_ops.py does it each time, without an engine
@pytest.mark.planted
def test_a_second_start_compiles_no_kernel(tmp_path: Path) -> None:
    """The first process fills the cache of kernels; in the second, compiling would be an error."""
    script = (
        "import sys\n"
        "from runtime import LLM, SamplingParams\n"
        "if sys.argv[1] == 'second':\n"
        "    from runtime.device import kernel_cache\n"
        "    def refuse(*arguments):\n"
        "        raise RuntimeError(f'compiles {arguments}')\n"
        "    import numba_kernels.cuda.compile as compiler\n"
        "    compiler.ptx_of = compiler.llvm_ir = refuse\n"
        "with LLM(device='emulated:sm_80', max_model_len=128, kv_cache_bytes=1 << 22, compile_ahead=False) as llm:\n"
        "    params = SamplingParams(temperature=0.0, max_tokens=4)\n"
        "    print(llm.chat([{'role': 'user', 'content': 'What is 17 plus 25?'}], params)[0].outputs[0].text)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for start in ("first", "second"):
        command = [sys.executable, "-c", script, start]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
        assert result.returncode == 0, result.stderr[-2000:]
        assert result.stdout.strip() == "42"
