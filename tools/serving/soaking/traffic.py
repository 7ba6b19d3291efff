"""One client's mixed requests to a server of the bundled model, each answer checked."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

MODEL = "xserv-demo"
TIMEOUT_S = 120.0
MOST_SHOWN = 20

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}, "even": {"type": "boolean"}},
    "required": ["sum", "even"],
    "additionalProperties": False,
}
WRONG: list[tuple[str, dict[str, Any] | bytes, int]] = [
    ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": -1}, 400),
    ("/v1/completions", {"model": "nobody", "prompt": "x"}, 404),
    ("/v1/completions", {"model": MODEL, "prompt": "x", "no_such_field": 1}, 400),
    ("/v1/completions", b'{"model": "xserv-demo", "prompt": "x', 400),
    ("/v1/completions", {"model": MODEL, "prompt": [10**9]}, 400),
    ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x " * 9000}]}, 400),
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
        },
        400,
    ),
    ("/v1/embeddings", {"model": MODEL, "input": []}, 400),
    ("/v1/nowhere", {}, 404),
]


class Wrong(Exception):
    """An answer is not as expected."""


def expect(condition: Any, *what: Any) -> None:
    if not condition:
        raise Wrong(" ".join(str(each) for each in what)[:500])


@dataclass
class Record:
    """The events so far."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_wrong: int = 0
    tokens: int = 0


