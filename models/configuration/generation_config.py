"""`generation_config.json`: how the authors of a model mean it to be sampled, and where it stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.checkpoints.model_files import open_model
from models.configuration.json_fields import Fields
from runtime.sampling_table import COLUMNS, Column


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The fields that the engine has a use for; None where the file says nothing.

    `eos_token_ids` end a generation. `sampling` has the parameters of `runtime.sampling_table` that the file gives and
    that mean something: none that shapes draws if `do_sample` is false, which recommends the most probable token.
    `max_new_tokens` and `max_length` are tokens; `max_length` includes the prompt.
    """

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    max_length: int | None = None


def load_generation_config(model: str | Path) -> GenerationConfig:
    """The typed form of the model's generation config.

    Where that or its ids are absent, the ids are those of `config.json`, which older models have instead.

    Raises `ConfigError`, naming file, field and value, for a file that is not JSON and a field that is out
    of range.
    """
    files = open_model(model)
    fields, older = files.generation_config(), files.config()

    def ids(name: str) -> tuple[int, ...]:
        return (fields if name in fields else older).token_ids(name)

    is_greedy = fields.boolean("do_sample", None) is False
    sampling: dict[str, Any] = {"temperature": 0.0} if is_greedy else {}
    for name, column in COLUMNS.items():
        if column.is_recommended and not (is_greedy and column.shapes_draws):
            value = _number(fields, name, column)
            if value is not None:
                sampling[name] = value
    return GenerationConfig(
        bos_token_id=next(iter(ids("bos_token_id")), None),
        eos_token_ids=ids("eos_token_id"),
        pad_token_id=next(iter(ids("pad_token_id")), None),
        sampling=sampling,
        max_new_tokens=fields.integer("max_new_tokens", None),
        max_length=fields.integer("max_length", None),
    )


def _number(fields: Fields, name: str, column: Column) -> Any:
    if column.kind is int:
        return fields.integer(name, None, least=int(column.low), most=int(column.high))
    if column.is_low_open:
        return fields.number(name, None, above=column.low, most=column.high)
    return fields.number(name, None, least=column.low, most=column.high)
