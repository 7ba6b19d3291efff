"""vLLM's names: what its users write works here, and a misspelt option is answered with the nearest name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from runtime.engine.errors import ContextLengthExceededError, RequestError, UnknownOptionError
from tests.runtime.llm.test_llm import write_folder
from tests.runtime.text.tokenizers import SPECIAL


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_folder(tmp_path_factory.mktemp("models") / "tiny"), load_format="dummy", device="cpu") as llm:
        yield llm


def test_sampling_params_by_name(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    (named,) = llm.generate(prompts=["abc"], sampling_params=params, use_tqdm=False)
    assert named.outputs[0].token_ids == llm.generate("abc", params)[0].outputs[0].token_ids
    assert named.finished
    assert named.outputs[0].finished()
    messages = [{"role": "user", "content": "abc"}]
    (answer,) = llm.chat(messages, sampling_params=params, chat_template_kwargs={"unused": 1})
    assert len(answer.outputs[0].token_ids) == 4


def test_truncate_prompt_tokens(llm: LLM) -> None:
    """As vLLM's: the last tokens, cut before lengths are checked; what was computed is what is told."""
    room = llm.client.info.max_model_len
    ids = [5 + i % 90 for i in range(room + 50)]
    for most, max_tokens, kept in ((3, 2, 3), (room + 9, 2, None), (-1, 2, room - 2), (-1, None, room - 1)):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, truncate_prompt_tokens=most, prompt_logprobs=0)
        if kept is None:
            with pytest.raises(ContextLengthExceededError):
                llm.generate([ids], params, use_tqdm=False)
            continue
        (output,) = llm.generate([ids], params, use_tqdm=False)
        assert output.prompt_token_ids == ids[-kept:]
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == kept
    short = SamplingParams(temperature=0.0, max_tokens=1, truncate_prompt_tokens=99)
    assert llm.generate([[5, 6]], short)[0].prompt_token_ids == [5, 6]
    for wrong in (0, -2, 1.5, True):
        with pytest.raises(RequestError, match="truncate_prompt_tokens must be"):
            SamplingParams(truncate_prompt_tokens=wrong)  # type: ignore[arg-type]


def test_kv_cache_memory_bytes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    sizes = []
    for name in ("kv_cache_memory_bytes", "kv_cache_bytes"):
        options: dict[str, Any] = {name: 1 << 20, "load_format": "dummy", "device": "cpu", "compile_ahead": False}
        with LLM(folder, **options) as made:
            sizes.append(made.client.info.kv_cache_bytes)
    assert sizes[0] == sizes[1] <= 1 << 20
    with pytest.raises(RequestError, match="but kv_cache_bytes is"):
        LLM(folder, kv_cache_memory_bytes=1 << 20, kv_cache_bytes=1 << 21)


def test_engine_args(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    with LLM.from_engine_args(EngineArgs(model=folder, load_format="dummy", device="cpu", max_model_len=77)) as made:
        assert made.client.info.max_model_len == 77
    arguments = AsyncEngineArgs(folder, max_model_length=77)
    with pytest.raises(UnknownOptionError, match=r"AsyncLLM has .* mean 'max_model_len'"):
        AsyncLLM.from_engine_args(arguments)


def test_a_users_text_writes_no_turn_of_others(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (eos,) = llm.client.info.eos_token_ids
    messages = [{"role": "user", "content": f"a{SPECIAL}b"}]
    plain = llm.chat_prompt([{"role": "user", "content": "ab"}]).count(eos)
    ids = llm.chat_prompt(messages)
    assert ids.count(eos) == plain
    assert f"a{SPECIAL}b" in tokenizer.decode(ids)
    assert llm.chat_prompt(messages, special_tokens_in_content="parse").count(eos) == plain + 1


def test_tools_are_told_as_the_server_tells_them(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "add_up", "parameters": {"type": "object", "properties": {}}}}
    text = llm.get_tokenizer().decode(llm.chat_prompt([{"role": "user", "content": "Hello"}], tools=[tool]))
    assert "add_up" in text
    assert "<tool_call>" in text


def test_the_tokenizer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("some text")) == "some text"


