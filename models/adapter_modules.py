"""Finds an adapter's modules in a model: by their names, or by their places in a layer, since classes around a decoder
name it in several ways. Modules that the model keeps in parts give each part its own.

PEFT adapts all experts of a layer at once where they are one parameter, `[E, N, K]` or `[E, K, N]`: `lora_A [E r, in]`
has the ranks of one expert after those of another, `lora_B [out, r E]` the experts of one rank after those of another.
Both of a layer's parameters are of one module: the first is called `<module>.base_layer`. Their shapes tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from models.checkpoints.stacked import RowStack, Stack
from models.errors import ConfigError
from runtime.linear.adapter_pairs import Pair

Array = np.ndarray[Any, Any]
Stacks = Mapping[str, Stack | RowStack]

_TABLES = ("embed_tokens", "wte", "lm_head", "embed_out", "embed_in", "tok_embeddings", "word_embeddings", "embeddings")

MERGE = "merge the adapter (peft: `merge_and_unload`, then `save_pretrained`) and serve the merged folder"


def resolve_modules(
    pairs: Mapping[str, Pair], modules: Collection[str], stacks: Stacks = MappingProxyType({}),
    renames: Mapping[str, str] = MappingProxyType({}), unused: re.Pattern[str] | None = None,
) -> dict[str, Pair]:  # fmt: skip
    """The pairs by a model's own names of their modules: as they are, as `renames` say (`Model.renames`), or with
    another beginning before the number of the layer. A module that the model keeps in parts, one of its stacks, gives
    each part its rows, or each expert its pair. Modules of `unused` tensors, such as layers of a tower after the one
    that is read, are left out. Raises `ConfigError` for a module that the model lacks, or that takes no adapters."""
    names = ModuleNames(modules, stacks, renames)
    resolved: dict[str, Pair] = {}
    for module, pair in pairs.items():
        if unused is not None and names.is_unused(module, unused):
            continue
        if not len(pair.up) or (not pair.down.shape[1] and pair.bias is None):
            continue  # an empty map, such as that of shared experts where there are none
        for own, part in _parts_of(module, pair, names):
            if own in resolved:
                raise ConfigError(f"the adapter's module {module} is {own}, for which it has another pair")
            resolved[own] = part
    return resolved


class ModuleNames:
    """A model's modules, those that checkpoints may store together, and all experts' of a layer, by what ends them."""

    def __init__(self, modules: Collection[str], stacks: Stacks, renames: Mapping[str, str]) -> None:
        self.modules, self._renames = modules, renames
        self.rows = {
            name.removesuffix(".weight"): stack
            for name, stack in stacks.items()
            if isinstance(stack, RowStack) and not name.endswith(".bias")
        }
        self.experts: dict[str, dict[str, Stack]] = {}  # by the module that PEFT names
        for name, stack in stacks.items():
            if isinstance(stack, Stack) and len(stack.shape) == 3:
                for module in {name.rpartition(".")[0], name.removesuffix(".weight"), stack.under}:
                    self.experts.setdefault(module, {})[name] = stack
        self._by_end: dict[str, list[str]] = {}
        for own in {*modules, *self.rows, *self.experts}:
            self._by_end.setdefault(_end_of(own), []).append(own)

    def find(self, module: str) -> str:
        """The model's own name of a module. Raises `ConfigError`."""
        known = self._found(module)
        if len(known) != 1:
            found = f"names several of the model's: {', '.join(sorted(known)[:3])}" if known else _absence(module)
            raise ConfigError(f"the adapter's module {module} {found}")
        return known[0]

    def is_unused(self, module: str, unused: re.Pattern[str]) -> bool:
        """Whether the model has no such module, and leaves out its tensor."""
        return not self._found(module) and any(unused.fullmatch(f"{each}.weight") for each in self._spellings(module))

    def known(self, module: str) -> str:
        """The same, or the given name if the model has no such module, or several."""
        known = self._found(module)
        return known[0] if len(known) == 1 else module

    def _found(self, module: str) -> list[str]:
        known: list[str] = []
        for name in self._spellings(module):
            if name in self.modules or name in self.rows or name in self.experts:
                return [name]
            known = known or self._by_end.get(_end_of(name), [])
        return known

    def _spellings(self, module: str) -> Iterator[str]:
        """The name, and as the model's class renames it."""
        yield module
        for old, new in self._renames.items():
            renamed = f"{module}.".replace(old, new).removesuffix(".")
            renamed = renamed.replace(old.removesuffix(".weight"), new.removesuffix(".weight"))
            if renamed != module:
                yield renamed


