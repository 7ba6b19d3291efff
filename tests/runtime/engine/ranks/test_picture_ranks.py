"""Requests with pictures on several ranks, which encode them together: answers and embeddings are one rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM

FOLDER = Path(__file__).parents[4] / "models" / "demo_vision"
CONTENT = [{"type": "image", "image": str(FOLDER / "chart.png")}, {"type": "text", "text": "Which bar is the largest?"}]
ANSWER = "The blue bar is the largest."


def asked(**settings: Any) -> tuple[str, str, list[float]]:
    """The answer, its tokens' log probabilities, and the prompt's embedding."""
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
    with LLM(str(FOLDER), max_model_len=512, **settings) as llm:
        answer = llm.chat([{"role": "user", "content": CONTENT}], params)[0]
        # The picture's place is one token in what is asked, and many in what was read.
        ids = [id for i, id in enumerate(answer.prompt_token_ids) if i == 0 or id != answer.prompt_token_ids[i - 1]]
        asked = {"prompt_token_ids": ids, "images": [CONTENT[0]["image"]]}
        embedded = llm.embed(asked, use_tqdm=False)[0].outputs.embedding
    return answer.outputs[0].text, repr(answer.outputs[0].logprobs), embedded


@pytest.mark.exhaustive  # towers on ranks are tested each time, in threads (`tests/models/vision/test_tower_ranks.py`)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_exact_mode_has_the_same_bits(num_ranks: int) -> None:
    alone = asked(device="cpu", exact=True)
    assert alone[0] == ANSWER
    assert asked(device="cpu", exact=True, tensor_parallel_size=num_ranks) == alone


@pytest.mark.exhaustive
def test_stages_of_ranks() -> None:
    found = asked(device="cpu", exact=True, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert found == asked(device="cpu", exact=True)


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_emulated_gpus() -> None:
    assert asked(device="emulated:sm_90a", tensor_parallel_size=2)[0] == ANSWER
