"""Chats of folders with a tekken.json and no template: ids as `mistral_common` gives them, by version of the format
(`tools.references.make_vocabularies`)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.text.formats import AnswerFormat
from tests.tokenizer.support import FIXTURES
from tokenizer import ChatTemplateError, Tokenizer

FOLDER = FIXTURES / "vocabularies"
FOUND: dict[str, Any] = json.loads((FOLDER / "chats.json").read_text(encoding="utf-8"))
USER = {"role": "user", "content": "hi"}


def tokenizer_of(version: str, folder: Path) -> Tokenizer:
    content = json.loads((FOLDER / "tekken" / "tekken.json").read_text(encoding="utf-8"))
    content |= {"special_tokens": FOUND["special_tokens"], "config": {**content["config"], "version": version}}
    (folder / "tekken.json").write_text(json.dumps(content))
    return Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("case", FOUND["cases"], ids=lambda case: f"{case['version']} {case['name']}")
def test_ids(case: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, messages = tokenizer_of(case["version"], tmp_path), copy.deepcopy(case["messages"])
    for message in messages:
        for call in message.get("tool_calls") or ():  # as a request's are before a template sees them
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    ids = tokenizer.apply_chat_template(
        messages, tools=case["tools"], add_generation_prompt=True, special_tokens_in_content="text"
    )
    assert ids == case["ids"], tokenizer.decode(ids)


def test_pictures_have_a_place(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("v7", tmp_path)
    text, picture = {"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}
    for parts, written in (([text, picture], "[IMG]see"), ([text, picture, text], "see[IMG]see")):
        messages = [{"role": "user", "content": parts}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == f"<s>[INST]{written}[/INST]"


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_calls_are_read_in_the_notation_of_the_version(version: str, tmp_path: Path) -> None:
    found = AnswerFormat.of(tokenizer_of(version, tmp_path))
    assert found.tools is not None
    assert found.tools.name == ("mistral" if version in ("v3", "v7") else "mistral_v11")
    assert not found.tells_tools


def test_others_have_no_template(tmp_path: Path) -> None:
    assert not tokenizer_of("v99", tmp_path).has_chat_template
    (tmp_path / "chat_template.jinja").write_text("own")
    assert tokenizer_of("v3", tmp_path).apply_chat_template([USER], tokenize=False) == "own"
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ChatTemplateError, match="roles are system, user, assistant and tool, found critic"):
        tokenizer_of("v3", tmp_path).apply_chat_template([USER, {"role": "critic", "content": "no"}])
