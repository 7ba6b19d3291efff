"""The whole engine on the real device: the demo model's answers."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import LLM, SamplingParams

pytestmark = pytest.mark.gpu

QUESTIONS = ["What is 17 plus 25?", "What is 81 minus 36?", "Hello!"]


def answers(device: str, dtype: str, gemm: str = "auto", decode: str = "layers") -> list[tuple[str, list[int]]]:
    """(text, token ids) of each question's greedy answer."""
    with LLM(
        device=device, dtype=dtype, gemm=gemm, decode=decode, max_model_len=256, kv_cache_bytes=1 << 24,
        compile_ahead=False,
    ) as llm:  # fmt: skip
        outputs = llm.chat(
            [[{"role": "user", "content": question}] for question in QUESTIONS],
            SamplingParams(temperature=0.0, max_tokens=12),
            use_tqdm=False,
        )
        return [(output.outputs[0].text, list(output.outputs[0].token_ids)) for output in outputs]


@pytest.mark.parametrize("gemm", ["auto", "naive", "tiled", "register"])
def test_float32_gives_the_cpus_tokens(hardware: str, gemm: str) -> None:
    expected = answers("cpu", "float32")
    assert expected[0][0].strip() == "42"
    assert answers(hardware, "float32", gemm) == expected


@pytest.mark.parametrize("gemm", ["auto", "tensor_core", "hopper"])
def test_bfloat16_answers_42(hardware: str, gemm: str) -> None:
    assert answers(hardware, "bfloat16", gemm)[0][0].strip() == "42"


def test_logits_equal_the_cpus(hardware: str) -> None:
    logits = {}
    for device in ("cpu", hardware):
        with LLM(device=device, dtype="float32", max_model_len=256, kv_cache_bytes=1 << 24, compile_ahead=False) as llm:
            logits[device] = llm.logits(list(range(1, 101)))
    difference = np.abs(logits[hardware] - logits["cpu"]).max()
    assert difference <= 1e-4 * np.abs(logits["cpu"]).max()