@pytest.mark.parametrize(
    ("misspelt", "words"),
    [
        (lambda llm: SamplingParams(temprature=0), "SamplingParams has .* 'temprature'; did you mean 'temperature'"),
        (lambda llm: SamplingParams(quux=0), "SamplingParams has no option 'quux'$"),
        (lambda llm: StructuredOutputsParams(regexp="a"), "did you mean 'regex'"),
        (lambda llm: LLM(max_model_length=4), "LLM has no option 'max_model_length'; did you mean 'max_model_len'"),
        (lambda llm: LLM(chat_templat="x"), "did you mean 'chat_template'"),
        (lambda llm: llm.generate("a", sampling_parms=None), "LLM.generate has no option .* mean 'sampling_params'"),
        (lambda llm: llm.chat([], use_tdqm=False), "LLM.chat has no option 'use_tdqm'; did you mean 'use_tqdm'"),
        (lambda llm: llm.generate({"prompt": "a", "cache_sal": "x"}), "a prompt has no option .* mean 'cache_salt'"),
        (lambda llm: llm.embed("a", poolin="mean"), "did you mean 'pooling'"),
        (lambda llm: llm.stream("a", answer_fromat=None), "did you mean 'answer_format'"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(llm: LLM, misspelt: Any, words: str) -> None:
    with pytest.raises(UnknownOptionError, match=words) as caught:
        misspelt(llm)
    assert isinstance(caught.value, TypeError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "is_right"),
    [
        ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdecimal()),
        (
            {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                      "additionalProperties": False}},
            lambda text: isinstance(json.loads(text)["a"], bool),
        ),
        ({"json": '{"enum": [1, 2]}'}, lambda text: json.loads(text) in (1, 2)),
        ({"grammar": 'start: "x" "y"'}, lambda text: text == "xy"),
        ({"json_object": True}, lambda text: text.startswith("{")),
    ],
)  # fmt: skip
def test_structured_outputs(llm: LLM, wanted: dict[str, Any], is_right: Any) -> None:
    params = SamplingParams(max_tokens=40, seed=1, structured_outputs=StructuredOutputsParams(**wanted))
    assert params.structured_outputs is None
    assert params.grammar is not None
    (output,) = llm.generate("abc", params)
    assert is_right(output.outputs[0].text), output.outputs[0].text


@pytest.mark.parametrize(
    "wanted",
    [
        {}, {"regex": "a", "choice": ["b"]}, {"choice": "red"}, {"choice": [1]}, {"regex": 1}, {"grammar": []},
        {"json": 1}, {"json_object": False},
    ],
)  # fmt: skip
def test_bad_structures_are_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**wanted)
    field = next(iter(wanted)) if len(wanted) == 1 else ""
    assert caught.value.param == f"structured_outputs.{field}".rstrip(".")
    with pytest.raises(RequestError, match="one of them"):
        SamplingParams(
            grammar=SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")).grammar,
            structured_outputs=StructuredOutputsParams(regex="a"),
        )


def test_bad_words_as_texts(llm: LLM) -> None:
    """What would come first is forbidden, and does not come; nor does its token behind a space."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    tokenizer = llm.get_tokenizer()
    usual = llm.generate("abc", params)[0].outputs[0]
    words = [tokenizer.decode([token_id]) for token_id in usual.token_ids]
    word = next(word for word in words if word.strip() and "\ufffd" not in word)
    banned = tokenizer.encode(word.lstrip(" "), add_special_tokens=False)
    changed = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=8, bad_words=[word]))[0].outputs[0]
    if len(banned) == 1:
        assert banned[0] not in changed.token_ids
    assert changed.token_ids != usual.token_ids or word != word.lstrip(" ")
    with pytest.raises(RequestError, match="more than spaces") as caught:
        llm.generate("abc", SamplingParams(bad_words=["a", "  "]))
    assert caught.value.param == "bad_words[1]"


def test_bad_words_need_a_tokenizer(tmp_path: Path) -> None:
    with (
        LLM(write_folder(tmp_path / "tiny"), load_format="dummy", skip_tokenizer_init=True, device="cpu") as llm,
        pytest.raises(RequestError, match="no tokenizer"),
    ):
        llm.generate([[1, 2]], SamplingParams(bad_words=["a"], detokenize=False))
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.get_tokenizer()


def test_embeddings(llm: LLM) -> None:
    both = llm.embed(["abc", "some other text"], use_tqdm=False)
    for prompt, found in zip(["abc", "some other text"], both):
        ids = llm.get_tokenizer().encode(prompt)
        assert (found.prompt, found.prompt_token_ids) == (prompt, ids)
        vector = np.array(found.outputs.embedding)
        assert np.linalg.norm(vector) == pytest.approx(1.0)
        raw = np.array(llm.embed(prompt, normalize=False)[0].outputs.embedding)
        np.testing.assert_allclose(raw / np.linalg.norm(raw), vector, rtol=1e-5)
        assert found.outputs.hidden_size == len(raw)
    mean = llm.embed([1, 2, 3], pooling="mean", normalize=False)[0].outputs.embedding
    assert mean != llm.embed([1, 2, 3], normalize=False)[0].outputs.embedding
    with pytest.raises(RequestError, match="pooling"):
        llm.embed("a", pooling="median")


def test_llm_gives_whole_answers_whatever_the_kind(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, output_kind=RequestOutputKind.DELTA)
    assert len(llm.generate("abc", params)[0].outputs[0].token_ids) == 6
