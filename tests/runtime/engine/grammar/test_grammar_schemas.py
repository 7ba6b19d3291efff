"""JSON schemas of many kinds: every answer that has an end validates, by a validator that nobody here wrote, and at
least four in five have one within 512 tokens; with the bundled model and with random weights.

The bundled model was trained on a handful of tasks, and outside of them it repeats itself; a penalty on what it has
said often leads it out of endless digits. It forbids nothing, and no answer is judged more mildly for it.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, Literal

import jsonschema
import pytest

from runtime.engine.grammar.grammar import Grammar
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM
from tests.runtime.engine.schema_cases import schema_case

FORMATS = jsonschema.FormatChecker(list(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers))
"""The draft's formats, as far as they are installed; and times as Python reads them."""
FORMATS.checks("time", raises=ValueError)(lambda text: bool(datetime.time.fromisoformat(text).isoformat()))
FORMATS.checks("date-time", raises=ValueError)(lambda text: bool(datetime.datetime.fromisoformat(text)))

MAX_TOKENS = 512
LEAST_SHARE = 0.8


def answers(load_format: Literal["auto", "dummy"], seeds: range) -> tuple[int, list[str]]:
    """How many have an end, and what is wrong with any of them."""
    schemas = [schema_case(seed) for seed in seeds]
    params = [
        SamplingParams(
            grammar=Grammar(kind="json_schema", text=json.dumps(schema, ensure_ascii=seed % 2 == 0)),
            max_tokens=MAX_TOKENS, seed=seed, temperature=1.0, frequency_penalty=1.0,
        )
        for seed, schema in zip(seeds, schemas)
    ]  # fmt: skip
    with LLM(load_format=load_format, max_model_len=1024, max_num_seqs=32, num_blocks=2048) as llm:
        outputs = llm.generate(["Here is the record as JSON:\n"] * len(params), params)
    num_finished, wrong = 0, []
    for seed, schema, output in zip(seeds, schemas, outputs):
        choice = output.outputs[0]
        if choice.finish_reason == "length":
            if len(choice.token_ids) != MAX_TOKENS:
                wrong.append(f"{seed}: cut after {len(choice.token_ids)} tokens")
            continue
        num_finished += 1
        problem = problem_of(choice.text, schema) if choice.finish_reason == "stop" else f"ended with {choice.error}"
        if problem is not None:
            wrong.append(f"{seed}: {problem}\n{json.dumps(schema, ensure_ascii=False)}\n{choice.text[:2000]}")
    return num_finished, wrong


def problem_of(text: str, schema: dict[str, Any]) -> str | None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    try:
        validator.validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)[:1000]
    return None


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(300), marks=pytest.mark.exhaustive)], ids=len)
def test_every_answer_with_an_end_validates(load_format: Literal["auto", "dummy"], seeds: range) -> None:
    num_finished, wrong = answers(load_format, seeds)
    print(f"\n{load_format}: {num_finished} of {len(seeds)} schemas have an answer within {MAX_TOKENS} tokens")
    assert not wrong, "\n\n".join(wrong)
    assert num_finished >= LEAST_SHARE * len(seeds)


def test_the_cases_are_varied_and_sound() -> None:
    """Each is a schema, and together they have every keyword that is promised."""
    cases = [schema_case(seed) for seed in range(300)]
    for schema in cases[::10]:
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(cases)
    assert len({json.dumps(schema) for schema in cases}) > 290
    assert {"date", "time", "date-time", "ipv4", "ipv6", "uuid", "email"} <= FORMATS.checkers.keys()
    for keyword in (
        "properties", "required", "additionalProperties", "patternProperties", "maxProperties", "items", "prefixItems",
        "minItems", "maxItems", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "pattern", "format", "minLength",
        "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "next",
    ):  # fmt: skip
        assert f'"{keyword}"' in text
