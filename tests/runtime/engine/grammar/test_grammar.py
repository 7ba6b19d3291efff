"""Grammars on the bundled model: what comes is what the grammar says, cut or whole, alone or among others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.grammar.compiler import compile_grammar
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.matcher import Vocabulary
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM, RequestOutput
from tokenizer import Tokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "größe": {"type": "number", "minimum": 0.5, "maximum": 2.5},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "größe", "tags"],
    "additionalProperties": False,
}
DATE = r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d"
SUM = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/'


def schema(value: dict[str, Any]) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=16, num_blocks=512) as llm:
        yield llm


def texts(output: RequestOutput) -> list[str]:
    return [choice.text for choice in output.outputs]


def params(grammar: Grammar, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"grammar": grammar, "max_tokens": 200, "seed": 1, **fields})


def one(llm: LLM, grammar: Grammar, prompt: str = "Once upon a time", **fields: Any) -> Any:
    (output,) = llm.generate(prompt, params(grammar, **fields))
    return output.outputs[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_is_followed(llm: LLM, temperature: float) -> None:
    for seed in range(3):  # the penalty leads out of endless digits
        choice = one(llm, schema(PERSON), temperature=temperature, seed=seed, frequency_penalty=1.0)
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), PERSON)


def test_any_object(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = {i for text in '{":,}a1' for i in llm.tokenizer.encode(text, add_special_tokens=False)}
    allowed = [*ids, *llm.client.info.eos_token_ids]
    hot = {"temperature": 50.0}  # nearly anything that the grammar has
    choices = [one(llm, Grammar(kind="json_object"), seed=seed, allowed_token_ids=allowed, **hot) for seed in range(3)]
    finished = [choice for choice in choices if choice.finish_reason == "stop"]
    assert finished
    for choice in choices:
        assert choice.text.startswith("{")
    for choice in finished:
        assert isinstance(json.loads(choice.text), dict)


def test_a_regular_expression_is_matched_from_end_to_end(llm: LLM) -> None:
    for seed in range(5):
        choice = one(llm, Grammar(kind="regex", text=DATE), seed=seed)
        assert choice.finish_reason == "stop"
        assert re.fullmatch(DATE, choice.text)


@pytest.mark.parametrize("options", [["yes", "no"], ["Zürich", "東京 🎉", 'a "quote" \\ and\ta tab', "\x7f\x01"]])
def test_one_of_some_texts(llm: LLM, options: list[str]) -> None:
    grammar = Grammar(kind="choice", text=json.dumps(options))
    found = {one(llm, grammar, seed=seed, temperature=50.0).text for seed in range(8)}
    assert found <= set(options)
    assert len(found) > 1


def test_a_grammar_in_larks_notation(llm: LLM) -> None:
    for seed in range(3):
        choice = one(llm, Grammar(kind="lark", text=SUM), seed=seed, temperature=1.5)
        if choice.finish_reason == "stop":
            assert re.fullmatch(r"[0-9+()]+", choice.text)
            assert eval_sum(choice.text) >= 0


def eval_sum(text: str) -> int:
    """Of sums in brackets; raises ValueError for what is none."""
    while "(" in text:
        text, count = re.subn(r"\(([0-9]+(?:\+[0-9]+)*)\)", lambda found: str(eval_sum(found[1])), text)
        if not count:
            raise ValueError(text)
    return sum(int(part) for part in text.split("+"))


def test_a_text_that_is_cut_is_the_beginning_of_a_valid_one(llm: LLM) -> None:
    lengths = [1, 2, 3, 5, 8, 13, 21]
    jobs = [params(schema(PERSON), seed=5, max_tokens=length) for length in [*lengths, 200]]
    *cuts, whole = [output.outputs[0] for output in llm.generate(["Once upon a time"] * len(jobs), jobs)]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.text), PERSON)
    for length, cut in zip(lengths, cuts):
        assert cut.finish_reason == "length"
        assert len(cut.token_ids) == length
        assert cut.token_ids == whole.token_ids[:length]
        assert whole.text.startswith(cut.text)


def test_each_choice_has_a_place_of_its_own(llm: LLM) -> None:
    (output,) = llm.generate("Tell me", params(schema(PERSON), n=8, temperature=1.3))
    assert len(set(texts(output))) > 4
    for text in texts(output):
        jsonschema.validate(json.loads(text), PERSON)


def test_many_grammars_and_none_at_once_give_what_each_gives_alone(llm: LLM) -> None:
    choice = Grammar(kind="choice", text='["x y", "z"]')
    grammars = [schema(PERSON), Grammar(kind="regex", text=DATE), None, choice, None]
    jobs = [SamplingParams(grammar=grammar, max_tokens=40, seed=i) for i, grammar in enumerate(grammars * 2)]
    together = llm.generate(["Once"] * len(jobs), jobs)
    for job, output in zip(jobs, together):
        (alone,) = llm.generate("Once", job)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_without_an_end_of_sequence_a_complete_text_ends_the_choice(llm: LLM) -> None:
    for seed in range(5):
        choice = one(llm, Grammar(kind="choice", text='["abc", "de"]'), seed=seed, ignore_eos=True)
        assert choice.finish_reason == "stop"
        assert choice.text in ("abc", "de")


def test_a_text_that_is_complete_with_the_last_token_has_not_been_cut(llm: LLM) -> None:
    grammar = Grammar(kind="choice", text='["abc"]')
    whole = one(llm, grammar)
    choice = one(llm, grammar, max_tokens=len(whole.token_ids) - 1)
    assert (choice.text, choice.finish_reason) == ("abc", "stop")


def test_min_tokens_do_not_lengthen_a_complete_text(llm: LLM) -> None:
    choice = one(llm, Grammar(kind="choice", text='["abc"]'), min_tokens=50)
    assert (choice.text, choice.finish_reason) == ("abc", "stop")


def test_allowed_ids_and_a_grammar_hold_together(llm: LLM) -> None:
    assert llm.tokenizer is not None
    digits = [token_id for digit in "123" for token_id in llm.tokenizer.encode(digit, add_special_tokens=False)]
    choice = one(llm, Grammar(kind="regex", text="[0-9]{8}"), allowed_token_ids=digits)
    assert re.fullmatch("[123]{8}", choice.text)


def test_log_probabilities_are_those_of_all_ids(llm: LLM) -> None:
    choice = one(llm, Grammar(kind="choice", text='["abc"]'), logprobs=0)
    assert len(choice.logprobs) == len(choice.token_ids)
    assert choice.cumulative_logprob < 0.0


def test_a_grammar_without_a_tokenizer_is_refused() -> None:
    with LLM(skip_tokenizer_init=True, num_blocks=8) as llm, pytest.raises(RequestError, match="no tokenizer"):
        llm.generate([1, 2, 3], SamplingParams(grammar=Grammar(kind="json_object"), detokenize=False))


def test_a_bad_grammar_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.client.stats().num_requests
    with pytest.raises(RequestError) as error:
        llm.generate(["a", "b"], [SamplingParams(), params(Grammar(kind="regex", text="(["))])
    assert error.value.param == "grammar"
    assert llm.client.stats().num_requests == before


def test_no_vocabulary_is_built_without_a_grammar() -> None:
    with LLM(num_blocks=32) as fresh:
        fresh.generate("Hello", SamplingParams(max_tokens=2))
        engine: Engine = fresh.client._engine  # type: ignore[attr-defined]
        assert engine.vocabulary is not None
        assert engine.vocabulary._vocabulary is None


@pytest.mark.parametrize(
    "value", ["hello\x00there", "\x1f\x7f", "a\nb\t", "\u2028é😀", {"a\x01": ["\x02", 0.1, 2**53, None, -1.5]}, 10**25]
)
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_constant_comes_as_it_is(value: Any, keyword: str, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    schema = {"properties": {"a": {keyword: value if keyword == "const" else [value]}}, "required": ["a"]}
    written = json.dumps({"a": value}, ensure_ascii=False).replace("\x7f", "\\u007f")
    for text, is_taken in (
        (written, True),
        ('{"a": "hellothere"}', False),
        (f'{written[:-1]}, "\\u0061": 1}}', False),  # the key again, in another spelling
        (f'{written[:-1]}, "b": 1}}', True),
    ):
        (matcher,) = compile_grammar(Grammar(kind="json_schema", text=json.dumps(schema)), vocabulary, 1)
        ids = tokenizer.encode(text)
        assert (matcher.num_allowed(ids) == len(ids)) == is_taken, text
