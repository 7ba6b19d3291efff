"""A recorded session of an agent, and clients that hold it over each API: they send what their programs send (system
blocks, tools, results, reasoning, all that changes from request to request) and give back the answers that they got.

The session is data of our own in the shapes of Claude Code, Codex and others; `session.json` has what its user and
tools said and what its model answered. `Recorded` is a server on a real engine that samples those answers."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from runtime.engine.open_requests import OpenRequests
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.text.load import load_tokenizer
from server.app import create_app
from tests.server.running import running
from tests.waiting import TIMEOUT_S
from tokenizer import Tokenizer

Json = dict[str, Any]

SESSION: Json = json.loads((Path(__file__).parent / "session.json").read_text(encoding="utf-8"))

TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role == 'system' -%}
{{- '<|system|>' ~ message.content -}}
{%- if tools %}{{ '\n\nTools, one a line:\n<tools>' }}{% endif -%}
{%- if tools %}{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>{% endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' -}}
{%- if message.reasoning_content %}{{ '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' }}{% endif -%}
{{- message.content -}}
{%- for call in message.tool_calls -%}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif -%}
{{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<|user|><tool_response>\n' ~ message.content ~ '\n</tool_response>' -}}
{%- else -%}
{{- '<|user|>' ~ message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


TINY: dict[str, Json] = {
    "demo": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64},
    "demo_hybrid": {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2,
        "num_key_value_heads": 1, "linear_num_value_heads": 2, "linear_num_key_heads": 1, "hidden_size": 64,
    },
}  # fmt: skip
"""Fields of smaller models with the bundled models' tokenizer, by name; their weights are random."""


def answer_text(answer: Json) -> str:
    """An answer as the model writes it."""
    thought = f"<think>\n{answer['reasoning']}\n</think>\n\n" if "reasoning" in answer else ""
    calls = (
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"], ensure_ascii=False)}}}'
        "\n</tool_call>"
        for call in answer["calls"]
    )
    return thought + "\n".join(part for part in (answer.get("text", ""), *calls) if part)


