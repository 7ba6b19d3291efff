"""Records the requests of agents' programs for `tests/server/agents/recorded`: each does a task on this machine, on a
server whose model follows a script. Run by hand, with the programs installed elsewhere:

    python -m tests.clients.record_agents claude /folder/node_modules/.bin/claude
    python -m tests.clients.record_agents codex|aider|open_webui|opencode|cline PROGRAM
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from runtime.engine.messages import EngineRequest
from runtime.text.load import load_tokenizer
from server.app import create_app
from tests.clients.servers import CALL
from tests.clients.test_clients import CODEX, confined
from tests.server.agents.session import TEMPLATE
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.conftest import say
from tests.server.fake_engine import FakeEngineClient
from tests.server.running import running

Json = dict[str, Any]

MODEL = "scripted"
QUESTIONS = (
    "Find what is wrong in notes.txt and mend it.", "Now write a line about it in done.txt.", "Thank you. Is all done?",
)  # fmt: skip
COMMANDS = (
    "ls",
    "cat notes.txt",
    "wc -w notes.txt",
    "sed -i s/teh/the/ notes.txt",
    "cat notes.txt",
    "grep the notes.txt",
)
NOWHERE = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"}


class Recorder:
    """An application that notes the requests to another one, in the order of their answers."""

    def __init__(self, app: Any) -> None:
        self.app, self.config = app, app.config
        self.requests: list[Json] = []

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Any) -> None:
        body = bytearray()

        async def noted() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
            return message

        async def answered(message: Json) -> None:
            if message["type"] == "http.response.start" and scope["method"] == "POST":
                self.requests.append({"path": scope["path"], "body": json.loads(bytes(body) or b"{}")})
            await send(message)

        await self.app(scope, noted, answered)


def script(request: EngineRequest) -> str:
    """Two commands after each question, then a sentence."""
    prompt = bytes(each for each in request.prompt_token_ids if each < 256).decode(errors="replace")
    tools = re.findall(r'"name": "(\w+)"', prompt.rpartition("<tools>")[2].partition("</tools>")[0])
    said = prompt.count("<tool_response>")
    asked = sum(prompt.count(question) > 0 for question in QUESTIONS)
    is_due = said < 2 * asked and said < len(COMMANDS)
    for name, arguments in (
        ("Bash", {"command": COMMANDS[said % 6], "description": "Looks at the folder"}),
        ("exec_command", {"cmd": COMMANDS[said % 6]}),
        ("bash", {"command": COMMANDS[said % 6], "description": "Looks at the folder"}),
        ("run_commands", {"commands": [COMMANDS[said % 6]]}),
    ):
        if name in tools and is_due:
            return f"I look at the folder, step {said + 1}.\n" + CALL % (name, json.dumps(arguments))
    return f"That is done; {said} commands ran."


def run(program: Path, arguments: list[str], home: Path, work: Path, **environment: str) -> None:
    done = subprocess.run(
        [str(program), *arguments], env=confined(home, **NOWHERE, **environment), cwd=work,
        stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", timeout=60, check=False,
    )  # fmt: skip
    print(f"{done.returncode}: {done.stdout[-800:]}\n{done.stderr[-800:]}", flush=True)


def run_claude(program: Path, url: str, home: Path, work: Path) -> None:
    settings = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL, "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip
    for number, question in enumerate(QUESTIONS):
        more = ["--continue"] if number else []
        run(program, ["-p", question, *more, "--dangerously-skip-permissions"], home, work, **settings)


def run_codex(program: Path, url: str, home: Path, work: Path) -> None:
    (home / "config.toml").write_text(CODEX.format(url=url, model=MODEL), encoding="utf-8")
    plain = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    for number, question in enumerate(QUESTIONS):
        more = ["resume", "--last"] if number else []
        run(program, ["exec", *more, *plain, question], home, work, CODEX_HOME=str(home))


def run_aider(program: Path, url: str, home: Path, work: Path) -> None:
    options = [
        "--model", f"openai/{MODEL}", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none", "--no-git",
        "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable",
        "--restore-chat-history", "notes.txt",
    ]  # fmt: skip
    for question in QUESTIONS:
        run(program, [*options, "--message", question], home, work)


def run_opencode(program: Path, url: str, home: Path, work: Path) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"tool_call": True}},
    }  # fmt: skip
    settings = {"provider": {"own": provider}, "autoupdate": False, "share": "disabled"}
    (work / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    environment = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1", "PWD": str(work)}
    for number, question in enumerate(QUESTIONS):
        more = ["--continue"] if number else []
        run(program, ["run", "--auto", "-m", f"own/{MODEL}", *more, question], home, work, **environment)


def run_cline(program: Path, url: str, home: Path, work: Path) -> None:
    data = ["--data-dir", str(home / "data")]
    run(program, ["auth", "-p", "openai", "-k", "none", "-m", MODEL, "-b", f"{url}/v1", *data], home, work)
    for question in QUESTIONS:
        run(program, [*data, "-P", "openai", "-m", MODEL, "--json", "-c", str(work), question], home, work)


def run_open_webui(program: Path, url: str, home: Path, work: Path) -> None:
    """Its server, asked as its page asks: by both of its ways to a server, with a tool and its tasks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "DATA_DIR": str(home), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "none", "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none", "ENABLE_OLLAMA_API": "True", "OLLAMA_BASE_URL": url, "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai",
    }  # fmt: skip
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    tools = [{"type": "function", "function": {"name": "Bash", "description": "Runs it.", "parameters": parameters}}]
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env=confined(home, **NOWHERE, **settings), cwd=work) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
                until_s = time.monotonic() + START_S
                while not _is_healthy(http):
                    assert time.monotonic() < until_s, "it has not started"
                    time.sleep(1)
                token = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
                http.headers["authorization"] = f"Bearer {token}"
                for model in (each["id"] for each in http.get("/api/models").json()["data"]):
                    messages: list[Json] = []
                    for question in QUESTIONS[:2]:
                        messages.append({"role": "user", "content": question})
                        body = {"model": model, "messages": messages, "tools": tools}
                        while (message := _asked(http, "/api/chat/completions", body)).get("tool_calls"):
                            messages += [message, *(_result(call) for call in message["tool_calls"])]
                        messages.append(message)
                    _asked(http, "/api/chat/completions", {"model": model, "messages": messages[:1], "stream": True})
                    for task in ("title", "tags", "queries"):
                        body = {"model": model, "messages": messages, "type": "search_query"}
                        _asked(http, f"/api/v1/tasks/{task}/completions", body)
                body = {"model": f"{MODEL}:latest", "messages": messages[:1]}
                _asked(http, "/ollama/v1/chat/completions", body)
        finally:
            server.terminate()


