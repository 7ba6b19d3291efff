"""`suffix` of `/v1/completions`: the text between two others, with the tokens of the model's family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.text.fill_in import FAMILIES, FillInTokens, fill_in_prompt, fill_in_tokens
from tests.server.byte_tokenizer import END_OF_TURN, make_byte_tokenizer, write_byte_tokenizer
from tests.server.conftest import Served, say, serving
from tests.server.fake_engine import FakeEngineClient
from tokenizer import Tokenizer

ASKED: dict[str, Any] = {"model": "fake-model", "prompt": "def f(", "suffix": "):\n  return x", "max_tokens": 50}


def taught(folder: Path, family: FillInTokens) -> Tokenizer:
    """The bytes' tokenizer with the family's tokens as ids from 259 on."""
    write_byte_tokenizer(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = filter(None, (family.before, family.after, family.middle, *family.ends))
    content["added_tokens"] += [{"id": 259 + i, "content": token, **flags} for i, token in enumerate(tokens)]
    path.write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.before)
def test_each_family_has_its_tokens_and_its_order(tmp_path: Path, family: FillInTokens) -> None:
    tokenizer = taught(tmp_path, family)
    assert fill_in_tokens(tokenizer) == family
    before, after = (f"a{family.middle or family.after}b", "c")
    ids = fill_in_prompt(tokenizer, family, before, after)
    parts = [[259, *before.encode()], [260, *b"c"]]
    first, last = reversed(parts) if family.after_comes_first else parts
    assert ids == [*first, *last, *([261] if family.middle else [])], "a token's text in a file stays text"


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tokenizer = taught(tmp_path_factory.mktemp("coder"), FAMILIES[0])
    engine = FakeEngineClient(lambda request, index: [*b"x", 264, *say("more")], max_model_len=4096)
    engine.info = msgspec.structs.replace(engine.info, vocab_size=300)
    with closing(engine), serving(engine, tokenizer) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_between_two_others(coder: Served, stream: bool) -> None:
    answer = coder.http.post("/v1/completions", json={**ASKED, "stream": stream})
    assert answer.status_code == 200, answer.text
    request = coder.engine.requests[-1]
    assert request.prompt_token_ids == [259, *b"def f(", 260, *b"):\n  return x", 261]
    assert request.eos_token_ids is not None
    assert {END_OF_TURN, 262, 263, 264} <= set(request.eos_token_ids), "tokens that begin another file end the answer"


def test_several_prompts_and_an_empty_suffix(coder: Served) -> None:
    answer = coder.http.post("/v1/completions", json={**ASKED, "prompt": ["a", "b"], "suffix": ""})
    assert answer.status_code == 200, answer.text
    found = [request.prompt_token_ids for request in coder.engine.requests[-2:]]
    assert sorted(found) == [[259, *text, 260, 261] for text in (b"a", b"b")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "suffix"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_go_with_a_suffix(coder: Served, fields: dict[str, Any], param: str) -> None:
    answer = coder.http.post("/v1/completions", json={**ASKED, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_model_without_such_tokens_refuses_it(served: Served, tmp_path: Path) -> None:
    assert fill_in_tokens(make_byte_tokenizer(tmp_path)) is None
    answer = served.http.post("/v1/completions", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    assert "no tokens for filling in" in answer.json()["error"]["message"]
