"""Requests of Open WebUI, by both of its ways to a server, are understood."""

from __future__ import annotations

import json
from pathlib import Path

from tests.server.conftest import faked
from tokenizer import Tokenizer

PROGRAM = json.loads((Path(__file__).parent / "recorded" / "open_webui.json").read_text(encoding="utf-8"))


def test_its_requests_are_understood(tokenizer: Tokenizer) -> None:
    """Each is answered, and its prompt has all that was said, and the tools."""
    parts, asked_for, num_tools = PROGRAM["parts"], set[tuple[str, str]](), 0
    with faked(tokenizer, model_name="scripted", max_model_len=100_000) as served:
        for asked in PROGRAM["requests"]:
            messages = [parts[place] for place in asked["messages"]]
            body = {**parts[asked["body"]], "messages": messages}
            asked_for.add((asked["path"], body["model"]))
            answer = served.http.post(asked["path"], json=body)
            assert answer.status_code == 200, answer.text
            prompt = bytes(each for each in served.engine.requests[-1].prompt_token_ids if each < 256).decode()
            for message in messages:
                assert (message["content"] or "") in prompt
            for tool in body.get("tools") or ():
                assert tool["function"]["name"] in prompt
                num_tools += 1
    assert num_tools > 0
    assert asked_for == {
        ("/v1/chat/completions", "scripted"), ("/v1/chat/completions", "scripted:latest"),
        ("/api/chat", "scripted:latest"),
    }  # fmt: skip
