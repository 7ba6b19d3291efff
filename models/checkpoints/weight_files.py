"""Finds the safetensors files with a folder's weights: one file, the shards that an index names, or, without an index,
all that are there.

`model.safetensors` counts before an index, as in transformers; files without an index are read as vLLM reads them. The
tensors of the files count, wherever an index places them. A deviation from transformers' layout is a warning that names
the files that were read.
"""

from __future__ import annotations

import re
from pathlib import Path

from models.checkpoints.checkpoint import Checkpoint, SafetensorsTensor, are_equal
from models.checkpoints.safetensors_file import SafetensorsFile
from models.configuration.json_fields import read_json_object
from models.errors import ConfigError, ModelLoadError, WeightsError
from runtime.later import later
from tokenizer.warn import warn_once

_other_formats = later("models.checkpoints.other_formats")  # of folders that are refused

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_OTHER_WEIGHTS = re.compile(r"adapter_.*|consolidated.*|.*optimizer.*|training_.*")
"""LoRA adapters, files of Mistral's own names for tensors, and what trainers keep."""


def open_checkpoint(folder: Path) -> Checkpoint:
    """Map the safetensors of a model folder.

    Raises `ModelLoadError` where there are none, and `WeightsError` or `ConfigError` for a malformed file or index, a
    missing shard, a shard outside the folder, and tensors of one name that differ.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_symlink() or single.exists():
        if index.is_file() and (others := sorted(set(_shards_of(index).values()) - {SINGLE_FILE})):
            some = ", ".join(others[:3]) + (" and others" if len(others) > 3 else "")
            warn_once(
                f"{folder}: {SINGLE_FILE} is taken, as transformers does; {INDEX_FILE}, which names {some}, is not"
                f" read: remove {SINGLE_FILE} to take its files"
            )
        return _of_files(folder, SINGLE_FILE, [SINGLE_FILE])
    if index.is_file():
        placed = _shards_of(index)
        checkpoint = _of_files(folder, INDEX_FILE, sorted(set(placed.values())), INDEX_FILE)
        if unnamed := checkpoint.tensors.keys() - placed.keys():
            warn_once(
                f"{folder}: {INDEX_FILE} does not name {len(unnamed)} tensors of its files, such as {min(unnamed)!r};"
                " they are read, as transformers does"
            )
        return checkpoint
    names = sorted(path.name for path in folder.glob("*.safetensors") if not _OTHER_WEIGHTS.fullmatch(path.name))
    if not names:
        raise ModelLoadError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}; {_other_formats.remedy(folder)}")
    series = {(shard[1], shard[3]) for name in names if (shard := _SHARD.fullmatch(name))}
    if len(series) == 1:
        ((stem, count),) = series
        digits = next(len(shard[2]) for name in names if (shard := _SHARD.fullmatch(name)))
        names = [f"{stem}-{i:0{digits}}-of-{count}.safetensors" for i in range(1, int(count) + 1)]
    some = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, {len(names)} files"
    warn_once(f"{folder}: there is neither {SINGLE_FILE} nor {INDEX_FILE}; the weights are read from {some}")
    return _of_files(folder, names[0], names)


def _shards_of(index: Path) -> dict[str, str]:
    """The file in which an index places each tensor."""
    placed = read_json_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ConfigError(f"{index}: weight_map must be an object of tensor names and file names")
    for name, shard in placed.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise ConfigError(
                f"{index}: weight_map places {name!r} in {shard!r:.200}, which is no file name of this folder"
            )
    return placed


def _of_files(folder: Path, label: str, names: list[str], index: str = "") -> Checkpoint:
    """The tensors of these files; `label` names a tensor that is missing, `index` says where the names are from."""
    if missing := [f"{name}: {_absence(folder / name)}" for name in names if not (folder / name).is_file()]:
        whose = f"shards named in {index}" if index else "shards" if len(names) > 1 else "weights"
        raise WeightsError(f"{folder}: {whose} are missing:", missing)
    tensors: dict[str, SafetensorsTensor] = {}
    problems = []
    for name in names:
        file = SafetensorsFile(folder / name)
        for tensor in file.tensors:
            found = SafetensorsTensor(file, tensor)
            first = tensors.setdefault(tensor, found)
            if first is not found and not are_equal(first.array(), found.array()):
                problems.append(f"{name}: tensor {tensor!r} is stored in {first.file} already, with other numbers")
    if problems:
        raise WeightsError(
            f"{folder}: files contradict each other: leave only those of one model in the folder:", problems
        )
    if (folder / "adapter_config.json").is_file():
        warn_once(
            f"{folder}: adapter_config.json is not read: the answers are those of the weights alone, without the LoRA"
            " adapter; merge it (peft: `merge_and_unload`, then `save_pretrained`) to have both"
        )
    return Checkpoint(folder, label, tensors)


def _absence(path: Path) -> str:
    if path.is_dir():
        return "is a folder, not a file"
    return f"is a link to {path.readlink()}, which is not there" if path.is_symlink() else "the file is missing"


def _is_plain_name(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\:\0")
