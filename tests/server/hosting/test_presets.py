"""llama-server's INI presets as models of a server."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from server.config import ServerConfig, ServerConfigError
from server.hosting.settings import models_of

DEMO = Path(__file__).parents[3] / "models" / "demo"
PRESETS = """
version = 1

; for all
[*]
c = 512
n-gpu-layers = 8

[chat]
model = {demo}
ctx-size = 1024
alias = gpt-4o, assistant
load-on-startup = true
np = 3

# the shared context
[other]
LLAMA_ARG_MODEL = {demo}
seed = 7
flash-attn = on

[{demo}]
c = 0
"""


def found(tmp_path: Path, text: str) -> list[tuple[tuple[str, ...], str | None, bool, dict[str, object]]]:
    file = tmp_path / "presets.ini"
    file.write_text(text.format(demo=DEMO))
    models = models_of([], {"max_num_seqs": 9}, ServerConfig(models_config=str(file)))
    return [(each.names, each.model, each.at_start, dict(each.engine_options)) for each in models]


def test_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "xserv.server"):
        chat, other = found(tmp_path, PRESETS.replace("[{demo}]\nc = 0\n", ""))
    demo = str(DEMO)
    assert chat == (("chat", "gpt-4o", "assistant"), demo, True, {"max_model_len": 1024, "max_num_seqs": 3})
    assert other == (("other",), demo, False, {"max_model_len": 512, "max_num_seqs": 9, "seed": 7})
    assert "without effect: flash-attn, n-gpu-layers" in caplog.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[chat]\nmodel = {demo}\nmirostat = 2\n", r"preset \[chat\]: there is no option for 'mirostat'"),
        ("[chat]\nmodel = {demo}\nc = many\n", r"preset \[chat\]: ctx-size must be an integer, got 'many'"),
        ("[chat]\nmodel = {demo}\nload-on-startup = perhaps\n", "load-on-startup must be true or false"),
        ("[chat\nmodel = x\n", "presets.ini"),
        ("", "there are no models"),
        ("[chat]\nmodel = /nowhere/model\n", "the model 'chat'"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ServerConfigError, match=problem):
        found(tmp_path, text)
