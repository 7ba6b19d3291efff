"""Logits processors from end to end: transformers' own numbers, batches, preemption, drafts, grammars, failures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from runtime import LLM, LogitsKernel, SamplingParams, StructuredOutputsParams
from runtime.engine.errors import RequestError
from runtime.engine.speculation import speculator
from runtime.engine.speculation.policy import DraftPolicy
from tests.runtime.engine.logits.cases import (
    EOS,
    GOLDENS,
    MIN_TOKENS,
    MODEL,
    NUM_TOKENS,
    PENALTY,
    PROMPTS,
    ByRequest,
    repetition_penalty,
    top_k,
)

ANSWERS = json.loads(GOLDENS.read_text())["answers"]
BY_REQUEST = f"{ByRequest.__module__}:ByRequest"
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128}


def greedy(processor: str | None = None, **fields: Any) -> SamplingParams:
    args = None if processor is None else {"processor": processor}
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, extra_args=args, **fields)


def prompts() -> list[Any]:
    return [{"prompt_token_ids": ids} for ids in PROMPTS]


def answers(llm: LLM, params: Any) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(prompts(), params)]


def penalty_kernel(token, logits, prompt_ids, num_prompt, output_ids, num_output, numbers):
    seen = False
    for i in range(num_prompt):
        seen = seen or prompt_ids[i] == token
    for i in range(num_output):
        seen = seen or output_ids[i] == token
    value = logits[token]
    if seen:
        value = value * numbers[0] if value < 0 else value / numbers[0]
    return value


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, logits_processors=[BY_REQUEST], **OPTIONS) as made:
        yield made


@pytest.mark.parametrize("name", ["repetition_penalty", "min_length", "no_repeat_ngram"])
def test_as_transformers(llm: LLM, name: str) -> None:
    assert answers(llm, greedy(name)) == ANSWERS[name]
    if name != "min_length":
        assert ANSWERS[name] != ANSWERS["none"], "the processor has to change something"


def test_a_request_without_is_left_alone(llm: LLM) -> None:
    assert answers(llm, greedy()) == ANSWERS["none"]
    mixed = [greedy("repetition_penalty"), greedy(), greedy("no_repeat_ngram"), greedy("min_length")]
    names = ["repetition_penalty", "none", "no_repeat_ngram", "min_length"]
    assert answers(llm, mixed) == [ANSWERS[name][i] for i, name in enumerate(names)]


def test_several_in_their_order() -> None:
    with LLM(MODEL, logits_processors=[top_k, repetition_penalty], **OPTIONS) as llm:
        assert answers(llm, greedy()) == ANSWERS["top_k"]


def test_a_kernel() -> None:
    """It acts on requests whose numbers it gives."""

    def numbers(extra_args: dict[str, Any]) -> list[float] | None:
        return [PENALTY] if "wanted" in extra_args else None

    with LLM(MODEL, logits_processors=[LogitsKernel(penalty_kernel, numbers)], **OPTIONS) as llm:
        wanted = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, extra_args={"wanted": True})
        assert answers(llm, [wanted, greedy(), wanted, greedy()]) == [
            ANSWERS["repetition_penalty" if i % 2 == 0 else "none"][i] for i in range(4)
        ]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 2},
        {"num_blocks": 9, "max_model_len": 64, "block_size": 8},
        {"max_num_batched_tokens": 4, "max_num_seqs": 4},
        {"overlap": "on"},
        {"decode_graphs": "off"},
        {"speculation": "ngram"},
        {"speculation": "suffix", "num_blocks": 9, "max_model_len": 64, "block_size": 8},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
    ],
    ids=str,
)
def test_any_schedule(llm: LLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn tokens and their raw log probabilities are those of the plain engine, alone. Drafts are tried whether or
    not they pay."""
    monkeypatch.setattr(
        speculator, "DraftPolicy", lambda most, fixed, clock: DraftPolicy(most, fixed=True, clock=clock)
    )
    params = [
        SamplingParams(
            temperature=0.3 * (i != 2), seed=i, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True, n=2,
            extra_args={"processor": name},
        )
        for i, name in enumerate(["repetition_penalty", "no_repeat_ngram", "min_length", "top_k"])
    ]  # fmt: skip
    wanted = [
        [(choice.token_ids, choice.logprobs) for choice in llm.generate([prompt], one)[0].outputs]
        for prompt, one in zip(prompts(), params)
    ]
    with LLM(MODEL, logits_processors=[BY_REQUEST], **{**OPTIONS, **options}) as other:
        found = [[(c.token_ids, c.logprobs) for c in each.outputs] for each in other.generate(prompts(), params)]
        is_split = "tensor_parallel_size" in options
        assert [[ids for ids, _ in each] for each in found] == [[ids for ids, _ in each] for each in wanted]
        assert is_split or found == wanted
        if "num_blocks" in options:
            assert other.client.stats().num_preemptions > 0
        elif "speculation" in options:
            assert other.client.stats().num_accepted_tokens > 0


def test_prompt_logprobs_are_untouched(llm: LLM) -> None:
    plain = llm.generate(prompts(), greedy(prompt_logprobs=2))
    processed = llm.generate(prompts(), greedy("repetition_penalty", prompt_logprobs=2))
    assert [each.prompt_logprobs for each in processed] == [each.prompt_logprobs for each in plain]


