"""`generation_config.json`: how the authors of a model mean it to be sampled, and where it stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from models.checkpoints.model_files import ModelFiles, open_model
from models.configuration.json_fields import Fields
from models.errors import ConfigError
from runtime.sampling_table import COLUMNS, Column
from tokenizer.errors import TokenizerFileError
from tokenizer.warn import warn_once

_ONE = "num_beams num_beam_groups guidance_scale encoder_repetition_penalty"
_ZERO = (
    "epsilon_cutoff eta_cutoff diversity_penalty penalty_alpha top_h no_repeat_ngram_size encoder_no_repeat_ngram_size"
    " min_length min_new_tokens"
)
_EMPTY = (
    "bad_words_ids force_words_ids constraints forced_bos_token_id forced_eos_token_id forced_decoder_ids"
    " begin_suppress_tokens sequence_bias exponential_decay_length_penalty stop_strings"
    " watermarking_config dola_layers"
)
_ONLY_TRANSFORMERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ONE.split(), (1,)), **dict.fromkeys(_ZERO.split(), (0,)),
    **dict.fromkeys(_EMPTY.split(), ([], {}, "")),
}  # fmt: skip
"""Fields that change how transformers 5.24 generates and that are not read here, with the values that switch them
off."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The fields that the engine uses; None for a field that the file lacks.

    `eos_token_ids` are those of the configs alone; `load_end_ids` has all that end an answer. `sampling` has the
    parameters of `runtime.sampling_table` that the file gives and that have an effect: with `do_sample` false, which
    recommends greedy decoding, none that shapes sampling. `max_new_tokens` and `max_length` are tokens; `max_length`
    includes the prompt.
    """

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    max_length: int | None = None


def load_generation_config(model: str | Path) -> GenerationConfig:
    """The typed form of the model's generation config.

    If that or its ids are absent, the ids are those of `config.json`, which older models have instead. A file that
    is not JSON, and a value that makes no sense, are warnings that name file, field and value. They count as absent:
    users can set all of these.

    Raises `ConfigError` for a `config.json` that is wrong.
    """
    files = open_model(model)
    fields, older = _generation_fields(files), files.config()

    def ids(name: str) -> tuple[int, ...]:
        return _sensible(lambda: (fields if name in fields else older).token_ids(name)) or ()

    does_sample = _sensible(lambda: fields.boolean("do_sample", None))
    is_greedy = does_sample is False
    sampling: dict[str, Any] = {"temperature": 0.0} if is_greedy else {}
    for name, column in COLUMNS.items():
        if column.is_recommended and not (is_greedy and column.shapes_draws):
            value = _sensible(partial(_number, fields, name, column))
            if value is not None:
                sampling[name] = value
    _tell_unused(fields)
    if does_sample and sampling.get("temperature") == 0:
        warn_once(f"{fields.where}: temperature is 0 beside do_sample true: the most probable token is always taken")
    return GenerationConfig(
        bos_token_id=next(iter(ids("bos_token_id")), None),
        eos_token_ids=ids("eos_token_id"),
        pad_token_id=next(iter(ids("pad_token_id")), None),
        sampling=sampling,
        max_new_tokens=_sensible(lambda: fields.integer("max_new_tokens", None)),
        max_length=_sensible(lambda: fields.integer("max_length", None)),
    )


def load_end_ids(model: str | Path, overrides: str = "") -> tuple[int, ...]:
    """The ids that end an answer: those that the generation config, `config.json`, its `text_config` and the tokenizer
    name, and the tokenizer's known ends of a turn.

    If the generation config names some, `config.json` adds no id whose token is ordinary text: config classes have
    default ids that belong to another vocabulary. Raises `ConfigError` for a `config.json` that is wrong.
    """
    files = open_model(model, overrides)
    generation, config = _generation_fields(files), files.config()
    named = _sensible(lambda: generation.token_ids("eos_token_id")) or ()
    others = config.token_ids("eos_token_id")
    if isinstance(text := config.raw("text_config"), dict):
        others += Fields(text, f"{config.where}: text_config").token_ids("eos_token_id")
    try:
        tokens = files.end_tokens()
    except TokenizerFileError as error:  # the tokenizer's own loading reports it
        warn_once(f"{error}: answers end at the ids of the configs alone, not at those that the tokenizer names")
        tokens = None
    if tokens is not None and named:
        if plain := [i for i in dict.fromkeys(others) if i not in named and i not in tokens.special]:
            warn_once(
                f"{config.where}: eos_token_id {plain} is ordinary text by the tokenizer and ends no answer; those of"
                f" {generation.where} do: {list(named)}"
            )
        others = tuple(i for i in others if i not in plain)
    return tuple(dict.fromkeys((*named, *others, *(() if tokens is None else tokens.ids))))


def load_suppressed_ids(model: str | Path, overrides: str = "") -> tuple[int, ...]:
    """The ids that are never sampled, by the generation config's `suppress_tokens`; ascending."""
    fields = _generation_fields(open_model(model, overrides))
    return tuple(sorted(set(_sensible(lambda: fields.token_ids("suppress_tokens")) or ())))


def _generation_fields(files: ModelFiles) -> Fields:
    return _sensible(files.generation_config) or Fields({}, "generation_config.json")


def _tell_unused(fields: Fields) -> None:
    found = [(name, fields.raw(name)) for name in _ONLY_TRANSFORMERS if fields.has(name)]
    unused = [f"{name} = {value!r:.40}" for name, value in found if value not in _ONLY_TRANSFORMERS[name]]
    if unused:
        warn_once(
            f"{fields.where}: transformers generates by {', '.join(unused)}, too, which is not used here: answers may"
            " differ from its own (requests may give stop, min_tokens, bad_words and logit_bias themselves)"
        )


def _sensible(read: Callable[[], Any]) -> Any:
    """The result of `read`; None, with a warning, if the file makes no sense."""
    try:
        return read()
    except ConfigError as error:
        warn_once(f"{error}; it is ignored")
        return None


def _number(fields: Fields, name: str, column: Column) -> Any:
    if column.kind is int:
        value = fields.raw(name)
        if isinstance(value, float) and value.is_integer():
            fields = Fields({name: int(value)}, fields.where)
        return fields.integer(name, None, least=int(column.low), most=int(column.high))
    if column.is_low_open:
        return fields.number(name, None, above=column.low, most=column.high)
    return fields.number(name, None, least=column.low, most=column.high)


def recommended_sampling(folder: str | Path) -> dict[str, Any]:
    """The recommended values by ``SamplingParams``' names, used where a user sets none.

    Raises ``ConfigError``.
    """
    config = load_generation_config(folder)
    length = {} if config.max_new_tokens is None else {"max_tokens": config.max_new_tokens}
    return config.sampling | length
