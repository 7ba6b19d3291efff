"""Simon Willison's `llm`: its command with extra-openai-models.yaml, and its Python API."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

from steps import BASE, KIND, MODEL, REAL, SUM, answered, run, step

home = Path(os.environ["HOME"]) / f"llm-{KIND}"
home.mkdir()
os.environ["LLM_USER_PATH"] = str(home)
(home / "extra-openai-models.yaml").write_text(
    f"""\
- model_id: ours
  model_name: {MODEL}
  api_base: {BASE}
  api_key_name: ours
  supports_schema: true
  supports_tools: true
""",
    encoding="utf-8",
)
(home / "keys.json").write_text(json.dumps({"ours": "none"}), encoding="utf-8")

import llm  # noqa: E402 - it reads LLM_USER_PATH

model = llm.get_model("ours")


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "sunny"


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments], capture_output=True, text=True, check=False, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@step()
def commands():
    asked = ("-m", "ours", "-o", "temperature", "0", "-o", "max_tokens", "100")
    answered(command(*asked, SUM))
    assert command(*asked, "--no-stream", SUM) == command(*asked, SUM)
    assert command("-c", *asked, SUM)  # goes on with the last conversation, as the log has it


@step()
def chat():
    answered(model.prompt(SUM, temperature=0, max_tokens=100, stream=False).text())


@step("scripted")
def tool_round_trip():
    assert model.chain("How is Paris?", tools=[weather]).text() == "It is sunny in Paris."


@step(*REAL)
def structure():
    schema = {"type": "object", "properties": {"is_right": {"type": "boolean"}}, "required": ["is_right"],
              "additionalProperties": False}  # fmt: skip
    assert isinstance(json.loads(model.prompt(SUM, schema=schema).text())["is_right"], bool)


run()