def test_a_grammar_is_kept(llm: LLM) -> None:
    """The grammar's mask comes last; a processor that forbids its tokens leaves none."""
    wanted = StructuredOutputsParams(regex="(ab){3}c")
    found = llm.generate(["x"], greedy("repetition_penalty", structured_outputs=wanted))[0].outputs[0]
    assert re.fullmatch("(ab){3}c", found.text)
    penalised = llm.generate(["x"], greedy("top_k", structured_outputs=wanted))[0].outputs[0]
    assert penalised.finish_reason == "error" or re.fullmatch("(ab){3}c", penalised.text)


def test_it_acts_before_penalties(llm: LLM) -> None:
    """A bias of the request is added to what the processor leaves."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, logit_bias={EOS: 100.0}, min_tokens=0, extra_args={"processor": "top_k"}
    )
    found, plain = answers(llm, params), answers(llm, SamplingParams(temperature=0.0, max_tokens=1))
    assert found[1] == [EOS] != plain[1], "among the five best, the bias decides"
    assert found[2:] == plain[2:], "a bias does not bring back what the processor forbids"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fails_at_three", "failed: ValueError: three tokens are too many"),
        ("of_other_type", "returned float64 [640], must return float32 [640]"),
        ("of_other_shape", "returned float32 [1, 640], must return float32 [640]"),
        ("gives_nan", "returned NaN"),
        ("gives_infinity", "returned plus infinity"),
        ("forbids_all", "forbade every token"),
        ("gives_none", "returned NoneType, must return a float32 array"),
        ("writes_ids", "failed: ValueError: assignment destination is read-only"),
    ],
)
def test_a_failure_ends_its_request_alone(llm: LLM, name: str, reason: str) -> None:
    params = [greedy(), greedy(name), greedy("repetition_penalty"), greedy()]
    outputs = [each.outputs[0] for each in llm.generate(prompts(), params)]
    assert (outputs[1].finish_reason, outputs[1].error) == ("error", f"the logits processor {BY_REQUEST} {reason}")
    assert len(outputs[1].token_ids) == (3 if name == "fails_at_three" else 0)
    names = ["none", "", "repetition_penalty", "none"]
    for i in (0, 2, 3):
        assert outputs[i].token_ids == ANSWERS[names[i]][i]


def test_refused_extra_args(llm: LLM) -> None:
    output = llm.generate(prompts()[:1], greedy("no_such"))[0].outputs[0]
    assert output.finish_reason == "error"
    assert (output.error or "").startswith(
        f"extra_args: {BY_REQUEST} refuses them: ValueError: processor must be one of"
    )
    for value, problem in (
        ({1: 2}, "a dict with texts as keys"), ([1], "a dict with texts"), ({"a": object()}, "JSON's types alone"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=problem):
            SamplingParams(extra_args=value)  # type: ignore[arg-type]
    with LLM(MODEL, **OPTIONS) as plain, pytest.raises(RequestError, match="the engine has none"):
        plain.generate(prompts()[:1], greedy("top_k"))


@pytest.mark.parametrize(
    ("processors", "problem"),
    [
        ("nobody", "no entry point 'nobody' of xserv.logits_processors"),
        ("no_such_module:f", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("json:no_such", "json has no no_such"),
        ("json:__version__", "json has no|neither a function"),
        (":f", "a name is MODULE:NAME"),
        ("json:", "a name is MODULE:NAME"),
        (3, "a function, a LogitsKernel or has new_request, got 3"),
    ],
)
def test_refused_processors(processors: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        LLM(MODEL, logits_processors=[processors], **OPTIONS)
    with pytest.raises(RequestError, match="must be a list"):
        LLM(MODEL, logits_processors="json:dumps", **OPTIONS)


def test_a_class_is_made_once() -> None:
    made = []

    class Noted(ByRequest):
        def __init__(self) -> None:
            made.append(self)

    with LLM(MODEL, logits_processors=[Noted], **OPTIONS) as llm:
        assert answers(llm, greedy("repetition_penalty")) == ANSWERS["repetition_penalty"]
    assert len(made) == 1


def test_other_processes_need_names() -> None:
    with pytest.raises(RequestError, match=r"<lambda> cannot be sent to another process"):
        LLM(MODEL, logits_processors=[lambda p, o, x: x], tensor_parallel_size=2, **OPTIONS)


def test_an_entry_point(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed gives its names; what is not named does nothing."""
    info = tmp_path / "penalties-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penalties\nVersion: 1.0\n")
    module = repetition_penalty.__module__
    (info / "entry_points.txt").write_text(f"[xserv.logits_processors]\npenalty = {module}:repetition_penalty\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with LLM(MODEL, logits_processors=["penalty"], **OPTIONS) as llm:
        assert answers(llm, greedy()) == ANSWERS["repetition_penalty"]
    with LLM(MODEL, **OPTIONS) as llm:
        assert answers(llm, greedy()) == ANSWERS["none"]


def test_a_gpu_takes_kernels_alone() -> None:
    with pytest.raises(RequestError, match=r"cases:top_k computes with numpy, on the CPU alone: on emulated:sm_90a"):
        LLM(MODEL, logits_processors=[top_k], device="emulated:sm_90a")


def test_eos_is_held_back() -> None:
    """`min_length` keeps an answer going that ends without it."""

    def ends(prompt: Any, output: Any, logits: Any) -> Any:
        logits[EOS] = np.float32(50.0)
        return logits

    module = "tests.runtime.engine.logits.cases:min_length"
    with LLM(MODEL, logits_processors=[ends], **OPTIONS) as llm:
        assert {len(each) for each in answers(llm, greedy())} == {1}
    with LLM(MODEL, logits_processors=[ends, module], **OPTIONS) as llm:
        assert {len(each) for each in answers(llm, greedy())} == {MIN_TOKENS + 1}