def messages() -> list[Json]:
    """The session as messages of a chat."""
    found: list[Json] = [{"role": "system", "content": "\n\n".join(SESSION["system"])}]
    for turn in SESSION["turns"]:
        answer = turn["answer"]
        if "user" in turn:
            found.append({"role": "user", "content": turn["user"]})
        found += ({"role": "tool", "content": result} for result in turn.get("results", ()))
        calls = [{"type": "function", "function": call} for call in answer["calls"]]
        reasoning = answer.get("reasoning", "")
        content = answer.get("text", "")
        found.append({"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls})
    return found


@dataclass
class Turn:
    """A request as the engine got it: tokens of its prompt and of its answer, and those that were reused."""

    prompt_ids: list[int]
    answer_ids: list[int]
    num_cached: int = -1


@dataclass
class Recorded:
    """A server whose model answers with `session.json`'s answers, whatever it is asked."""

    http: httpx.Client
    model: str
    tokenizer: Tokenizer
    turns: list[Turn] = field(default_factory=list)

    def reuse(self) -> tuple[int, int]:
        """Tokens of all requests but the first that were reused, and those that could have been: the prompt and the
        answer of the request before, but for its last token, which was never computed."""
        could = [len(each.prompt_ids) + len(each.answer_ids) - 1 for each in self.turns[:-1]]
        return sum(each.num_cached for each in self.turns[1:]), sum(could)


@contextmanager
def recorded(
    model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_tiny: bool,
    texts: Sequence[str] | None = None,
    **options: Any,
) -> Iterator[Recorded]:
    """A server on a bundled model, or a tiny one of its class, with the session's chat template, that answers with
    these texts, or the session's; `folder` takes a copy of the model."""
    own = folder / "model"
    shutil.copytree(model, own, ignore=shutil.ignore_patterns("drafter", "__pycache__"))
    (own / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = load_tokenizer(own)
    assert tokenizer is not None
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None
    texts = texts or [answer_text(turn["answer"]) for turn in SESSION["turns"]]
    scripts = [[*tokenizer.encode(text), end] for text in texts]
    turns: list[Turn] = []

    def append(self: OpenRequests, assembled: Any, sampled: Any, *args: Any) -> None:
        for place, sequence in enumerate(assembled.sampling_sequences):
            sampled.token_ids[place] = turns[-1].answer_ids[sequence.num_output_tokens]
        plain(self, assembled, sampled, *args)

    plain = OpenRequests.append
    monkeypatch.setattr(OpenRequests, "append", append)
    fields = {"max_position_embeddings": 32768, **(TINY[model.name] if is_tiny else {})}
    settings = {"hf_overrides": fields, "load_format": "dummy" if is_tiny else "auto", "speculation": "off", **options}
    client = ThreadEngineClient(build_engine(own, seed=0, **settings))
    submit = client.submit

    def noted(request: EngineRequest, sink: Any) -> None:
        turns.append(Turn(request.prompt_token_ids, scripts[len(turns)]))
        submit(request, sink)

    monkeypatch.setattr(client, "submit", noted)
    try:
        with (
            running(create_app(client, tokenizer)) as url,
            httpx.Client(base_url=url, timeout=TIMEOUT_S) as http,
        ):
            yield Recorded(http, client.info.model_name, tokenizer, turns)
    finally:
        client.close()


def _post(server: Recorded, path: str, body: Json) -> Json:
    response = server.http.post(path, json={"model": server.model, "temperature": 1.0, **body})
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def _schema(tool: Json) -> Json:
    return {"type": "function", "function": tool}


def hold_chat(server: Recorded) -> None:
    """OpenAI's chat completions, as Cline and opencode use them."""
    history: list[Json] = [{"role": "system", "content": "\n\n".join([*SESSION["system"], SESSION["environment"]])}]
    call_ids: list[str] = []
    for turn in SESSION["turns"]:
        if "user" in turn:
            history.append({"role": "user", "content": [{"type": "text", "text": turn["user"]}]})
        else:
            history += (
                {"role": "tool", "tool_call_id": call_id, "content": result}
                for call_id, result in zip(call_ids, turn["results"], strict=True)
            )
        body = {"messages": history, "tools": list(map(_schema, SESSION["tools"])), "max_tokens": 4096}
        answer = _post(server, "/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        call_ids = [call["id"] for call in message.get("tool_calls") or ()]
        assert len(call_ids) == len(turn["answer"]["calls"])
        history.append({name: value for name, value in message.items() if value is not None})
        server.turns[-1].num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def hold_responses(server: Recorded) -> None:
    """Codex: nothing is stored, and each request has the whole conversation, reasoning included."""
    items: list[Json] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": SESSION["system"][1]}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": SESSION["environment"]}]},
    ]
    call_ids: list[str] = []
    for number, turn in enumerate(SESSION["turns"]):
        if "user" in turn:
            content = [{"type": "input_text", "text": turn["user"]}]
            items.append({"type": "message", "role": "user", "content": content})
        else:
            items += (
                {"type": "function_call_output", "call_id": call_id, "output": result}
                for call_id, result in zip(call_ids, turn["results"], strict=True)
            )
        body = {
            "instructions": SESSION["system"][0], "input": items, "store": False, "parallel_tool_calls": True,
            "tools": [{"type": "function", **tool, "strict": False} for tool in SESSION["tools"]],
            "tool_choice": "auto", "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-session",
            "client_metadata": {"turn": str(number)},
        }  # fmt: skip
        answer = _post(server, "/v1/responses", body)
        call_ids = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        assert len(call_ids) == len(turn["answer"]["calls"])
        items += answer["output"]
        server.turns[-1].num_cached = answer["usage"]["input_tokens_details"]["cached_tokens"]


