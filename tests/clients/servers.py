"""The servers that clients are tried on: the bundled model, the same with a template that knows tools, and a scripted
one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.engine.messages import EngineRequest
from runtime.text.load import load_tokenizer
from server.app import create_app
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.conftest import say
from tests.server.fake_engine import FakeEngineClient
from tests.server.real_server import serving_real
from tests.server.running import running

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "models" / "demo"
QWEN3 = HERE.parents[2] / "shared" / "data" / "chat_templates" / "Qwen-Qwen3-0.6B.jinja"
KINDS = ("demo", "tools", "scripted")
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[tuple[str, str]]:
    """URL and model name of a server of a kind; `folder` is empty."""
    if kind == "scripted":
        if not QWEN3.exists():
            pytest.skip("../shared/data/chat_templates is not there")
        with _scripted(folder) as url:
            yield url, "scripted"
        return
    if kind == "tools":
        shutil.copytree(DEMO, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
        shutil.copy(HERE / "demo_with_tools.jinja", folder / "chat_template.jinja")
    with serving_real(DEMO if kind == "demo" else folder) as real:
        yield real.url, real.model


@contextmanager
def _scripted(folder: Path) -> Iterator[str]:
    """Qwen3's template, tokens that are bytes, and answers as a model gives them that understands its prompt."""
    write_byte_tokenizer(folder, has_template=False)
    shutil.copy(QWEN3, folder / "chat_template.jinja")
    engine = FakeEngineClient(_scripted_answer, max_model_len=40_000, model_name="scripted")
    try:
        with running(create_app(engine, load_tokenizer(folder))) as url:
            yield url
    finally:
        engine.close()


def _scripted_answer(request: EngineRequest, index: int) -> list[int]:
    """Calls the tool "weather" if there is one; with its result, answers (by "final_answer", if that is a tool)."""
    prompt = bytes(each for each in request.prompt_token_ids if each < 256).decode()
    turn = prompt.rpartition("<|im_start|>user")[2]
    is_answered = "<tool_response>" in turn or "Observation:" in prompt.rpartition("<|im_start|>")[0][-400:]
    tools = re.findall(r'"name": "(\w+)"', prompt.rpartition("<tools>")[2].partition("</tools>")[0])
    if "weather" in tools and not is_answered:
        return say(CALL % ("weather", '{"city": "Paris"}'))
    if "ends the task" in turn:
        return say('Thought: I know it.\n<code>\nfinal_answer("It is sunny in Paris.")\n</code>')
    if "exec_command" in tools and not is_answered:
        return say(CALL % ("exec_command", '{"cmd": "echo sunny > weather.txt"}'))
    if "final_answer" in tools:
        return say(CALL % ("final_answer", '{"answer": "It is sunny in Paris."}'))
    if "is_right" in prompt or "JSON" in prompt:
        return say('```json\n{"is_right": true}\n```' if "```json" in prompt else '{"is_right": true}')
    return say("It is sunny in Paris." if is_answered else "Hello.")
