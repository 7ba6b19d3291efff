"""A model in one GGUF file, or in `gguf-split`'s shards, as `ModelFiles`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.stored_tensor import StoredTensor
from models.configuration.json_fields import Fields
from models.configuration.overrides import overridden
from models.errors import ConfigError, WeightsError
from models.gguf.architectures import FUSED, GgufArchitecture
from models.gguf.config import config_values, find_architecture, plain
from models.gguf.encoders import DENSE_PARTS, pooling_of
from models.gguf.mmproj import find_mmproj
from models.gguf.reader import GgufFile, GgufTensor
from models.gguf.weights import GgufHeadMaps, GgufNumber, GgufWeight, Rearranged
from runtime.pooling import Pooling
from tokenizer.ends import EndTokens
from tokenizer.errors import TokenizerFileError
from tokenizer.gguf.vocabulary import GgufVocabulary
from tokenizer.loading import TokenizerFiles

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read with the config
PERMUTED = ("attn_q", "attn_k", "attn_qkv")
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


class GgufModel:
    """The files of a model in GGUF; see `models.checkpoints.model_files.ModelFiles`.

    Raises `WeightsError` and `ConfigError`, naming file, key or tensor, and value, for what is malformed, missing or
    not supported.
    """

    def __init__(self, path: Path, overrides: str = "", mmproj: str = "") -> None:
        self.path = path
        self._overrides = overrides
        self._shards = _open_shards(path)
        self._first = self._shards[0]
        self._tower = find_mmproj(self._first, mmproj, find_architecture(self._first).pictures)

    def config(self) -> Fields:
        """The equivalent fields of a config.json."""
        factors = {name: plain(file.array(name)) for name in _FACTORS if (file := self._file_of.get(name))}
        values = config_values(self._first, self._tensors, factors)
        if self._tower is not None:
            values = self._tower.with_text(values, self._first)
        return Fields(overridden(values, self._overrides), str(self.path))

    def preprocessor(self) -> Fields | None:
        """The equivalent of a preprocessor_config.json; None if the model reads text alone."""
        return None if self._tower is None else self._tower.preprocessor()

    def generation_config(self) -> Fields:
        """The fields of a generation_config.json: end-of-answer ids, and the recommended sampling."""
        values: dict[str, Any] = {}
        if self.has_tokenizer():
            try:
                vocabulary = self._vocabulary()
                ids = {"bos": vocabulary.bos_id(), "eos": list(vocabulary.end_ids()), "pad": vocabulary.pad_id()}
            except TokenizerFileError as error:
                raise ConfigError(str(error)) from None
            values = {f"{name}_token_id": value for name, value in ids.items()}
        if (suppressed := self._first.metadata.get("tokenizer.ggml.suppress_tokens")) is not None:
            values["suppress_tokens"] = plain(suppressed)
        for name, ours in _SAMPLING.items():
            if (value := self._first.metadata.get(f"general.sampling.{name}")) is not None:
                values[ours] = plain(value)
        return Fields(values, str(self.path))

    def end_tokens(self) -> EndTokens | None:
        return None

    def checkpoint(self) -> Checkpoint:
        """The tensors, under the names and in the rows of the model's safetensors."""
        rules, config = find_architecture(self._first), self.config()
        if self._tower is not None:
            config = config.object("text_config")
        head_dim = config.integer("head_dim", 0)
        num_experts = config.integer("num_experts", 0) or config.integer("n_routed_experts", 0)
        num_experts = num_experts or config.integer("moe_num_experts", 0)
        heads = sum(config.integer(f"num_{name}_heads", 0) for name in ("attention", "key_value"))
        tensors: dict[str, StoredTensor] = dict(self._layer_numbers(rules, config.integer("num_hidden_layers", 0)))
        for name, file in self._file_of.items():
            if name in _FACTORS or name.rpartition(".")[0] in DENSE_PARTS or self._is_scale(name):
                continue
            part, ours = part_of(name), name_in_checkpoint(name, rules)
            if "{keys}" in ours or "{values}" in ours:
                tensors[ours.replace(".{keys}", "").replace(".{values}", "")] = self._head_maps(name)
                continue
            indices: list[int | None] = [None]
            if "{expert}" in ours and (num_experts != 1 or len(file.tensors[name].shape) > 2):  # else the only expert
                _check_stack(file, name, num_experts)
                indices = list(range(num_experts))
            for index in indices:
                tensors[ours.format(expert=index or 0)] = GgufWeight(
                    file, name, index, factor=self._factor(name, index),
                    pairs_of=head_dim if rules.has_permuted_heads and part in PERMUTED else 0,
                    rotated_rows=heads * head_dim if part == "attn_qkv" else None,
                    norm_offset=rules.norm_offset
                    if ours.endswith("norm.weight") and part not in rules.plain_norms else 0.0,
                    is_transposed=part in rules.transposed and name.endswith(".weight"),
                    is_convolution=part in rules.convolutions and name.endswith(".weight"),
                    is_flat=part in rules.flat, is_decay=part in rules.decays,
                )  # fmt: skip
                if part in rules.differences and file.tensors[name].shape[0] == 2:
                    shape = (1, *file.tensors[name].shape[1:])
                    tensors[ours] = Rearranged(GgufWeight(file, name), shape, lambda rows: rows[:1] - rows[1:])
        if self._tower is not None:
            tensors = {re.sub("^model[.]", "model.language_model.", name): each for name, each in tensors.items()}
            tensors |= self._tower.tensors()
        return Checkpoint(self.path, self.path.name, tensors)

    def _is_scale(self, name: str) -> bool:
        """Whether the tensor is the scale of an NVFP4 one, or of the x that its product was calibrated for."""
        stem, _, kind = name.rpartition(".")
        weight = self._tensors.get(f"{stem}.weight")
        return kind in ("scale", "input_scale") and weight is not None and weight.format.name == "NVFP4"

    def _factor(self, name: str, index: int | None) -> float:
        """The factor of an NVFP4 tensor, or of one that is stacked in it."""
        scale = f"{name.removesuffix('.weight')}.scale"
        if scale not in self._file_of or not self._is_scale(scale):
            return 1.0
        values = self._file_of[scale].array(scale).reshape(-1)
        if len(values) != (1 if index is None else self._tensors[name].shape[0]) or not np.isfinite(values).all():
            raise WeightsError(f"{self.path}: tensor {scale!r} must have one finite number for each matrix of {name!r}")
        return float(values[index or 0])

    def _layer_numbers(self, rules: GgufArchitecture, num_layers: int) -> Iterator[tuple[str, StoredTensor]]:
        """The tensors that are numbers of the metadata, by name."""
        for key, (name, shape) in rules.layer_numbers.items():
            values = np.atleast_1d(np.asarray(self._first.metadata.get(key, [])))
            if len(values) == 1:
                values = np.repeat(values, num_layers)  # one for all
            if len(values) not in (0, num_layers) or values.dtype.kind != "f":
                raise self._first.error(f"{key} must have a number for each of {num_layers} layers, not {values!r:.80}")
            for layer, value in enumerate(values):
                yield f"{rules.names['blk']}.{layer}.{name}", GgufNumber(self.path.name, key, value, shape)

    def _head_maps(self, name: str) -> GgufHeadMaps:
        """The map that this tensor is one of two parts of."""
        names = [name.replace("attn_v_b", "attn_k_b"), name.replace("attn_k_b", "attn_v_b")]
        for part in names:
            if part not in self._file_of:
                raise WeightsError(f"{self.path}: tensor {part!r} is missing, but there is {name!r}")
        keys, values = (GgufWeight(self._file_of[part], part) for part in names)
        return GgufHeadMaps(keys, values)

    def pooling(self) -> Pooling | None:
        """The pooling of hidden states that the file names, if any."""
        return pooling_of(self._first.metadata, str(self.path))

    def embedding_maps(self) -> list[np.ndarray[Any, Any]]:
        """The maps between a pooled row and a vector, in order: `[outputs, inputs]`."""
        names = (f"{part}.weight" for part in DENSE_PARTS)
        return [np.array(file.array(name), np.float32) for name in names if (file := self._file_of.get(name))]

    def pair_template(self) -> str:
        """The text of a query and a document for a reranker; empty if the file has none."""
        template = self._first.metadata.get("tokenizer.chat_template.rerank", "")
        return template if isinstance(template, str) else ""

    def has_tokenizer(self) -> bool:
        """Whether the file has a vocabulary."""
        return self._first.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")

    def tokenizer_files(self) -> TokenizerFiles | None:
        """The equivalent of a tokenizer's folder; None if the file has no vocabulary."""
        return self._vocabulary().files() if self.has_tokenizer() else None

    def _vocabulary(self) -> GgufVocabulary:
        return GgufVocabulary(self._first.metadata, str(self.path))

    @cached_property
    def _file_of(self) -> dict[str, GgufFile]:
        return {name: file for file in self._shards for name in file.tensors}

    @property
    def _tensors(self) -> Mapping[str, GgufTensor]:
        return {name: file.tensors[name] for name, file in self._file_of.items()}