def hold_messages(server: Recorded) -> None:
    """Claude Code: a billing line that differs in each request, system blocks, marks of what to cache that move on,
    reminders beside results, thinking given back."""
    rng = random.Random(0)
    history: list[Json] = []
    call_ids: list[str] = []
    mark = {"cache_control": {"type": "ephemeral"}}
    for turn in SESSION["turns"]:
        if "user" in turn:
            content: list[Json] = [{"type": "text", "text": turn["user"]}]
            if not history:
                content.insert(
                    0, {"type": "text", "text": f"<system-reminder>\n{SESSION['environment']}\n</system-reminder>"}
                )
        else:
            content = [
                {"type": "tool_result", "tool_use_id": call_id, "content": result}
                for call_id, result in zip(call_ids, turn["results"], strict=True)
            ]
        history.append({"role": "user", "content": content})
        sent = [*history[:-1], {"role": "user", "content": [*content[:-1], {**content[-1], **mark}]}]
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1.197.a1b; cc_entrypoint=cli; cch={rng.randrange(1 << 20):05x};"
        )
        system = [{"type": "text", "text": text} for text in (billing, *SESSION["system"])]
        body = {
            "system": [*system[:-1], {**system[-1], **mark}], "messages": sent, "max_tokens": 4096,
            "tools": [
                {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                for tool in SESSION["tools"]
            ],
            "metadata": {"user_id": f"user_{rng.randrange(10):x}"},
            "thinking": {"type": "enabled", "budget_tokens": 2048},
        }  # fmt: skip
        answer = _post(server, "/v1/messages", body)
        call_ids = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        assert len(call_ids) == len(turn["answer"]["calls"])
        history.append({"role": "assistant", "content": answer["content"]})
        server.turns[-1].num_cached = answer["usage"]["cache_read_input_tokens"]


def hold_ollama(server: Recorded) -> None:
    """Ollama's chat, whose calls have no ids and objects of arguments."""
    history: list[Json] = [{"role": "system", "content": "\n\n".join([*SESSION["system"], SESSION["environment"]])}]
    names: list[str] = []
    for turn in SESSION["turns"]:
        if "user" in turn:
            history.append({"role": "user", "content": turn["user"]})
        else:
            history += (
                {"role": "tool", "tool_name": name, "content": result}
                for name, result in zip(names, turn["results"], strict=True)
            )
        body = {"messages": history, "tools": list(map(_schema, SESSION["tools"])), "stream": False, "think": True}
        body["options"] = {"num_predict": 4096}
        response = server.http.post("/api/chat", json={"model": server.model, **body})
        assert response.status_code == 200, response.text
        answer = response.json()
        names = [call["function"]["name"] for call in answer["message"].get("tool_calls") or ()]
        assert names == [call["name"] for call in turn["answer"]["calls"]]
        history.append(answer["message"])
        server.turns[-1].num_cached = answer["prompt_eval_cached"]


PROGRAMS = {
    name: json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("claude", "codex", "aider", "opencode", "cline")
}
"""What programs sent, by `tests.clients.record_agents`: their requests, texts without sense, and the answers."""


def send_recorded(server: Recorded, program: Json) -> None:
    """Sends a program's requests, with the ids of this server's calls in place of those that it was given."""
    parts, ids = program["parts"], dict[str, str]()
    sent: set[str] = set()
    for asked in program["requests"]:
        body = {**parts[asked["body"]], "model": server.model, "stream": False, "temperature": 1.0}
        body |= {key: [parts[place] for place in asked[key]] for key in ("messages", "input") if key in asked}
        body.pop("stream_options", None)
        text = json.dumps(body)
        sent |= (found := set(re.findall(r'"((?:toolu|call)_\d{4})"', text)))
        assert found <= ids.keys(), "a call that no answer had"
        for known, new in ids.items():
            text = text.replace(f'"{known}"', f'"{new}"')
        response = server.http.post(asked["path"], content=text, headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text
        answer = response.json()
        own = re.findall(r'"((?:toolu|call)_[0-9a-z]+)"', response.text)
        ids |= dict(zip(_next_ids(program, sent), dict.fromkeys(own)))
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        server.turns[-1].num_cached = usage.get("cache_read_input_tokens", details.get("cached_tokens"))


def _next_ids(program: Json, sent: set[str]) -> list[str]:
    """The ids of calls that the program's next request with new ones has."""
    for asked in program["requests"]:
        parts = [program["parts"][place] for key in ("messages", "input") for place in asked.get(key, ())]
        found = dict.fromkeys(re.findall(r'"((?:toolu|call)_\d{4})"', json.dumps(parts)))
        if new := [each for each in found if each not in sent]:
            return new
    return []


CLIENTS = {"chat": hold_chat, "responses": hold_responses, "messages": hold_messages, "ollama": hold_ollama}
