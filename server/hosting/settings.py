"""The models of one server, as its operator names them: on the command line, and in a file (`--models-config`).

    [models.chat]
    model = "Qwen/Qwen3-8B"
    aliases = ["gpt-4o"]
    priority = 1
    keep-alive = "30m"
    max-model-len = 8192

    [models.embed]
    model = "BAAI/bge-m3"
    load = "demand"

A table's other keys are options of the engine and of its answers, by their names on the command line, where the values
of all models stand. A file whose name ends in .json has the same as JSON, one that ends in .ini llama-server's presets
(`presets.py`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models.checkpoints.hub import local_model, model_name
from runtime.engine.config import OPTIONS as ENGINE_OPTIONS
from runtime.engine.config import EngineConfig
from runtime.engine.option import OptionField
from runtime.engine.option_names import nearest_name
from runtime.errors import InvalidArgumentError, XservError
from runtime.text.load import read_chat_template
from runtime.text_files import read_text_file
from server.adapters import parse_modules
from server.config import ANSWERS, ServerConfig, ServerConfigError
from server.config import OPTIONS as SERVER_OPTIONS
from server.hosting.durations import seconds_of
from server.hosting.presets import tables_of_presets
from server.names import check_served_name

MOST_MODELS = 256
"""Most models of one server."""

_OF_STARTS = ("hang_timeout_s", "ray_address")
"""Options of `StartingClient` that are none of `EngineConfig`."""

_OWN_KEYS = ("model", "aliases", "priority", "keep-alive", "load", "memory-bytes", "chat-template")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """One model of a server.

    names         in requests; answers have the first
    model         a folder, a GGUF file, a hub id, or None for the bundled one
    priority      a model never has to go for one of a lower priority
    keep_alive_s  how long it stays loaded after its latest request; infinite: until another needs the room
    at_start      whether it is loaded at the start, if it fits; else for its first request
    memory_bytes  what it takes on its device, before that is known; None: by the sizes of its files
    chat_template    instead of the model's own, or None
    engine_options   `build_engine`'s
    config           the server's, with this model's options of answers
    """

    names: tuple[str, ...]
    model: str | None
    priority: int = 0
    keep_alive_s: float = -1.0
    at_start: bool = True
    memory_bytes: int | None = None
    chat_template: str | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    config: ServerConfig = field(default_factory=ServerConfig)


def models_of(
    given: Sequence[str | None],
    engine_options: Mapping[str, Any],
    config: ServerConfig,
    chat_template: str | None = None,
) -> list[ModelSettings]:
    """The models named on a command line (a path, a hub id, or `NAME=` before it) and in the config's file. Raises
    `ServerConfigError`, which names the model and the key, and the errors of `EngineConfig` and `local_model`."""
    default = ModelSettings(
        names=(),
        model=None,
        keep_alive_s=seconds_of(config.keep_alive),
        chat_template=chat_template,
        engine_options=dict(engine_options),
        config=config,
    )
    found = [_named(text, default) for text in given]
    if config.models_config:
        tables = _tables(Path(config.models_config))
        found += [_of_table(name, table, default) for name, table in tables.items()]
    if not found:
        raise ServerConfigError(f"{config.models_config}: there are no models; a table [models.NAME] has one each")
    if len(found) > MOST_MODELS:
        raise ServerConfigError(f"a server has at most {MOST_MODELS} models, got {len(found)}")
    owners: dict[str, str] = {}
    for each in found:
        for name in (*each.names, *parse_modules(each.config.lora_modules)):
            if name in owners:
                users = f"by {owners[name]!r} and {each.names[0]!r}; give each model another (NAME=MODEL)"
                raise ServerConfigError(f"the name {name!r} is used twice: {users}")
            owners[name] = each.names[0]
        try:
            EngineConfig(**{key: value for key, value in each.engine_options.items() if key not in _OF_STARTS})
            local_model(each.model)
        except XservError as error:
            raise ServerConfigError(f"the model {each.names[0]!r}: {error}") from None
    return found


def _named(text: str | None, default: ModelSettings) -> ModelSettings:
    """The model of a positional argument."""
    name, equals, path = ("", "", "") if text is None else text.partition("=")
    if not equals or Path(text or "").expanduser().exists():
        name, path = model_name(text), text  # type: ignore[assignment]
    if not (name and path is not None):
        raise ServerConfigError(f"{text!r:.200} must be a model, or NAME=MODEL")
    check_served_name(name, "a model's name")
    return replace(default, names=(name,), model=path)


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    """The file's table of each model. Raises `ServerConfigError`."""
    try:
        text = read_text_file(path)
        if path.suffix == ".ini":
            return tables_of_presets(text)
        content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ServerConfigError(f"--models-config {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError, InvalidArgumentError) as error:
        raise ServerConfigError(f"--models-config {path}: {error}") from None
    tables = content.get("models") if isinstance(content, dict) else None
    if not isinstance(tables, dict) or content.keys() - {"models"}:
        unknown = ", ".join(map(repr, content.keys() - {"models"})) if isinstance(content, dict) else ""
        problem = f"got {unknown}" if unknown else "there is none"
        raise ServerConfigError(f"--models-config {path}: must hold tables [models.NAME] and nothing else, {problem}")
    return tables


def _of_table(name: str, table: Any, default: ModelSettings) -> ModelSettings:
    where = f"the model {name!r}"
    if not isinstance(table, dict):
        raise ServerConfigError(f"{where} must be a table with its path and options, got {table!r:.80}")
    check_served_name(name, "a model's name")
    values = {key.replace("_", "-"): value for key, value in table.items()}
    model = values.pop("model", None)
    if model is not None and (not isinstance(model, str) or not model):
        raise ServerConfigError(f"{where}: model must be a folder, a GGUF file or a hub id, got {model!r:.80}")
    aliases = values.pop("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise ServerConfigError(f"{where}: aliases must be a list of names, got {aliases!r:.80}")
    for alias in aliases:
        check_served_name(alias, f"{where}: aliases")
    priority = values.pop("priority", 0)
    if type(priority) is not int or abs(priority) >= 1 << 31:
        raise ServerConfigError(f"{where}: priority must be an integer, got {priority!r:.80}")
    load = values.pop("load", "start")
    if load not in ("start", "demand"):
        raise ServerConfigError(f'{where}: load must be "start" or "demand", got {load!r:.80}')
    memory = values.pop("memory-bytes", None)
    if memory is not None and (type(memory) is not int or memory < 0):
        raise ServerConfigError(f"{where}: memory-bytes must be a number of bytes, got {memory!r:.80}")
    template = values.pop("chat-template", None)
    if template is not None and not isinstance(template, str):
        raise ServerConfigError(f"{where}: chat-template must be a text, got {template!r:.80}")
    try:
        keep_alive = values.pop("keep-alive", None)
        keep_alive_s = default.keep_alive_s if keep_alive is None else seconds_of(keep_alive, "keep-alive")
        engine_options, answers = _options(values, default)
        template = default.chat_template if template is None else read_chat_template(template)
        config = replace(default.config, **answers)
    except XservError as error:
        raise ServerConfigError(f"{where}: {error}") from None
    return ModelSettings(
        names=tuple(dict.fromkeys((name, *aliases))),
        model=model,
        priority=priority,
        keep_alive_s=keep_alive_s,
        at_start=load == "start",
        memory_bytes=memory,
        chat_template=template,
        engine_options=engine_options,
        config=config,
    )


def _options(values: Mapping[str, Any], default: ModelSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine's options, and the server's that differ between models, of a table's keys."""
    of_engine = _by_key(ENGINE_OPTIONS)
    of_answers = _by_key([each for each in SERVER_OPTIONS if each.option.heading == ANSWERS])
    engine_options = dict(default.engine_options)
    answers: dict[str, Any] = {}
    for key, value in values.items():
        for table, into in ((of_engine, engine_options), (of_answers, answers)):
            if key in table:
                option, is_flag = table[key]
                into[option.name] = _value(option, value, is_flag=is_flag)
                break
        else:
            near = nearest_name(key, (*_OWN_KEYS, *of_engine, *of_answers))
            hint = f"; did you mean {near!r}?" if near else ""
            raise ServerConfigError(f"there is no option {key!r:.80}{hint}")
    return engine_options, answers


def _value(option: OptionField, value: Any, *, is_flag: bool) -> Any:
    """A value of the file as the option's."""
    flag = option.option.flag
    if isinstance(value, dict) and option.name == "lora_modules":
        value = [f"{name}={path}" for name, path in value.items()]
    if isinstance(value, list):
        return tuple(value)
    is_spelled = is_flag if flag.kind is float else flag.kind in (bool, str) and isinstance(value, flag.kind)
    return flag.read(value) if flag.read is not None and is_spelled else value


def _by_key(options: Sequence[OptionField]) -> dict[str, tuple[OptionField, bool]]:
    """Each option by its name, and by those of its flag, in whose units the value is then."""
    found = {}
    for each in options:
        declared = [text.removeprefix("--") for text in each.option.flag.declarations]
        for key in (each.flag_name.replace("_", "-"), *declared):
            found[key] = each, True
        if each.flag_name != each.name:
            found[each.name.replace("_", "-")] = each, False
    return found