def part_of(name: str) -> str:
    """The part of a layer that a tensor is, such as "attn_q"; for other tensors the stem of the name."""
    if name.startswith("blk."):
        rest = name.split(".", 2)[-1]
        return rest.rpartition(".")[0] or rest
    return name.rpartition(".")[0]


def name_in_checkpoint(name: str, rules: GgufArchitecture) -> str:
    """The name in safetensors; an unknown name stays as it is, and fails the check for leftovers."""
    stem, _, kind = name.rpartition(".")
    if stem in rules.names:
        return f"{rules.names[stem]}.{kind}"
    part = part_of(name)
    if stem.startswith("blk."):
        under = f"{rules.names['blk']}.{stem.split('.')[1]}"
        if (whole := name.split(".", 2)[-1]) in rules.layer_names:
            return f"{under}.{rules.layer_names[whole]}"
        if part in rules.layer_names:
            return f"{under}.{rules.layer_names[part]}.{kind}"
        beside, fused = FUSED.get(part, ("", ""))
        if beside in rules.layer_names:
            return f"{under}.{rules.layer_names[beside].rpartition('.')[0]}.{fused}.{kind}"
    return name


def _check_stack(file: GgufFile, name: str, num_experts: int) -> None:
    """Raises `WeightsError` for a tensor that is no stack of so many."""
    stored = file.tensors[name].shape
    if len(stored) < 2 or stored[0] != num_experts:
        raise WeightsError(
            f"{file.path}: tensor {name!r} is {list(stored)}, but expert_count is {num_experts}, which its first size"
            " must be"
        )


