"""Ids to text: whatever the cut of the outputs, the deltas put together are what the whole would give."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineOutput, FinishReason, TokenLogprobs
from runtime.engine.sampling_params import SamplingParams
from runtime.text.pipeline import TextDelta, TextPipeline
from tests.runtime.text.test_stop import first_match
from tests.runtime.text.tokenizers import SPECIAL, byte_level_tokenizer, fallback_tokenizer
from tokenizer import IncrementalDecoder, Tokenizer

TOKENIZERS = {"byte level": byte_level_tokenizer, "byte fallback": fallback_tokenizer}


def outputs_of(
    ids: list[int],
    edges: list[int],
    reason: FinishReason,
    stop_reason: int | None = None,
    logprobs: bool = True,
) -> list[EngineOutput]:
    """The engine's outputs for `ids`, cut at `edges`; the last one ends the choice."""
    edges = sorted({0, len(ids), *(edge % (len(ids) + 1) for edge in edges)})
    outputs = []
    for start, end in pairwise(edges):
        is_last = end == len(ids)
        outputs.append(
            EngineOutput(
                request_id="x",
                index=0,
                new_token_ids=ids[start:end],
                num_prompt_tokens=1,
                logprobs=[entry(i) for i in ids[start:end]] if logprobs else None,
                finish_reason=reason if is_last else None,
                stop_reason=stop_reason if is_last else None,
            )
        )
    return outputs or [
        EngineOutput(request_id="x", index=0, new_token_ids=[], num_prompt_tokens=1, finish_reason=reason)
    ]


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -float(token_id), token_id + 1, [token_id], [-float(token_id)])


def run(pipeline: TextPipeline, outputs: list[EngineOutput]) -> tuple[TextDelta, list[TextDelta]]:
    """All deltas as one, and each; nothing may come after the end."""
    whole, deltas = TextDelta(logprobs=[]), []
    for output in outputs:
        was_finished = pipeline.is_finished
        delta = pipeline.push(output)
        if was_finished:
            assert delta == TextDelta()
            continue
        deltas.append(delta)
        whole.text += delta.text
        whole.token_ids += delta.token_ids
        if delta.logprobs is not None:
            assert [e.token_id for e in delta.logprobs] == delta.token_ids
            whole.logprobs += delta.logprobs  # type: ignore[operator]
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
        whole.should_cancel |= delta.should_cancel
        assert (delta.finish_reason is not None) == pipeline.is_finished
    return whole, deltas


def expected(tokenizer: Tokenizer, params: SamplingParams, prompt: list[int], ids: list[int], reason: str) -> Any:
    """Text, ids and stop string from the whole, by the decoder and a search of the text."""
    visible = ids[:-1] if reason == "stop" and not params.include_stop_str_in_output else ids

    def text_of(part: list[int], *, is_all: bool) -> str:
        decoder = IncrementalDecoder(tokenizer, prompt_ids=prompt)
        return decoder.push(part) + (decoder.flush() if is_all else "")

    whole = text_of(visible, is_all=True)
    if not params.stop_strings:
        return whole, ids, None
    floor = len(text_of(visible[: params.min_tokens], is_all=len(ids) <= params.min_tokens))
    match = first_match(whole, params.stop_strings, floor)
    if match is None:
        return whole, ids, None
    return whole[: match.end if params.include_stop_str_in_output else match.start], None, match.stop


ids_strategy = st.lists(st.integers(0, 400), max_size=30)
stops_strategy = st.lists(st.text("abcde<|>é€日 nth", min_size=1, max_size=5), max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(list(TOKENIZERS)),
    stops=stops_strategy,
    edges=st.lists(st.integers(0, 100), max_size=12),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 0, 1, 5]),
    reason=st.sampled_from(["stop", "length", "abort"]),
)
def test_any_cut_gives_the_same(
    data: st.DataObject,
    name: str,
    stops: list[str],
    edges: list[int],
    include: bool,
    min_tokens: int,
    reason: FinishReason,
) -> None:
    tokenizer = TOKENIZERS[name]()
    favourites = tokenizer.encode("the end<|é€日 bcd 😀 abc", add_special_tokens=False)
    some_id = st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(favourites)
    ids = data.draw(st.lists(some_id, max_size=25))
    prompt = data.draw(st.lists(some_id, min_size=1, max_size=4))
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None, logprobs=1
    )
    if reason == "stop" and not ids:
        reason = "length"
    got, deltas = run(TextPipeline(tokenizer, params, prompt), outputs_of(ids, edges, reason))
    text, token_ids, stop = expected(tokenizer, params, prompt, ids, reason)
    assert got.text == text
    if token_ids is not None:
        assert got.token_ids == token_ids
    assert (got.finish_reason, got.stop_reason) == (("stop", stop) if stop else (reason, None))
    one_by_one, _ = run(TextPipeline(tokenizer, params, prompt), outputs_of(ids, list(range(40)), reason))
    assert (one_by_one.text, one_by_one.token_ids, one_by_one.logprobs) == (
        got.text,
        got.token_ids,
        got.logprobs,
    )
    assert got.token_ids == ids[: len(got.token_ids)]
    # The deltas before the last hold whole tokens: their texts are those of their tokens.
    count = 0
    for delta in deltas[:-1]:
        count += len(delta.token_ids)
        assert delta.text == "" or delta.token_ids


