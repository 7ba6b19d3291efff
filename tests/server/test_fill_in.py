"""`suffix` of `/v1/completions`: the text between two others, with the tokens of the model's family."""

from __future__ import annotations

import json
import tempfile
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


def test_infill_is_llama_cpps(coder: Served) -> None:
    asked = {
        "input_prefix": "def ", "prompt": "f(", "input_suffix": "):", "n_predict": 50, "cache_prompt": True,
        "t_max_prompt_ms": 500, "samplers": ["top_k"],
    }  # fmt: skip
    answer = coder.http.post("/infill", json=asked)
    assert answer.status_code == 200, answer.text
    assert coder.engine.requests[-1].prompt_token_ids == [259, *b"def f(", 260, *b"):", 261]
    told = answer.json()
    assert (told["content"], told["stop"], told["stop_type"]) == ("x", True, "eos")
    assert told["tokens_evaluated"] == 11
    assert told["timings"]["predicted_n"] == told["tokens_predicted"] == 2
    assert "t_max_prompt_ms" in answer.headers["x-xserv-ignored"]
    streamed = coder.http.post("/infill", json={**asked, "stream": True}).text.removesuffix("\n\n").split("\n\n")
    pieces = [json.loads(frame.removeprefix("data: ")) for frame in streamed]
    assert "".join(piece["content"] for piece in pieces) == "x"
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_an_infill_ends_at_a_stop_string_or_a_limit(coder: Served) -> None:
    told = coder.http.post("/infill", json={"input_prefix": "a", "stop": ["x"]}).json()
    assert (told["content"], told["stop_type"], told["stopping_word"]) == ("", "word", "x")
    told = coder.http.post("/infill", json={"input_prefix": "a", "n_predict": 1}).json()
    assert (told["content"], told["stop_type"]) == ("x", "limit")


def test_infill_reads_other_files_first(coder: Served) -> None:
    files = [{"filename": "a.py", "text": "A"}, {"text": "B"}]
    asked = {"input_prefix": "x", "input_suffix": "y", "input_extra": files, "n_predict": 0}
    told = coder.http.post("/infill", json=asked).json()
    assert (told["content"], told["stop"]) == ("", True)
    assert coder.engine.requests[-1].params.max_tokens == 1
    names = [*FAMILIES[0].ends]
    separator, repository = (259 + 3 + names.index(name) for name in ("<|file_sep|>", "<|repo_name|>"))
    expected = [repository, *b"project\n", separator, *b"a.py\nA\n", separator, *b"file2\nB\n"]
    found = coder.engine.requests[-1].prompt_token_ids
    assert found == [*expected, separator, *b"current\n", 259, *b"x", 260, *b"y", 261]
    tokenizer = coder_of_code_llama()
    family = fill_in_tokens(tokenizer)
    assert family is not None
    ids = fill_in_prompt(tokenizer, family, "x", "y", files=[("a", "A"), (None, "B")])
    assert ids[1:-3] == [*b"A\n\nB\n\nx"]


def coder_of_code_llama() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return taught(Path(folder), FillInTokens("▁<PRE>", "▁<SUF>", "▁<MID>"))


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 2}, "n"), ({"echo": True}, "echo"), ({"input_prefix": 3}, "input_prefix")]
)
def test_bad_infills(coder: Served, fields: dict[str, Any], param: str) -> None:
    answer = coder.http.post("/infill", json={"input_prefix": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_infill_without_such_tokens(served: Served) -> None:
    answer = served.http.post("/infill", json={"input_prefix": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_prefix")


def test_too_long_an_infill_names_the_field_that_was_sent(coder: Served) -> None:
    for field in ("input_prefix", "prompt"):
        answer = coder.http.post("/infill", json={field: "a " * 100_000})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
