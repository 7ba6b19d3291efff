"""The recipe of docs/adding.md for an option: its lines alone, in a config, make one that is checked, that the command
line has and that the docs list."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from runtime.commands.options import HEADINGS, flag_class, headings_of, values_of, with_options
from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.option import Flag, Option, describe, option_fields
from server.config import HEADINGS as SERVER_HEADINGS
from server.config import ServerConfig, ServerConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig(EngineConfig):
    max_toys: Annotated[
        int,
        Option(
            help="Most toys at once.",
            about="most toys at once; further ones wait",
            heading="Execution",
            most=9,
        ),
    ] = 3


@dataclass(frozen=True, kw_only=True)
class ToyServerConfig(ServerConfig):
    toy_names: Annotated[
        tuple[str, ...],
        Option(
            help="Name of a toy; may be repeated.",
            heading="Operations",
            flag=Flag(name="toy_name", kind=list[str], read=tuple, write=lambda names: names or None),
        ),
    ] = ()
    toy_timeout_s: Annotated[float, Option(help="Seconds of play.", heading="Operations", least=0, below=60.0)] = 5.0


TABLE = option_fields(ToyConfig)
SERVER_TABLE = option_fields(ToyServerConfig)


class ToyOptions(flag_class("_ToyFlags", TABLE, HEADINGS)):  # type: ignore[misc]
    HEADINGS: ClassVar = headings_of(TABLE)


class ToyServerOptions(flag_class("_ToyServerFlags", SERVER_TABLE, SERVER_HEADINGS)):  # type: ignore[misc]
    HEADINGS: ClassVar = headings_of(SERVER_TABLE)


def show(engine: ToyOptions, server: ToyServerOptions) -> None:
    """Prints the configs."""
    configs = ToyConfig(**values_of(engine, TABLE)), ToyServerConfig(**values_of(server, SERVER_TABLE))
    print(json.dumps([asdict(each) for each in configs]))


def invoke(*arguments: str) -> str:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_options(show))
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_recipe_is_this_option() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "adding.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^## An option\n.*?```python\n(.*?)```", page, re.S | re.M)
    assert recipe in inspect.getsource(ToyConfig)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "a positive integer, got 0"), ("3", "a positive integer, got '3'"), (True, "a positive integer, got True"),
     (10, "at most 9, got 10")],
)  # fmt: skip
def test_it_is_checked(value: object, words: str) -> None:
    with pytest.raises(RequestError, match=f"^max_toys must be {words}$") as caught:
        ToyConfig(max_toys=value)  # type: ignore[arg-type]
    assert caught.value.param == "max_toys"
    assert ToyConfig(max_toys=9).max_toys == 9


@pytest.mark.parametrize("value", [-1.0, 60.0, float("nan"), "1", True])
def test_the_server_raises_its_own_error(value: object) -> None:
    with pytest.raises(ServerConfigError, match=r"^toy_timeout_s must be a positive number of seconds, got "):
        ToyServerConfig(toy_timeout_s=value)  # type: ignore[arg-type]
    assert ToyServerConfig(toy_timeout_s=0).toy_timeout_s == 0


def test_the_command_line_has_it() -> None:
    help = " ".join(invoke("--help").split())
    assert "--max-toys <int> Most toys at once. [default: 3]" in help
    assert "--toy-name <str> Name of a toy; may be repeated. --toy-timeout-s <float> Seconds of play." in help
    engine, server = json.loads(invoke("--max-toys", "4", "--toy-name", "a", "--toy-name", "b", "--toy-timeout-s", "0"))
    assert (engine["max_toys"], server["toy_names"], server["toy_timeout_s"]) == (4, ["a", "b"], 0.0)
    engine, server = json.loads(invoke())
    assert (engine["max_toys"], server["toy_names"], server["toy_timeout_s"]) == (3, [], 5.0)


def test_the_docs_list_it() -> None:
    assert "\nmax_toys  most toys at once; further ones wait" in describe(ToyConfig)
    assert "\ntoy_timeout_s  Seconds of play." in describe(ToyServerConfig)