def test_a_stop_string_over_several_tokens_is_held_back() -> None:
    tokenizer = byte_level_tokenizer()
    pipeline = TextPipeline(tokenizer, SamplingParams(stop=["<|im_start|>"], max_tokens=None), [1])
    ids = list(b"so <|im_stop<|im_start|> never")
    texts = []
    for output in outputs_of(ids, list(range(40)), "length"):
        delta = pipeline.push(output)
        texts.append(delta.text)
        if delta.finish_reason:
            break
    assert "".join(texts) == "so <|im_stop"
    assert texts[:4] == ["s", "o", " ", ""]
    assert texts[9:12] == ["", "<|im_sto", "p"]  # with "o" it cannot begin the stop string any more
    assert (delta.finish_reason, delta.stop_reason, delta.should_cancel) == ("stop", "<|im_start|>", True)
    assert delta.token_ids == list(b"<|im_start|>")


def test_a_character_over_several_tokens_comes_whole() -> None:
    pipeline = TextPipeline(byte_level_tokenizer(), SamplingParams(max_tokens=None), [1])
    deltas = [pipeline.push(output) for output in outputs_of(list("a😀b".encode()), list(range(9)), "length")]
    assert [delta.text for delta in deltas] == ["a", "", "", "", "😀", "b"]
    assert [len(delta.token_ids) for delta in deltas] == [1, 0, 0, 0, 4, 1]


def test_half_a_character_at_the_end_becomes_the_replacement() -> None:
    tokenizer = byte_level_tokenizer()
    ids = list("é😀".encode())[:-1]
    whole, _ = run(TextPipeline(tokenizer, SamplingParams(max_tokens=None), [1]), outputs_of(ids, [], "length"))
    assert whole.text == tokenizer.decode(ids) == "é\ufffd"


KEPT: dict[str, Any] = {"include_stop_str_in_output": True}


@pytest.mark.parametrize(
    ("fields", "pieces", "edges", "reason", "found"),
    [
        # a stop string inside one token; the text of a stop id; special tokens
        ({"stop": "b"}, ["x", "abc", "y"], [1, 2], "length", {"text": "xa", "num_ids": 2}),
        ({"stop": "b", **KEPT}, ["x", "abc", "y"], [1, 2], "length", {"text": "xab", "num_ids": 2}),
        ({"stop_token_ids": [33]}, [*"hi!"], [1], "stop", {"text": "hi", "stop_reason": 33, "should_cancel": False}),
        ({"stop_token_ids": [33], **KEPT}, [*"hi!"], [1], "stop",
         {"text": "hi!", "stop_reason": 33, "should_cancel": False}),
        ({"skip_special_tokens": True}, ["a", SPECIAL, "b"], [1, 2], "length", {"text": "ab"}),
        ({"skip_special_tokens": False}, ["a", SPECIAL, "b"], [1, 2], "length", {"text": f"a{SPECIAL}b"}),
        # a stop string beats the length on the same token, and none is looked for before min_tokens
        ({"stop": "!"}, [*"hi!"], [1], "length",
         {"text": "hi", "finish_reason": "stop", "stop_reason": "!", "should_cancel": False}),
        ({"stop": "b", "min_tokens": 3}, [*"abcabc"], [], "length", {"text": "abca", "num_ids": 5}),
        ({"detokenize": False}, [*"abc"], [1], "length", {"text": ""}),
        ({"stop": "zz"}, [*"abz"], [1, 2, 3], "error", {"text": "abz", "finish_reason": "error"}),
    ],
)  # fmt: skip
def test_what_becomes_text(
    fields: dict[str, Any], pieces: list[str], edges: list[int], reason: FinishReason, found: dict[str, Any]
) -> None:
    tokenizer = byte_level_tokenizer()
    ids = [tokenizer.token_to_id(piece) for piece in pieces]
    pipeline = TextPipeline(tokenizer, SamplingParams(max_tokens=None, **fields), [1])
    whole, _ = run(pipeline, outputs_of(ids, edges, reason, 33 if reason == "stop" else None))
    expected = {"num_ids": len(ids), **found}
    assert whole.token_ids == ids[: expected.pop("num_ids")]
    assert {name: getattr(whole, name) for name in expected} == expected


def test_without_a_tokenizer_ids_pass_through() -> None:
    params = SamplingParams(logprobs=0, max_tokens=None)
    whole, deltas = run(TextPipeline(None, params, [1]), outputs_of([5, 6, 7], [1, 2], "length"))
    assert (whole.text, whole.token_ids) == ("", [5, 6, 7])
    assert [delta.token_ids for delta in deltas] == [[5], [6], [7]]
    with pytest.raises(RequestError, match="tokenizer") as caught:
        TextPipeline(None, SamplingParams(stop="x"), [1])
    assert caught.value.param == "stop"


def test_a_long_answer_takes_linear_time() -> None:
    rng = random.Random(0)
    ids = [rng.choice(b"abcdefgh <|") for _ in range(50_000)]
    params = SamplingParams(stop=["<|<|<|<|<|<|<|<|<|", "abcdabcdabcdabcd"], max_tokens=None)
    whole, deltas = run(
        TextPipeline(byte_level_tokenizer(), params, [1]), outputs_of(ids, list(range(50_000)), "length")
    )
    assert whole.text == bytes(ids).decode()
    assert len(deltas) == 50_000
