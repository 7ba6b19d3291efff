"""The bundled model with recurrent states answers alone and in one batch; a conversation goes on from a state."""

from __future__ import annotations

from pathlib import Path

import pytest

import models.demo_hybrid
from runtime.engine.sampling_params import SamplingParams
from runtime.llm.llm import LLM

FOLDER = Path(models.demo_hybrid.__file__).parent
ANSWERS = {
    "What is 17 plus 25?": "42",
    "What is 8 + 5?": "13",
    "What is the capital of France?": "Paris",
    "Reverse the word cat": "tac",
}
ON_A_GPU = pytest.param("emulated:sm_90a", marks=[pytest.mark.emulator, pytest.mark.exhaustive])


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_it_answers_and_goes_on_from_its_states(device: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(FOLDER, device=device, max_model_len=256) as llm:
        conversations = [[{"role": "user", "content": question}] for question in ANSWERS]
        found = llm.chat(conversations, params, use_tqdm=False)
        texts = [output.outputs[0].text for output in found]
        assert all(answer in text for answer, text in zip(ANSWERS.values(), texts, strict=True)), texts
        second = [*conversations[0], {"role": "assistant", "content": texts[0]}, *conversations[1]]
        (output,) = llm.chat([second], params, use_tqdm=False)
        assert "13" in output.outputs[0].text
        assert (output.num_cached_tokens or 0) > len(found[0].prompt_token_ids) // 2