def _is_healthy(http: httpx.Client) -> bool:
    with suppress(httpx.HTTPError):
        return http.get("/health").status_code == 200
    return False


def _asked(http: httpx.Client, path: str, body: Json) -> Json:
    """The message of an answer; nothing of a stream."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, f"{path}: {answer.text}"
    return {} if body.get("stream") else dict(answer.json()["choices"][0]["message"])


def _result(call: Json) -> Json:
    return {"role": "tool", "tool_call_id": call["id"], "content": "teh cat sat on the mat"}


PROGRAMS = {
    "claude": run_claude, "codex": run_codex, "aider": run_aider, "open_webui": run_open_webui,
    "opencode": run_opencode, "cline": run_cline,
}  # fmt: skip
START_S = 900.0
"""Seconds that a busy machine may take for a program's start."""


def record(name: str, program: Path) -> tuple[list[Json], list[str]]:
    """The requests, and the model's answers to them."""
    with tempfile.TemporaryDirectory() as folder:
        model, home, work = (Path(folder) / each for each in ("model", "home", "work"))
        for each in (model, home, work):
            each.mkdir()
        write_byte_tokenizer(model, has_template=False)
        (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        (work / "notes.txt").write_text("teh cat sat on the mat\n", encoding="utf-8")
        answers: list[str] = []

        def answer(request: EngineRequest, index: int) -> list[int]:
            answers.append(script(request))
            return say(answers[-1])

        engine = FakeEngineClient(answer, max_model_len=1_000_000, model_name=MODEL)
        recorder = Recorder(create_app(engine, load_tokenizer(model)))
        try:
            with running(recorder) as url:  # type: ignore[arg-type]
                PROGRAMS[name](program, url, home, work)
        finally:
            engine.close()
    assert len(recorder.requests) == len(answers), "a request was refused, or asks for no answer"
    return recorder.requests, answers


class Scrubber:
    """Replaces a program's texts by words without sense, the same by the same, and all that names this machine, this
    day, or a session. A long text that is the same in all requests keeps its beginning and its end."""

    def __init__(self, requests: list[Json], answers: list[str]) -> None:
        self._own = [*QUESTIONS, *COMMANDS, *(answer.partition("\n<tool_call>")[0] for answer in answers)]
        self._ids: dict[str, str] = {}
        self._values: dict[str, set[str]] = defaultdict(set)
        for each in requests:
            self._note("", each["body"])

    def _note(self, path: str, value: Any) -> None:
        if isinstance(value, str):
            self._values[path].add(value)
        for name, part in _parts(value):
            self._note(f"{path}/{name}", part)

    def __call__(self, value: Any, path: str = "", key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self(each, f"{path}/{name}", name) for name, each in value.items() if name not in DROPPED}
        if isinstance(value, list):
            return [self(each, f"{path}/{place}", key) for place, each in enumerate(value)]
        if not isinstance(value, str):
            return value
        value = IDS.sub(lambda found: self._ids.setdefault(found[0], f"{found[1]}{len(self._ids) + 1:04d}"), value)
        if key not in PROSE or value in self._own or NOISE.fullmatch(value):
            return value
        if len(value) > 2 * KEPT and len(self._values[path]) == 1:
            value = value[:KEPT] + value[-KEPT:]
        return WORDS.sub(_senseless, value)


PROSE = {"content", "description", "input_text", "instructions", "output", "system", "text"}
"""Keys of texts; all others are names and kinds."""
DROPPED = {"client_metadata", "metadata"}
KEPT = 150
IDS = re.compile(r"\b((?:toolu|call|msg|fco?|rs)_)[0-9a-zA-Z-]{8,}|\b()[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
NOISE = re.compile(r"x-anthropic-billing-header:[ -~]*")
WORDS = re.compile(r"[^\W_]+")


def _parts(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())


def _senseless(word: re.Match[str]) -> str:
    digest = hashlib.sha256(word[0].encode()).digest() * 8
    return "".join(chr(ord("a") + byte % 26) for byte in digest[: min(len(word[0]), 12)])


def compact(name: str, requests: list[Json], answers: list[str]) -> Json:
    """Each message and each other field once; a request has their numbers."""
    scrub = Scrubber(requests, answers)
    parts: dict[str, int] = {}

    def number(part: Any) -> int:
        return parts.setdefault(json.dumps(part), len(parts))

    packed = []
    for each in requests:
        body = scrub(each["body"])
        fields = {key: [number(part) for part in body.pop(key)] for key in ("messages", "input") if key in body}
        packed.append({"path": each["path"], "body": number(body), **fields})
    return {
        "about": f"Requests of {name} in a task of {len(QUESTIONS)} questions, made by tests/clients/record_agents.py.",
        "parts": [json.loads(part) for part in parts], "requests": packed, "answers": answers,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROGRAMS)
    parser.add_argument("program", type=Path)
    asked = parser.parse_args()
    command = [asked.program, "--version"]
    if asked.name == "open_webui":  # it has no such option that works alone
        version = "from importlib.metadata import version; print(version('open-webui'))"
        command = [asked.program.with_name("python"), "-c", version]
    version = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    found = compact(f"{asked.name} {version}", *record(asked.name, asked.program))
    file = Path(__file__).parents[1] / "server" / "agents" / "recorded" / f"{asked.name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
