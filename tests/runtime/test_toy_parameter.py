"""The recipe of docs/examples for a sampling parameter: its text alone, applied to a copy of the code, makes one that
users can give in every way and that both devices obey."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime import recipes

USERS = """
from msgspec.json import decode
from typer.testing import CliRunner
from models.configuration.generation_config import load_generation_config
from runtime.cli import app
from runtime.commands.options import SamplingOptions
from runtime.commands.chat_session import run_slash
from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import SamplingParams
from server.description.openapi import description
from server.openai_api.schema import ChatCompletionRequest, CompletionRequest
from server.requests.sampling import chat_params, completion_params
from server.responses_api.request import chat_request
from server.responses_api.schema import ResponsesRequest

assert SamplingParams().max_gap == 0.0
for value, words in ((-1, "must be finite, at least 0.0 and at most 10000.0"), ("1", "must be a number")):
    try:
        SamplingParams(max_gap=value)
        raise AssertionError(value)
    except RequestError as error:
        assert error.param == "max_gap" and f"max_gap {words}" in str(error), error

bounds = {"anyOf": [{"type": "number", "minimum": 0.0, "maximum": 1e4}, {"type": "null"}], "default": None}
schemas = description("m", 100, reads_images=False)["components"]["schemas"]
chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_gap": 0.5}
completion = {"model": "m", "prompt": "a", "max_gap": 0.5}
for kind in ("ChatCompletionRequest", "CompletionRequest", "ResponsesRequest"):
    assert schemas[kind]["properties"]["max_gap"] == bounds
greedy = {"temperature": 0.0}  # recommended; who names how to draw means a draw
for params in (
    chat_params(decode(json.dumps(chat), type=ChatCompletionRequest), greedy, None),
    completion_params(decode(json.dumps(completion), type=CompletionRequest), greedy, None),
):
    assert (params.max_gap, params.temperature) == (0.5, 1.0)
response = decode(json.dumps({"model": "m", "input": "a", "max_gap": 0.5}), type=ResponsesRequest)
assert chat_request(response, [], []).max_gap == 0.5

for command in ("generate", "chat"):
    shown = " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"]).output.split())
    assert "--max-gap <float> Most that a kept logit lies below the largest; 0: any." in shown, shown
assert SamplingOptions(max_gap=0.5).given() == {"max_gap": 0.5}

class Session:
    given = {}
    def set_sampling(self, given):
        self.given = given

session = Session()
assert run_slash(session, "/set max-gap 0.25").text == "max_gap = 0.25"
assert session.given == {"max_gap": 0.25}

for do_sample, expected in ((True, {"max_gap": 0.5}), (False, {"temperature": 0.0})):
    with open("generation_config.json", "w") as file:
        json.dump({"max_gap": 0.5, "do_sample": do_sample}, file)
    with open("config.json", "w") as file:
        file.write("{}")
    assert load_generation_config(".").sampling == expected
"""

KERNELS = """
from runtime import ops
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor

rng = np.random.default_rng(0)
logits = rng.standard_normal((64, 100)).astype(np.float32)
params = SamplingArrays.neutral(64)
params.temperature[:], params.seed[:] = 1.0, np.arange(64)
params.max_gap[:] = np.arange(64) % 4 * 0.5
drawn = ops.sample(Tensor.from_numpy(logits).to({device!r}), params)
gaps = logits.max(axis=1) - logits[np.arange(64), drawn.token_ids]
assert drawn.ok.all()
assert (gaps <= params.max_gap)[params.max_gap > 0].all()
assert gaps[params.max_gap == 0].max() > 2.0
params.max_gap[:] = 1e-6
assert (ops.sample(Tensor.from_numpy(logits).to({device!r}), params).token_ids == logits.argmax(axis=1)).all()
"""

DECODES = """
from runtime.sampling_table import COLUMNS
from runtime.llm import LLM
from runtime.engine.sampling_params import SamplingParams

assert list(COLUMNS) == ["temperature", "top_k", "top_p", "min_p", "max_gap", *list(COLUMNS)[5:]]
with LLM(max_num_seqs=4) as llm:
    def answer(**numbers):
        return llm.generate(["Hello"], SamplingParams(max_tokens=24, seed=1, **numbers))[0].outputs[0].token_ids

    greedy = answer(temperature=0.0)
    assert answer(temperature=5.0, max_gap=1e-6) == greedy != answer(temperature=5.0)
    assert llm.client.stats().num_graph_steps > 0
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("toy_parameter")
    recipes.apply("sampling_parameter.diff", root)
    return root


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(USERS, id="users"),
        pytest.param(KERNELS.format(device="cpu"), id="cpu", marks=pytest.mark.exhaustive),  # decodes do it, too
        pytest.param(KERNELS.format(device="emulated:sm_80"), id="emulated", marks=pytest.mark.exhaustive),
        pytest.param(DECODES, id="decodes"),
    ],
)
@pytest.mark.exhaustive_cases("decodes")
def test_it_reaches(copy: Path, code: str) -> None:
    recipes.run(copy, code)
