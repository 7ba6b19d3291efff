"""The kernels that are said to be all that a model will use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Ggml

from runtime.bench.peers.workloads import Gpt2Shape, write_gpt2_folder
from tests.models.folders import load_golden, write_model, write_tiny_qwen3
from tests.models.gguf.files import write_gguf
from tests.models.gguf.test_model import CONFIG, quantised_tensors

ROOT = Path(__file__).parents[3]

_USED = """
import sys
from pathlib import Path
from numba_kernels.cpu.running import launch
made = set()
class Noted(launch.CFunction):
    def __init__(self, signature, function, *arguments, **options):
        super().__init__(signature, function, *arguments, **options)
        made.add(function.__qualname__)
launch.CFunction = Noted
from runtime import LLM, SamplingParams
folder, dtype, quantization, *formats = sys.argv[1:]
params = [
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, max_tokens=4, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1),
]
with LLM(
    folder, device="cpu", dtype=dtype, quantization=quantization, load_format="auto" if formats else "dummy",
    skip_tokenizer_init=True, kv_cache_bytes=1 << 22,
) as llm:
    llm.generate([[1, 2, 3] * 20, [4, 5]], params)
used = frozenset(made)
made.clear()
from runtime.engine.config import EngineConfig
from runtime.engine.process.compile_ahead import wanted_of_cpu
config = EngineConfig(device="cpu", dtype=dtype, quantization=quantization, load_format="auto" if formats else "dummy")
for task in wanted_of_cpu(Path(folder), config).tasks():
    factory, *arguments = task.args
    if hasattr(factory, "cache_clear"):
        factory.cache_clear()
        factory(*arguments)
assert len(used) >= 9, used
print(sorted(used - made))
"""


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("qwen3", "bfloat16", "none"),
        pytest.param("gpt2", "float16", "none", marks=pytest.mark.exhaustive),
        pytest.param("qwen3", "float32", "int8", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_a_model_uses_nothing_else(tmp_path: Path, family: str, dtype: str, quantization: str) -> None:
    if family == "qwen3":
        write_tiny_qwen3(tmp_path, vocab_size=259, eos_token_id=1, max_position_embeddings=256)
    else:
        write_gpt2_folder(tmp_path, Gpt2Shape(64, 2, 2, 259, 256))
    command = [sys.executable, "-c", _USED, str(tmp_path), dtype, quantization]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_model_with_experts_uses_nothing_else(tmp_path: Path) -> None:
    write_model(folder := tmp_path / "experts", load_golden("qwen2_moe_shared"), "BF16")
    command = [sys.executable, "-c", _USED, str(folder), "bfloat16", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("golden", ["qwen3_5_odd", pytest.param("lfm2_odd", marks=pytest.mark.exhaustive)])
def test_a_model_with_states_uses_nothing_else(tmp_path: Path, golden: str) -> None:
    write_model(tmp_path, load_golden(golden), "F32")
    command = [sys.executable, "-c", _USED, str(tmp_path), "float32", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_model_in_blocks_uses_nothing_else(tmp_path: Path) -> None:
    blocks, _ = quantised_tensors(lambda name: Ggml.Q4_0)
    path = write_gguf(tmp_path / "model.gguf", CONFIG, blocks, type_of=lambda name: Ggml.Q4_0)
    command = [sys.executable, "-c", _USED, str(path), "auto", "none", "Q4_0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
