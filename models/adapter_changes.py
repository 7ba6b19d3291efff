"""The changes that an adapter makes to a model: pairs of low rank, and what PEFT saves of retrained parts, as
differences from the base model's numbers.

Biases (`bias`), whole modules (`modules_to_save`, and copies of a token table that is adapted) and rows of the token
table (`trainable_token_indices`) may be retrained. A copy that equals the base model's changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.adapter_modules import MERGE, ModuleNames, in_own_order, resolve_modules
from models.base import Model
from models.checkpoints.checkpoint import Checkpoint
from models.errors import ConfigError
from models.peft import PeftAdapter, rank_and_base, read_adapter
from runtime.later import later
from runtime.linear.adapter_pairs import Change, Pair, Rows
from runtime.linear.low_rank import LowRankMaps

_gguf_adapter = later("models.gguf.adapter")
Array = np.ndarray[Any, Any]
Base = Callable[[], Checkpoint]
"""Opens the base model's tensors, by its own names."""


@dataclass(frozen=True, slots=True)
class ReadChanges:
    """An adapter's changes by the model's own modules, and the digest of its content."""

    digest: str
    pairs: Mapping[str, Change]


def read_changes(path: Path, maps: LowRankMaps, model: Model, base: Base) -> ReadChanges:
    """The changes of an adapter in PEFT's folder or in a GGUF file. Raises as `changes_of` and the readers."""
    if _gguf_adapter.is_gguf(path):
        return changes_of(_gguf_adapter.read_gguf_adapter(path, model.config.head_dim), maps, model, base)
    return changes_of(read_adapter(path), maps, model, base)


def largest_rank_and_base(path: Path) -> tuple[int, str]:
    """The largest rank of an adapter, and the name of its base model, "" if it names none. Raises as the readers."""
    return (_gguf_adapter.rank_of(path), "") if _gguf_adapter.is_gguf(path) else rank_and_base(path)


def changes_of(found: PeftAdapter, maps: LowRankMaps, model: Model, base: Base) -> ReadChanges:
    """An adapter's changes of a whole model, whose maps these are. Raises `ConfigError`, naming the module."""
    unused = model.harmless_tensors(model.config)
    resolved = resolve_modules(found.pairs, maps.modules, model.stacks, model.renames, unused)
    changes: dict[str, Change] = dict(in_own_order(resolved, model.own_order))
    if found.saved or found.tokens:
        _Retrained(maps, model, base(), changes).add(found)
    return ReadChanges(found.digest, changes)


class _Retrained:
    """Adds differences from the base model's numbers to an adapter's changes."""

    def __init__(self, maps: LowRankMaps, model: Model, base: Checkpoint, changes: dict[str, Change]) -> None:
        self._maps, self._model, self._base, self._changes = maps, model, base, changes
        self._names = ModuleNames(maps.modules, model.stacks, model.renames)
        self._table, self._head = (None if each is None else each.name for each in (maps.table, maps.head))

    def add(self, found: PeftAdapter) -> None:
        for name, array in found.saved.items():
            module, _, part = name.rpartition(".")
            own = self._names.known(module)
            if own in self._maps.modules and part in ("weight", "bias"):
                self._add_saved(own, part, array)
            elif own in self._names.rows and part in ("weight", "bias"):
                for each, rows in self._names.rows[own].rows():
                    self._add_saved(each.removesuffix(".weight"), part, array[rows])
            else:
                self._expect_same(name, own, part, array)
        for module, (ids, values) in found.tokens.items():
            own = self._names.find(module)
            both, named = {own}, {self._names.known(each) for each in found.tokens}
            if own == self._table and self._is_tied and self._head not in named:
                both.add(self._head or own)
            for each in both:
                old = self._old(f"{own}.weight", ids)
                if old is None or old.shape != values.shape:
                    raise ConfigError(
                        f"the adapter's trained tokens of {module} are {list(values.shape)}, for {len(ids)} ids up to"
                        f" {ids.max(initial=0)}: the adapter is for another model"
                    )
                self._put(each, module, Rows(ids, values - old))

    @property
    def _is_tied(self) -> bool:
        return bool(self._model.config.tie_word_embeddings)

    def _old(self, name: str, rows: Array | None = None) -> Array | None:
        """A tensor of the base model, or rows of it, in float32; None if there is none, or it lacks a row."""
        stored = self._base.tensors.get(name)
        if stored is None and self._head is not None and name == f"{self._head}.weight":
            stored = self._base.tensors.get(f"{self._table}.weight")
        if stored is None or (rows is not None and len(rows) and int(rows.max()) >= stored.shape[0]):
            return None
        array = stored.array()
        return np.asarray(array if rows is None else array[rows], np.float32)

    def _add_saved(self, own: str, part: str, array: Array) -> None:
        old, (rows, columns) = self._old(f"{own}.{part}"), self._model.own_order(own)
        if old is None:
            raise ConfigError(
                f"the adapter has a retrained {own}.{part}, the model none: the adapter is for another one"
            )
        if part == "weight" and own in (self._table, self._head):
            if array.ndim != 2 or array.shape[1] != old.shape[1] or len(array) > len(old):
                raise ConfigError(
                    f"the adapter's {own}.weight is {list(array.shape)}, the model's {list(old.shape)}: adapters that"
                    f" add tokens are not served; {MERGE}"
                )
            change = array - old[: len(array)]
            ids = np.flatnonzero(change.any(axis=1)).astype(np.int32)
            if len(ids):
                self._put(own, own, Rows(ids, change[ids]))
            return
        if array.shape != old.shape:
            raise ConfigError(
                f"the adapter's {own}.{part} is {list(array.shape)}, the model's {list(old.shape)}: the adapter is for"
                " another model"
            )
        array = array if rows is None else array[rows]
        array = array if columns is None or array.ndim < 2 else array[:, columns]
        change = array - old
        if not change.any():
            return
        outputs, inputs = self._maps.modules[own]
        pair = self._changes.get(own, Pair(np.zeros((0, inputs), np.float32), np.zeros((outputs, 0), np.float32)))
        assert isinstance(pair, Pair), "a map has pairs"
        if part == "bias":
            self._changes[own] = pair._replace(bias=change if pair.bias is None else pair.bias + change)
            return
        if change.shape != (outputs, inputs) or (change.shape == change.shape[::-1] and self._is_transposed(own)):
            change = change.T
        if len(pair.down):
            raise ConfigError(f"the adapter has a pair of {own} and its retrained weight, too: {MERGE}")
        same = np.eye(min(outputs, inputs), dtype=np.float32)
        down, up = (same, change) if inputs <= outputs else (change, same)
        self._changes[own] = Pair(down, up, pair.bias)

    def _is_transposed(self, own: str) -> bool:
        return own in self._maps.transposed

    def _put(self, own: str, module: str, change: Rows) -> None:
        if own in self._changes:
            raise ConfigError(f"the adapter changes {module} twice, by a pair and by retrained rows: {MERGE}")
        self._changes[own] = change

    def _expect_same(self, name: str, own: str, part: str, array: Array) -> None:
        """Refuses a retrained tensor that belongs to no map, unless it is the base model's."""
        old = self._old(name)
        old = self._old(f"{own}.{part}") if old is None else old
        if old is None or old.shape != array.shape or not np.array_equal(old, array):
            raise ConfigError(
                f"the adapter has a retrained {name}, which is of no linear map, token table or head: {MERGE}"
            )
