"""Builds a drafter from its constructor and files: declared first, so that its checkpoint is checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol, TypeVar

from models.base import Model
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.dummy import dummy_checkpoint
from models.configuration.json_fields import Fields
from models.makers.declaring_maker import DeclaringMaker
from models.makers.loading_maker import LoadingMaker
from models.makers.maker import Maker
from runtime.dtype import DType
from runtime.linear.options import LoadOptions, LoadSettings


class _Weighty(Protocol):
    weight_bytes: int


D = TypeVar("D", bound=_Weighty)
NO_RENAMES: Mapping[str, str] = MappingProxyType({})


def options_of(target: Model, settings: LoadSettings) -> LoadOptions:
    """Load options of a drafter's weights, which share the device with the model's and have no addends."""
    options = LoadOptions.parse(**settings)
    if options.device.kind != "cpu":
        return LoadOptions(device=options.device, dtype=target.dtype, exact=options.exact)
    return replace(options, addends=None)


def check_fit(fields: Fields, target: Model, *, vocab_size: int, target_hidden_size: int) -> None:
    """Raises `ConfigError` where a drafter was trained for another model."""
    sizes = target.config.vocab_size, target.config.hidden_size
    for name, own, wanted in zip(("vocab_size", "target_hidden_size"), (vocab_size, target_hidden_size), sizes):
        if own != wanted:
            raise fields.error(name, f"= {own}, but the model has {wanted}")


def make_drafter(
    make: Callable[[Maker], D], checkpoint: Checkpoint | None, options: LoadOptions, positions: int, *,
    prefix: str, harmless: re.Pattern[str], renames: Mapping[str, str] = NO_RENAMES, dummy_dtype: DType, seed: int,
    declares: bool,
) -> D:  # fmt: skip
    """The drafter that ``make`` builds from a checkpoint, or from dummy weights if it is None; or only declared.
    Raises `WeightsError` for a checkpoint that does not hold exactly its tensors."""
    main_dtype = options.dtype or dummy_dtype if checkpoint is None else checkpoint.main_dtype()
    declaring = DeclaringMaker(options, positions, main_dtype)
    declared = make(declaring)
    layout = declaring.layout(prefix, harmless, renames)
    if checkpoint is None:
        source = dummy_checkpoint(layout, seed, main_dtype)
    else:
        checkpoint.fit(layout)
        checkpoint.check_numbers()
        source = checkpoint
    if source.main_dtype() is not main_dtype:  # the model's tensors in the same files have another type
        declaring = DeclaringMaker(options, positions, source.main_dtype())
        declared = make(declaring)
    if declares:
        declaring.settle(source)
        declared.weight_bytes = declaring.size_bytes
        return declared
    loading = LoadingMaker(options, positions, source)
    drafter = make(loading)
    drafter.weight_bytes = loading.size_bytes
    return drafter