def _open_shards(path: Path) -> list[GgufFile]:
    """The file, or all shards if it is the first of several."""
    first = GgufFile(path)
    count, number = (first.metadata.get(f"split.{name}", default) for name, default in (("count", 1), ("no", 0)))
    if count in (0, 1) or not isinstance(count, int):
        return [first]
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise first.error(f"split.count is {count}: the file must be called NAME-00001-of-{count:05}.gguf")
    names = [f"{match[1]}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    if number != 0:
        raise first.error(f"is shard {number} of {count}, counted from 0: give the first, {names[0]}")
    missing = [f"{name}: the file is missing" for name in names if not (path.parent / name).is_file()]
    if missing:
        raise WeightsError(f"{path}: split.count is {count}, but shards are missing:", missing)
    shards = [first, *(GgufFile(path.parent / name) for name in names[1:])]
    seen: set[str] = set()
    for i, shard in enumerate(shards):
        found = shard.metadata.get("split.no"), shard.metadata.get("split.count")
        if found != (i, count):
            raise shard.error(f"split.no and split.count are {found[0]!r} and {found[1]!r}, must be {i} and {count}")
        if twice := seen & shard.tensors.keys():
            raise shard.error(f"tensor {min(twice)!r} is stored in an earlier shard already")
        seen |= shard.tensors.keys()
    expected = first.metadata.get("split.tensors.count", len(seen))
    if expected != len(seen):
        raise first.error(f"split.tensors.count is {expected!r}, but the shards have {len(seen)} tensors")
    return shards
