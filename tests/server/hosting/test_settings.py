"""An operator's file of models is read strictly: what is wrong is told with the model, the key and what it must be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import InvalidArgumentError
from server.config import ServerConfig, ServerConfigError
from server.hosting.durations import seconds_of
from server.hosting.settings import ModelSettings, models_of
from server.serve import told_apart

DEMO = str(Path(__file__).parents[3] / "models" / "demo")


def read(
    tmp_path: Path, text: str, *given: str | None, name: str = "models.toml", **options: Any
) -> list[ModelSettings]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return models_of(given, options, ServerConfig(models_config=str(path), keep_alive="10m"))


FILE = f"""
[models.chat]
model = {DEMO!r}
aliases = ["gpt-4o", "chat"]
priority = 3
keep-alive = "1h30m"
max_model_len = 512
kv-cache-bytes = 1048576
swap-space = 0.5
overlap = "off"
tool-call-parser = "hermes"
enable-lora = true
lora-modules = {{ poet = "/adapters/poet" }}

[models."owner/second"]
model = {DEMO!r}
load = "demand"
memory-bytes = 1000
"""


def test_a_file(tmp_path: Path) -> None:
    chat, second = read(tmp_path, FILE, max_num_seqs=7)
    assert chat.names == ("chat", "gpt-4o")
    assert (chat.model, chat.priority, chat.keep_alive_s, chat.at_start) == (DEMO, 3, 5400.0, True)
    assert chat.engine_options == {
        "max_num_seqs": 7, "max_model_len": 512, "kv_cache_bytes": 1048576, "swap_space_bytes": 1 << 29,
        "overlap": "off", "enable_lora": True,
    }  # fmt: skip
    assert (chat.config.tool_call_parser, chat.config.lora_modules) == ("hermes", ("poet=/adapters/poet",))
    assert second.names == ("owner/second",)
    assert (second.at_start, second.keep_alive_s, second.memory_bytes) == (False, 600.0, 1000)
    assert second.engine_options == {"max_num_seqs": 7}
    assert second.config == replace(chat.config, tool_call_parser="auto", lora_modules=())
    same = read(tmp_path, f'{{"models": {{"chat": {{"model": "{DEMO}", "overlap": true}}}}}}', name="models.json")
    assert [(each.names, each.engine_options) for each in same] == [(("chat",), {"overlap": "on"})]


def test_a_command_line(tmp_path: Path) -> None:
    found = models_of([DEMO, f"mine={DEMO}", "owner/name"], {}, ServerConfig())
    assert [(each.names, each.model) for each in found] == [
        (("xserv-demo",), DEMO), (("mine",), DEMO), (("owner/name",), "owner/name"),
    ]  # fmt: skip
    assert {each.keep_alive_s for each in found} == {math.inf}
    both = read(tmp_path, FILE, f"mine={DEMO}")
    assert [each.names[0] for each in both] == ["mine", "chat", "owner/second"]
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert models_of([str(odd)], {}, ServerConfig())[0].model == str(odd)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "there is none"),
        ("models = 3", r"must hold tables \[models.NAME\]"),
        ("[models]", "there are no models"),
        ("[model.a]\nmodel='x'", "got 'model'"),
        ("[models.a\n", "--models-config"),
        ("[models.a]\nmodle='x'", "'a'.*no option 'modle'; did you mean 'model'"),
        ("[models.a]\nmodel=3", "model must be a folder"),
        ("[models.a]\nmodel='/no/such/folder'", "'a'.*no such file"),
        (f"[models.a]\nmodel={DEMO!r}\nmax-model-len='many'", "'a'.*max_model_len must be"),
        (f"[models.a]\nmodel={DEMO!r}\nmax-model-len=-1", "'a'.*max_model_len must be"),
        (f"[models.a]\nmodel={DEMO!r}\nkeep-alive='soon'", "'a'.*keep-alive must be"),
        (f"[models.a]\nmodel={DEMO!r}\npriority='high'", "'a'.*priority must be an integer"),
        (f"[models.a]\nmodel={DEMO!r}\nload='never'", "'a'.*load must be"),
        (f"[models.a]\nmodel={DEMO!r}\naliases='b'", "'a'.*aliases must be a list"),
        (f"[models.a]\nmodel={DEMO!r}\naliases=['b c']", "'b c', must be a name without white space"),
        (f"[models.'a b']\nmodel={DEMO!r}", "'a b', must be a name without white space"),
        (f"[models.a]\nmodel={DEMO!r}\nmemory-bytes=-1", "'a'.*memory-bytes must be"),
        (f"[models.a]\nmodel={DEMO!r}\nreasoning-parser='no'", "'a'.*reasoning_parser must be"),
        (f"[models.a]\nmodel={DEMO!r}\n[models.b]\nmodel={DEMO!r}\naliases=['a']", "'a' is used twice: by 'a' and 'b'"),
        (f"[models.a]\nmodel={DEMO!r}\napi-key='x'", "no option 'api-key'"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ServerConfigError, match=told) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ServerConfigError, match="cannot be read"):
        models_of([], {}, ServerConfig(models_config="/no/such/file.toml"))


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0), (7, 7.0), (0.5, 0.5), ("5m", 300.0), ("1h30m", 5400.0), ("300ms", 0.3), ("0", 0.0), ("90", 90.0),
        (-1, math.inf), ("-1", math.inf), ("-1m", math.inf), ("1.5h", 5400.0), ("24h0m0s", 86400.0),
        (1e300, math.inf), (10**400, math.inf), (-(10**400), math.inf), ("999999999999h", math.inf),
    ],
)  # fmt: skip
def test_durations(given: object, seconds: float) -> None:
    assert seconds_of(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", [None, True, "", "m", "5 m", "5x", "1h-3m", "9" * 100, [], {}, float("nan")])
def test_no_durations(given: object) -> None:
    with pytest.raises(InvalidArgumentError, match="keep_alive must be seconds or a duration"):
        seconds_of(given)


@pytest.mark.parametrize(
    ("flag", "wrong"),
    [
        ("--models-max", {"models_max": 2}), ("--models-memory", {"models_memory_bytes": 1 << 30}),
        ("--keep-alive", {"keep_alive": "5m"}), ("--model-wait", {"model_wait_s": 3.0}),
    ],
)  # fmt: skip
def test_options_of_several_are_refused_for_one(flag: str, wrong: dict[str, Any]) -> None:
    def apart(*given: str) -> Any:
        return told_apart(list(given), ServerConfig(**wrong), [], None, {}, in_process=False)

    with pytest.raises(ServerConfigError, match=f"{flag} has no effect on one model: name it"):
        apart(DEMO)
    for given in ([f"a={DEMO}"], [DEMO, f"b={DEMO}"]):
        only, several = apart(*given)
        assert only is None
        assert len(several) == len(given)


def test_one_model_with_a_name() -> None:
    _, (found,) = told_apart([f"a={DEMO}"], ServerConfig(), [], None, {}, in_process=False)
    assert (found.names, found.model) == (("a",), DEMO)
    assert told_apart([DEMO], ServerConfig(), [], None, {}, in_process=False) == (DEMO, ())