class Traffic:
    """One client's requests, chosen by `generator`."""

    def __init__(self, http: httpx.AsyncClient, port: int, generator: random.Random, record: Record) -> None:
        self.http = http
        self.port = port
        self.random = generator
        self.record = record
        self.kinds: dict[Callable[[], Awaitable[None]], int] = {
            self.chat: 4,
            self.streamed_chat: 6,
            self.completion: 4,
            self.streamed_completion: 4,
            self.tools: 3,
            self.streamed_tools: 2,
            self.by_schema: 3,
            self.embeddings: 3,
            self.responses: 2,
            self.tokens: 2,
            self.wrong: 5,
            self.leaves_stream: 4,
            self.leaves_early: 3,
            self.reads_slowly: 1,
            self.probes: 2,
        }

    async def one(self, name: str | None = None) -> None:
        """Sends one request of this kind, or of a random one by weight."""
        (kind,) = self.random.choices(list(self.kinds), list(self.kinds.values()))
        if name is not None:
            kind = getattr(self, name)
        name = kind.__name__
        self.record.counts[name] += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await kind()
        except (Wrong, jsonschema.ValidationError, httpx.HTTPError, LookupError, ValueError, OSError) as error:
            self.record.num_wrong += 1
            if len(self.record.wrong) < MOST_SHOWN:
                self.record.wrong.append(f"{name}: {type(error).__name__}: {error}")

    def question(self) -> list[dict[str, str]]:
        a, b = self.random.randrange(100), self.random.randrange(100)
        return [{"role": "user", "content": f"What is {a} + {b}?"}]

    def sampling(self) -> dict[str, Any]:
        return self.random.choice(
            [
                {"temperature": 0},
                {"temperature": 0.8, "top_p": 0.9, "seed": self.random.randrange(1 << 30)},
                {"temperature": 1.2, "top_k": 20, "presence_penalty": 0.5},
                {"temperature": 0.7, "min_p": 0.05, "stop": ["\n\n", "."]},
                {"temperature": 0.5, "logit_bias": {"5": -5}, "repetition_penalty": 1.1},
            ]
        )

    async def post(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post(path, json={"model": MODEL, **payload})
        expect(answer.status_code == 200, path, answer.status_code, answer.text)
        whole: dict[str, Any] = answer.json()
        return whole

    async def events(self, path: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """A stream's chunks; its usage must come last but for [DONE]."""
        chunks: list[dict[str, Any]] = []
        payload = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **payload}
        async with self.http.stream("POST", path, json=payload) as response:
            expect(response.status_code == 200, path, response.status_code)
            data = ""
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    if data != "[DONE]":
                        chunks.append(json.loads(data))
        expect(data == "[DONE]", path, "ended with", data)
        expect(chunks[-1]["choices"] == [] and chunks[-1]["usage"], path, "no usage", chunks[-1])
        self.count(chunks[-1]["usage"])
        return chunks

    def count(self, usage: dict[str, Any]) -> None:
        self.record.tokens += usage["completion_tokens"]
        expect(usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"], "usage", usage)

    async def chat(self) -> None:
        n = self.random.choice([1, 1, 2, 4])
        answer = await self.post(
            "/v1/chat/completions", {"messages": self.question(), "n": n, "max_tokens": 40, **self.sampling()}
        )
        self.count(answer["usage"])
        expect(sorted(choice["index"] for choice in answer["choices"]) == list(range(n)), answer["choices"])
        for choice in answer["choices"]:
            expect(choice["finish_reason"] in ("stop", "length"), choice)
            expect(choice["message"]["role"] == "assistant", choice)

    async def streamed_chat(self) -> None:
        n = self.random.choice([1, 1, 3])
        chunks = await self.events(
            "/v1/chat/completions",
            {"messages": self.question(), "n": n, "max_tokens": 60, **self.sampling()},
        )
        self.check_reasons(chunks, n)

    async def completion(self) -> None:
        prompts = [f"Item {self.random.randrange(1000)}" for _ in range(self.random.choice([1, 3]))]
        answer = await self.post(
            "/v1/completions", {"prompt": prompts, "max_tokens": 16, "logprobs": 2, "echo": self.random.random() < 0.3}
        )
        self.count(answer["usage"])
        expect(len(answer["choices"]) == len(prompts), answer["choices"])
        for choice in answer["choices"]:
            expect(len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]), choice)

    async def streamed_completion(self) -> None:
        length = self.random.choice([1, 20, 150])
        chunks = await self.events(
            "/v1/completions",
            {"prompt": "Once " * self.random.choice([1, 30, 200]), "max_tokens": length, "ignore_eos": True},
        )
        expect(chunks[-1]["usage"]["completion_tokens"] == length, chunks[-1]["usage"], length)
        self.check_reasons(chunks, 1)

    def check_reasons(self, chunks: list[dict[str, Any]], n: int) -> None:
        reasons = Counter(c["index"] for chunk in chunks for c in chunk["choices"] if c.get("finish_reason"))
        expect(reasons == dict.fromkeys(range(n), 1), "finish reasons", reasons)

    async def tools(self) -> None:
        forced = {"type": "function", "function": {"name": "get_weather"}}
        tool_choice = self.random.choice([forced, "required", "auto", "none"])
        answer = await self.post(
            "/v1/chat/completions",
            {
                "messages": self.question(),
                "tools": [TOOL],
                "tool_choice": tool_choice,
                "max_tokens": 150,
            },
        )
        self.count(answer["usage"])
        (choice,) = answer["choices"]
        calls = choice["message"].get("tool_calls") or ()
        expect(not calls or tool_choice != "none", calls)
        if choice["finish_reason"] == "length" or tool_choice == "auto":
            return  # truncated, or any output of the model
        expect(calls or tool_choice == "none", "no call", choice)
        for call in calls:
            expect(call["function"]["name"] == "get_weather", call)
            jsonschema.validate(json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])

    async def streamed_tools(self) -> None:
        chunks = await self.events(
            "/v1/chat/completions",
            {"messages": self.question(), "tools": [TOOL], "tool_choice": "required", "max_tokens": 150},
        )
        self.check_reasons(chunks, 1)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        pieces = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
        if any(choice.get("finish_reason") == "tool_calls" for choice in choices):
            by_call: dict[int, str] = {}
            for piece in pieces:
                by_call[piece["index"]] = by_call.get(piece["index"], "") + piece["function"].get("arguments", "")
            expect(by_call, "no tool call")
            for text in by_call.values():
                jsonschema.validate(json.loads(text), TOOL["function"]["parameters"])

    async def by_schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        answer = await self.post(
            "/v1/chat/completions",
            {"messages": self.question(), "response_format": form, "max_tokens": 100, **self.sampling(), "stop": None},
        )
        self.count(answer["usage"])
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)

    async def embeddings(self) -> None:
        texts = [f"text {self.random.randrange(1000)}" for _ in range(self.random.choice([1, 4]))]
        answer = await self.post("/v1/embeddings", {"input": texts})
        expect(len(answer["data"]) == len(texts), len(answer["data"]))
        for row in answer["data"]:
            length = sum(value * value for value in row["embedding"])
            expect(0.0 < length < 1e9, "length of an embedding", length)

    async def responses(self) -> None:
        first = await self.post("/v1/responses", {"input": "What is 2 + 3?", "max_output_tokens": 24})
        expect(first["status"] in ("completed", "incomplete"), first)
        second = await self.post(
            "/v1/responses",
            {"input": "And 4 more?", "previous_response_id": first["id"], "max_output_tokens": 24},
        )
        expect(second["previous_response_id"] == first["id"], second)

    async def tokens(self) -> None:
        text = f"Some text {self.random.randrange(10**6)} é世"
        ids = (await self.post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
        back = (await self.post("/detokenize", {"tokens": ids}))["prompt"]
        expect(back == text, repr(back), repr(text))

    async def wrong(self) -> None:
        path, payload, status = self.random.choice(WRONG)
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        answer = await self.http.post(path, content=data, headers={"Content-Type": "application/json"})
        expect(answer.status_code == status, path, data[:100], answer.status_code, answer.text)
        expect(answer.json()["error"]["message"], path, answer.text)

    async def leaves_stream(self) -> None:
        payload = {"model": MODEL, "messages": self.question(), "stream": True, "max_tokens": 1000, "ignore_eos": True}
        async with self.http.stream("POST", "/v1/chat/completions", json=payload) as response:
            expect(response.status_code == 200, response.status_code)
            num_left = self.random.randrange(1, 30)
            async for line in response.aiter_lines():
                num_left -= bool(line)
                if not num_left:
                    break

    async def leaves_early(self) -> None:
        payload = {"model": MODEL, "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "n": 3}
        _, writer = await self.raw(payload)
        await asyncio.sleep(self.random.random() * 0.3)
        if self.random.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def reads_slowly(self) -> None:
        """Reads a little at a time, then all; or nothing, until the server disconnects."""
        never = self.random.random() < 0.3
        payload = {"model": MODEL, "prompt": "Once", "stream": True, "ignore_eos": True, "logprobs": 5}
        reader, writer = await self.raw({**payload, "max_tokens": 1500 if never else 100})
        try:
            if never:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(5.0)
                return
            received = b""
            while b"[DONE]" not in received:
                piece = await reader.read(2000)
                expect(piece, "the stream ended early", received[-200:])
                received += piece
                await asyncio.sleep(0.02)
        finally:
            writer.transport.abort()

    async def raw(self, payload: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        data = json.dumps(payload).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=4096)
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return reader, writer

    async def probes(self) -> None:
        for path in ("/health", "/ready", "/version", "/v1/models", "/metrics"):
            answer = await self.http.get(path)
            expect(answer.status_code == 200, path, answer.status_code)
