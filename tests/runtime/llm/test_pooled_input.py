"""Wrong input of `LLM.embed`, `score` and `decide`: each is told by name, with the value and the limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import runtime.llm.llm as llm_module
from runtime.engine.errors import RequestError
from runtime.llm import LLM
from tests.models.encoder_cases import write_encoder
from tests.server.real_server import serving_real

PREDICATE = {"type": "predicate", "instructions": "a"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_encoder(tmp_path_factory.mktemp("model"), "bert_pairs"), use_tqdm_on_load=False) as made:
        yield made


@pytest.mark.parametrize(
    ("call", "arguments", "fields", "problem"),
    [
        ("embed", (None,), {}, "prompts must be a text, token ids, or a list of them, got None"),
        ("embed", ([math.nan],), {}, "a prompt is a text or a list of token ids, got nan"),
        ("embed", ("a",), {"dimensions": True}, "dimensions must be an integer from 1 to 48, got True"),
        ("embed", ("a",), {"truncate_prompt_tokens": math.nan},
         "truncate_prompt_tokens must be an integer, -1 or above 0, got nan"),
        ("embed", ("a b c",), {"truncate_prompt_tokens": 1},
         "truncate_prompt_tokens is 1, and 2 tokens cannot be cut: send at least 2"),
        ("score", ("a", "b"), {"truncate_prompt_tokens": 2},
         "truncate_prompt_tokens is 2, and 3 tokens cannot be cut: send at least 3"),
        ("score", ([], []), {}, r"data_1 must be a text, or a list of one text or more, got \[\]"),
        ("score", ("a", [3]), {}, r"data_2 must be a text, or a list of one text or more, got \[3\]"),
        ("score", ("a", "fox " * 200), {}, "maximum context length is 64 tokens. The prompt has 204"),
        ("decide", (None, [PREDICATE]), {}, "inputs must be a text, a conversation, or a list of them, got None"),
        ("decide", ([3], [PREDICATE]), {}, r"inputs\[0\] must be a text or a list of messages, got \[3\]"),
        ("decide", ("a", None), {}, "questions must be a list, got NoneType"),
        ("decide", ("a", [PREDICATE]), {"refusal_threshold": "x"}, "refusal_threshold must be from 0 to 1, got 'x'"),
        ("decide", ("a", [PREDICATE]), {"refusal_threshold": True}, "refusal_threshold must be from 0 to 1, got True"),
    ],
)  # fmt: skip
def test_wrong_input(llm: LLM, call: str, arguments: Any, fields: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        getattr(llm, call)(*arguments, **fields)


def test_a_text_of_nothing_is_its_special_tokens(llm: LLM) -> None:
    assert llm.embed("")[0].prompt_token_ids == [2, 3]
    assert llm.score("", "")[0].prompt_token_ids == [2, 3, 3]
    assert llm.embed([]) == []


def test_what_cannot_be_cut_over_http(tmp_path: Path) -> None:
    with serving_real(write_encoder(tmp_path, "bert_pairs")) as real:
        for path, body in (
            ("/v1/embeddings", {"input": "a b c", "truncate_prompt_tokens": 1}),
            ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 2}),
            ("/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 2}),
        ):
            answer = real.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
            assert "cannot be cut: send at least" in answer.json()["error"]["message"]
        for path, body in (
            ("/v1/embeddings", {"input": "a b c"}), ("/rerank", {"query": "a", "documents": ["b"]}),
            ("/classify", {"input": "a"}),
        ):  # fmt: skip
            answer = real.http.post(path, json={**body, "truncate_prompt_tokens": 0})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens"), answer.text


def test_many_texts_wait_for_each_other_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the queue's room a text starts when an earlier one is done, and the bar shows that."""
    told: list[tuple[int, int]] = []
    num_started = 0

    @contextmanager
    def noted(label: str, total: int, is_wanted: bool) -> Iterator[Callable[[], None]]:
        yield lambda: told.append((num_started, total))

    def slept(seconds: float) -> None:
        raise AssertionError(f"slept for {seconds} s")

    monkeypatch.setattr(llm_module, "progress", noted)
    monkeypatch.setattr(llm_module.time, "sleep", slept)
    texts = [f"text {number}" for number in range(40)]
    with LLM(write_encoder(tmp_path, "bert"), max_waiting=4, use_tqdm_on_load=False) as llm:
        embed = llm.client.embed

        def counted(*arguments: Any) -> Any:
            nonlocal num_started
            future = embed(*arguments)
            num_started += 1
            return future

        monkeypatch.setattr(llm.client, "embed", counted)
        found = [each.outputs.embedding for each in llm.embed(texts)]
        assert [total for _, total in told] == [40] * 40
        assert told[0][0] <= 5
        assert found == [llm.embed(text)[0].outputs.embedding for text in texts]
