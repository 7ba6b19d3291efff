"""`generation_config.json`: how the authors of a model mean it to be sampled, and where it stops."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.json_fields import Fields, config_path, read_json_object


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The fields that the engine has a use for; None where the file says nothing.

    `eos_token_ids` end a generation. `max_new_tokens` and `max_length` are tokens; `max_length` includes
    the prompt.
    """

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    do_sample: bool | None = None  # False: greedy
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None


def load_generation_config(folder: str | Path) -> GenerationConfig:
    """The typed form of `folder`/generation_config.json.

    Where the file or its ids are absent, the ids are those of `config.json`, which older models have instead.

    Raises `ConfigError`, naming file, field and value, for a file that is not JSON and a field that is out
    of range.
    """
    folder = Path(folder)
    path = folder / "generation_config.json"
    fields = Fields(read_json_object(path) if path.is_file() else {}, str(path))
    older_path = config_path(folder)
    older = Fields(read_json_object(older_path), str(older_path))

    def ids(name: str) -> tuple[int, ...]:
        return (fields if name in fields else older).token_ids(name)

    return GenerationConfig(
        bos_token_id=next(iter(ids("bos_token_id")), None),
        eos_token_ids=ids("eos_token_id"),
        pad_token_id=next(iter(ids("pad_token_id")), None),
        do_sample=fields.boolean("do_sample", None),
        temperature=fields.number("temperature", None, least=0.0),
        top_k=fields.integer("top_k", None, least=0),
        top_p=fields.number("top_p", None, least=0.0, most=1.0),
        min_p=fields.number("min_p", None, least=0.0, most=1.0),
        repetition_penalty=fields.number("repetition_penalty", None, above=0.0),
        max_new_tokens=fields.integer("max_new_tokens", None),
        max_length=fields.integer("max_length", None),
    )
