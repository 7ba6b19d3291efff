"""Reads a LoRA adapter's folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`.

The tensors say which modules are changed; the config gives the scale of each, `lora_alpha / r` or with `use_rslora`
`lora_alpha / sqrt(r)`. A field that would change the answers in another way is refused by name. `adapter_model.bin`, a
pickle, is never read. Checked against peft 0.21.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from models.adapter_modules import MERGE
from models.checkpoints.safetensors_file import SafetensorsFile
from models.configuration.json_fields import Fields, read_json_object
from models.errors import ConfigError, WeightsError
from runtime.linear.adapter_pairs import Pair
from tokenizer.patterns.linear_pattern import LinearPattern
from tokenizer.patterns.linear_program import PatternError

Array = np.ndarray[Any, Any]
_ScaleOf = Callable[[str, int], float]
"""A module's scale, which may be infinite, by its name and the rows of its lora_A."""

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MOST_NAME_CHARACTERS = 512

_PREFIX = "base_model.model."
_PAIR = re.compile(r"(.+)\.lora_(A|B)(?:\.default)?\.(weight|bias)")
_TABLE_PAIR = re.compile(r"(.+)\.lora_embedding_(A|B)(?:\.default)?")
_TRAINED = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta(?:\.default)?")
_SAVED = re.compile(r"(.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.((?:[^.]*_)?bias|weight)")
_TOKENS = "tokens"
_OWNER = "experts"
"""The module of a parameter that `target_parameters` names without one."""
_FLOATS = ("F32", "F16", "BF16")

_HARMLESS = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern",
    "bias", "modules_to_save",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config", "lora_bias", "ensure_weight_tying",
)  # fmt: skip
"""Fields that training, or choosing the modules, reads; the tensors show what came of them."""

_MUST_BE_OFF = {
    "use_dora": "DoRA", "use_qalora": "QA-LoRA", "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "velora_config": "VeLoRA", "monteclora_config": "MonteCLoRA", "use_bdlora": "BD-LoRA", "arrow_config": "Arrow",
    "kasa_config": "KaSA",
}  # fmt: skip