def _parts_of(module: str, pair: Pair, names: ModuleNames) -> Iterator[tuple[str, Pair]]:
    """The pairs of the model's modules that a module of an adapter is."""
    name, is_first = re.subn(r"(?:\.base_layer)+$", "", module)
    own = names.find(name)
    if own in names.experts and own not in names.modules:
        yield from _experts_of(module, pair, names.experts[own])
    elif is_first:
        raise ConfigError(f"the adapter's module {module} is a parameter of experts, which the model has not")
    elif own in names.modules:
        yield own, pair
    else:
        stack = names.rows[own]
        if len(pair.up) != stack.shape[0]:
            raise ConfigError(
                f"the adapter's module {module} has {len(pair.up)} outputs, the model's {stack.shape[0]}: the adapter"
                " is for another model"
            )
        for part, rows in stack.rows():
            bias = None if pair.bias is None else pair.bias[rows]
            yield part.removesuffix(".weight"), Pair(pair.down, pair.up[rows], bias)


def _experts_of(module: str, pair: Pair, stacks: Mapping[str, Stack]) -> Iterator[tuple[str, Pair]]:
    """Each expert's pairs of a pair for all."""
    for stack in stacks.values():
        count, outputs, inputs = stack.turned_shape
        for down, up in ((pair.down, pair.up), (pair.up.T, pair.down.T)):
            # PEFT takes parameters that are stored inputs first for such with outputs first.
            if down.shape[1] == inputs and len(up) == outputs and len(down) % count == 0:
                yield from _each_expert(stack, down, up, is_turned=down is not pair.down)
                return
    shapes = " or ".join(str(list(each.turned_shape[1:])) for each in stacks.values())
    counts = {each.shape[0] for each in stacks.values()}
    raise ConfigError(
        f"the adapter's module {module} has lora_A {list(pair.down.shape)} and lora_B {list(pair.up.shape)}, must be"
        f" for {' or '.join(map(str, counts))} experts of {shapes}: the adapter is for another model"
    )


def _each_expert(stack: Stack, down: Array, up: Array, *, is_turned: bool) -> Iterator[tuple[str, Pair]]:
    count, outputs, inputs = stack.turned_shape
    if is_turned:  # down [r E, K] has experts within a rank, up [N, E r] has ranks within an expert
        downs = down.reshape(-1, count, inputs).swapaxes(0, 1)
        ups = up.reshape(outputs, count, -1).swapaxes(0, 1)
    else:
        downs = down.reshape(count, -1, inputs)
        ups = up.reshape(outputs, -1, count).transpose(2, 0, 1)
    for name, expert, rows in stack.names():
        yield name.removesuffix(".weight"), Pair(downs[expert], ups[expert][rows])


def in_own_order(
    pairs: Mapping[str, Pair], order_of: Callable[[str], tuple[Array | None, Array | None]]
) -> dict[str, Pair]:
    """Resolved pairs with rows and columns where the model has them (`Model.own_order`)."""
    ordered: dict[str, Pair] = {}
    for module, (down, up, bias) in pairs.items():
        rows, columns = order_of(module)
        if rows is not None:
            up, bias = up[rows], None if bias is None else bias[rows]
        ordered[module] = Pair(down if columns is None else down[:, columns], up, bias)
    return ordered


def _absence(module: str) -> str:
    if module.rpartition(".")[2] in ("score", "classifier"):
        return f"is a head of classes, which are the base model's: {MERGE}"
    return "is none of the model's: the adapter is for another model"


def _end_of(module: str) -> str:
    """The name from the last `layers`, `h` or `blocks` with a number on, or of a token table its last part."""
    last = module.rpartition(".")[2]
    if last in _TABLES:
        return last
    found = re.search(r".*(?:^|\.)(?:layers|h|blocks|layer)\.(\d+\..+)", module)
    is_tower = re.search(r"vision|visual", module) is not None
    return f"{'vision ' if is_tower else ''}{found[1]}" if found else module