_UNMERGEABLE = (
    "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE", "ADAPTION_PROMPT",
    "XLORA", "POLY", "LILY", "SHADOW", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
"""Types of adapters, and fields, that PEFT cannot merge."""
_NO_MERGE = "this kind cannot be merged into a model: train a LoRA adapter"

_CONVERTED = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations that change the base model's weights."""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter's parts, named as in its file without the prefix; `digest` covers both files.

    Attributes:
        pairs: by module, scaled; of a token table as of a map of one-hot rows.
        saved: retrained tensors by name.
        tokens: by module, the trained rows' numbers and what they are now.
    """

    digest: str
    pairs: Mapping[str, Pair]
    saved: Mapping[str, Array] = field(default_factory=dict)
    tokens: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)


def rank_and_base(folder: Path) -> tuple[int, str]:
    """The largest rank of an adapter, by its file's header, and the name of its base model, "" for none. Raises as
    `read_adapter`."""
    with _named_errors(folder):
        values, file = _open(folder)
        parameters = _strings(Fields(values, str(folder / CONFIG_FILE)), "target_parameters")
        ranks = [
            entry.shape[0]
            for name, entry in file.tensors.items()
            if (found := _PAIR.fullmatch(name.removeprefix(_PREFIX)))
            and (found[2] == "A" and entry.shape and _parameter_of(found[1], parameters) == found[1])
        ]
        base = values.get("base_model_name_or_path")
        return max(_whole_rank(values), *ranks), base if isinstance(base, str) else ""


def read_adapter(folder: Path) -> PeftAdapter:
    """The adapter in a folder, scaled, float32.

    Raises `ConfigError` and `WeightsError`, naming file, field or tensor, and what to do.
    """
    with _named_errors(folder):
        return _read(folder)


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{str(folder)!r:.300}: cannot be read ({error.strerror})") from None


def _open(folder: Path) -> tuple[dict[str, Any], SafetensorsFile]:
    """The config of an adapter, and its file of tensors."""
    path = folder / CONFIG_FILE
    if folder.is_file():
        raise ConfigError(
            f"{folder}: is a file, but no GGUF; an adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a"
            " GGUF file"
        )
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    if not path.is_file():
        raise ConfigError(f"{path}: the file is missing; an adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    values, weights = read_json_object(path), folder / WEIGHTS_FILE
    if not weights.is_file() and (folder / "adapter_model.bin").is_file():
        raise WeightsError(
            f"{weights}: the file is missing; adapter_model.bin is a pickle, which may run code, and is not read: save"
            " the adapter again (peft: `save_pretrained`)"
        )
    return values, SafetensorsFile(weights)


def _read(folder: Path) -> PeftAdapter:
    values, file = _open(folder)
    scale_of, token_ids = _read_config(Fields(values, str(folder / CONFIG_FILE)), values)
    weights = file.path
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    halves: dict[str, dict[str, Array]] = {}
    saved: dict[str, Array] = {}
    tokens: dict[str, tuple[Array, Array]] = {}
    for name in sorted(file.tensors):
        module, part = _module_of(weights, name)
        entry = file.tensors[name]
        if entry.dtype not in _FLOATS:
            raise WeightsError(f"{weights}: {name} is {entry.dtype}, must be one of {', '.join(_FLOATS)}")
        stored = file.array(name)
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        digest.update(stored.reshape(-1).view(np.uint8).data)
        array = stored.astype(np.float32)
        if not np.isfinite(array).all():
            raise WeightsError(f"{weights}: {name} holds NaN or infinity: the adapter is broken")
        if part == _TOKENS:
            tokens[module] = token_ids(module), array
        elif part in ("weight", "bias"):
            saved[f"{module}.{part}"] = array
        else:
            halves.setdefault(module, {})[part] = array
    if not (halves or saved or tokens):
        raise WeightsError(f"{weights}: holds no pair lora_A, lora_B")
    pairs = {module: _pair_of(weights, module, parts, scale_of) for module, parts in halves.items()}
    return PeftAdapter(digest.hexdigest(), pairs, saved, tokens)


def _read_config(fields: Fields, values: Mapping[str, Any]) -> tuple[_ScaleOf, Callable[[str], Array]]:
    """Checks the config; gives the scale of a module, and the numbers of a table's trained rows."""
    kind = fields.raw("peft_type")
    if kind != "LORA":
        advice = _NO_MERGE if kind in _UNMERGEABLE else MERGE
        raise fields.error("peft_type", f"is {kind!r:.60}, must be 'LORA': {advice}")
    for name, what in _MUST_BE_OFF.items():
        if fields.raw(name):
            advice = _NO_MERGE if name in _UNMERGEABLE else MERGE
            raise fields.error(name, f"is {values[name]!r:.60}: {what} cannot be served as an adapter; {advice}")
    start = fields.raw("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CONVERTED):
        raise fields.error(
            "init_lora_weights",
            f"is {start!r:.60}, which changes the base model's weights: convert the adapter when it is saved (peft:"
            " `save_pretrained(path_initial_model_for_weight_conversion=...)`)",
        )
    for name in _HARMLESS:
        fields.raw(name)
    rank, alpha = fields.integer("r"), fields.number("lora_alpha", 8.0)
    ranks, alphas = (_patterns(fields, name) for name in ("rank_pattern", "alpha_pattern"))
    has_root = fields.boolean("use_rslora", False)
    parameters, trained = _strings(fields, "target_parameters"), _token_ids(fields)
    fields.refuse_unread(lambda _, value: value in ({}, [], False), f": {MERGE}")

    def scale_of(module: str, found_rank: int) -> float:
        name = _parameter_of(module, parameters)
        own, own_alpha = _of_pattern(ranks, name, rank), _of_pattern(alphas, name, alpha)
        if own != found_rank and (name == module or not own or found_rank % own):  # a parameter's are all experts'
            raise ConfigError(f"{fields.where}: {module} has rank {found_rank}, r and rank_pattern say {own:g}")
        return own_alpha / (math.sqrt(own) if has_root else own)

    def token_ids(module: str) -> Array:
        for name, ids in trained.items():
            if not name or module == name or module.endswith(f".{name}"):
                return ids
        raise fields.error("trainable_token_indices", f"names no rows of {module}, which has some in {WEIGHTS_FILE}")

    return scale_of, token_ids


def _token_ids(fields: Fields) -> dict[str, Array]:
    """The numbers of trained rows by the table's name, or of any, ""."""
    given = fields.raw("trainable_token_indices") or {}
    found = given if isinstance(given, dict) else {"": given}
    for ids in found.values():
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < 1 << 31 for each in ids):
            raise fields.error(
                "trainable_token_indices", f"is {given!r:.60}, must be token ids, or lists of them by name"
            )
        if len(set(ids)) != len(ids):
            raise fields.error("trainable_token_indices", f"is {given!r:.60}, has an id twice")
    return {name: np.array(ids, np.int32) for name, ids in found.items()}


def _whole_rank(values: Mapping[str, Any]) -> int:
    """The largest rank by the config."""
    patterns = values.get("rank_pattern")
    given = [values.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    return max((each for each in given if type(each) is int), default=1)


def _parameter_of(module: str, parameters: Sequence[str]) -> str:
    """The name of the parameter that a module of an adapter stands for, one of `target_parameters`; else the module's.
    The innermost of several comes first in the model."""
    name = module.removesuffix(".base_layer")
    depth = 0
    while name != module:
        module, name, depth = name, name.removesuffix(".base_layer"), depth + 1
    owners = ((each.rpartition(".")[0], each.rpartition(".")[2]) for each in parameters)
    found = {leaf for owner, leaf in owners if f".{module}".endswith(f".{owner or _OWNER}")}
    ordered = sorted(found, key=lambda leaf: ("down" in leaf or "output" in leaf, leaf))
    return f"{module}.{ordered[-1 - depth]}" if len(ordered) > depth else module


def _strings(fields: Fields, name: str) -> list[str]:
    given = fields.raw(name) or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise fields.error(name, f"is {given!r:.60}, must be a list of names")
    return given


def _patterns(fields: Fields, name: str) -> list[tuple[Callable[[str], bool], float]]:
    """Whether each of a config's regular expressions matches a module's name, and its number."""
    given = fields.raw(name) or {}
    if not isinstance(given, dict):
        raise fields.error(name, f"is {given!r:.60}, must be an object")
    made = []
    for pattern in given:
        number = Fields(given, f"{fields.where}: {name}").number(pattern)
        try:
            made.append((_matcher(pattern), number))
        except (PatternError, RecursionError) as error:
            raise fields.error(
                f"{name}[{pattern!r:.60}]", f"cannot be matched ({error!s:.200}): write the modules' names out"
            ) from None
    return made


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a pattern matches the end of a name, from a dot on, in time linear in the name's length."""
    if re.fullmatch(r"[\w.-]*", pattern):
        plain = re.compile(rf"(?:.*\.)?{pattern}\Z")
        return lambda name: plain.match(name) is not None
    linear = LinearPattern(rf"\A(?:.*\.)?(?:{pattern})\Z")
    return lambda name: next(linear.matches(name), None) is not None


def _of_pattern(patterns: list[tuple[Callable[[str], bool], float]], module: str, default: float) -> float:
    return next((number for matches, number in patterns if matches(module)), default)


def _module_of(path: Path, name: str) -> tuple[str, str]:
    """The module of a tensor, and which part of it: of its pair, the trained rows, or a retrained tensor."""
    if len(name) > MOST_NAME_CHARACTERS:
        raise WeightsError(f"{path}: a tensor's name has {len(name)} characters, the most is {MOST_NAME_CHARACTERS}")
    plain = name.removeprefix(_PREFIX)
    if (found := _PAIR.fullmatch(plain)) and (found[2], found[3]) != ("A", "bias"):
        return found[1], f"{found[2]}.{found[3]}"
    if found := _TABLE_PAIR.fullmatch(plain):
        return found[1], f"{found[2]}.weight"
    if found := _TRAINED.fullmatch(plain):
        return found[1], _TOKENS
    if "lora_" not in plain and (found := _SAVED.fullmatch(plain)):
        return (found[1], found[2]) if found[2] in ("weight", "bias") else (f"{found[1]}.{found[2]}", "bias")
    kind = "DoRA's" if "lora_magnitude_vector" in name else "no part of a LoRA pair"
    raise WeightsError(f"{path}: tensor {name!r:.200} is {kind}, which cannot be served as an adapter: {MERGE}")


def _pair_of(path: Path, module: str, parts: Mapping[str, Array], scale_of: _ScaleOf) -> Pair:
    """A module's pair from its float32 tensors, scaled."""
    for wanted in ("A.weight", "B.weight"):
        if wanted not in parts:
            raise WeightsError(f"{path}: {module} has no lora_{wanted}")
    down, up, bias = parts["A.weight"], parts["B.weight"], parts.get("B.bias")
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
        raise WeightsError(
            f"{path}: {module} has lora_A {list(down.shape)} and lora_B {list(up.shape)}, must be [r, inputs] and"
            " [outputs, r]"
        )
    if bias is not None and bias.shape != (len(up),):
        raise WeightsError(f"{path}: {module} has the lora_B.bias {list(bias.shape)}, must be [{len(up)}]")
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.float32(scale_of(module, len(down)))
        scaled = up * scale, None if bias is None else bias * scale
    if not all(np.isfinite(each).all() for each in scaled if each is not None):
        raise WeightsError(
            f"{path}: {module} holds infinity once scaled by {scale:g}, its lora_alpha over its rank: the adapter is"
            " broken"
        )
    return Pair(down, *scaled)
