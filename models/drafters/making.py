"""The parts that EAGLE-3 and DFlash drafters share, and the building of any drafter from its constructor and files:
declared first, so that its checkpoint is checked.

A drafter's token table and output head are its own or the model's. The head may know fewer tokens than the model: `d2t`
is what is added to each of its ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from models.base import Model
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.dummy import dummy_checkpoint
from models.checkpoints.model_files import open_model
from models.configuration.json_fields import Fields
from models.decoder import Decoder
from models.errors import ConfigError, ModelLoadError, WeightsError
from models.families.llama import LlamaConfig
from models.makers.declaring_maker import DeclaringMaker
from models.makers.loading_maker import LoadingMaker
from models.makers.maker import Maker
from runtime import ops
from runtime.dtype import DType, float32
from runtime.kv.cache import KVCacheSpec
from runtime.linear.linear import Linear
from runtime.linear.options import LoadOptions, LoadSettings
from runtime.tensor.tensor import Tensor


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


@dataclass(frozen=True, slots=True)
class StoredEnds:
    """The table and head of a drafter's checkpoint.

    Attributes:
        has_table, has_head: else the model's are used.
        hidden_size, draft_vocab_size: their sizes; the table has all of the model's tokens.
        token_ids: `[draft_vocab_size]` int32, the model's id of each token of the head, or None if they are the same.
    """

    has_table: bool
    has_head: bool
    hidden_size: int
    draft_vocab_size: int
    token_ids: NDArray[np.int32] | None


def read_ends(
    checkpoint: Checkpoint | None, folder: Path, target: Model, *, hidden_size: int, draft_vocab_size: int
) -> StoredEnds:
    """The ends in that folder's checkpoint; None if the weights are dummies. Raises `WeightsError` for a missing tensor
    that cannot be the model's, and for a wrong `d2t`."""
    names = [] if checkpoint is None else [name.removeprefix("model.") for name in checkpoint.tensors]
    has_table, has_head = "embed_tokens.weight" in names, "lm_head.weight" in names
    vocab_size, width = target.config.vocab_size, target.config.hidden_size
    token_ids = _token_ids(checkpoint, draft_vocab_size, vocab_size)
    if not has_head and draft_vocab_size != vocab_size:
        if checkpoint is not None:
            raise WeightsError(
                f"{folder}: tensor 'lm_head.weight' is missing, and the model's head knows {vocab_size}"
                f" tokens, draft_vocab_size is {draft_vocab_size}"
            )
        has_head = True
    for name, has in (("embed_tokens.weight", has_table), ("lm_head.weight", has_head)):
        if not has and hidden_size != width:
            what = "table" if name.startswith("embed") else "head"
            raise WeightsError(
                f"{folder}: tensor {name!r} is missing, and the model's {what} is {width} wide, hidden_size is"
                f" {hidden_size}"
            )
    return StoredEnds(has_table, has_head, hidden_size, draft_vocab_size, token_ids)


class DraftEnds:
    """The table and the head that a drafter uses.

    Attributes:
        token_ids: see `StoredEnds`; None until `know`.
    """

    def __init__(self, maker: Maker, target: Decoder, stored: StoredEnds) -> None:
        self.token_ids: NDArray[np.int32] | None = None
        self._stored, self._target, self._device = stored, target, maker.options.device
        self._places: Tensor | None = None  # [vocab_size]: the head's id of each, or its number of ids
        self._table: Tensor | None = None
        if stored.has_table:
            self._table = maker.table("embed_tokens.weight", target.config.vocab_size, stored.hidden_size)
        self._head: Linear | None = None
        if stored.has_head:
            self._head = maker.linear("lm_head", outputs=stored.draft_vocab_size, inputs=stored.hidden_size)

    def know(self) -> None:
        """Copies the ids of the head's tokens to the device: once, before the first logits."""
        self.token_ids = self._stored.token_ids
        if self.token_ids is not None:
            count = len(self.token_ids)
            places = np.full(self._target.config.vocab_size, count, np.int32)
            places[self.token_ids] = np.arange(count, dtype=np.int32)
            self._places = Tensor.from_numpy(places).to(self._device)

    def embed(self, token_ids: Tensor, *, scale: float = 1.0) -> Tensor:
        """Rows of the table; ``scale`` is applied if the table is the model's."""
        if self._table is None:
            return ops.embedding(token_ids, self._target.embed_tokens, scale=scale)
        return ops.embedding(token_ids, self._table)

    def logits(self, normed: Tensor, bias: Tensor | None = None) -> Tensor:
        """`[n, hidden_size]` -> `[n, vocab_size]` float32; -inf for tokens that the head does not know. ``bias [n,
        draft_vocab_size]`` is added."""
        logits = self._target.compute_logits(normed) if self._head is None else self._head.logits(normed)
        if bias is not None:
            logits = ops.add_scaled(logits, bias, 1.0)
        if self._places is None:
            return logits
        count, known = logits.shape
        columns = Tensor.full((known + 1, count), -np.inf, float32, self._device)  # last: unknown tokens
        columns[:known] = logits.transpose(0, 1)
        return ops.gather_rows(columns, self._places).transpose(0, 1).contiguous()


def _token_ids(checkpoint: Checkpoint | None, count: int, vocab_size: int) -> NDArray[np.int32] | None:
    """The model's id of each of the head's ``count`` tokens, by `d2t`, or the first ones without a checkpoint; None if
    they are the same."""
    if checkpoint is None:
        return None if count == vocab_size else np.arange(count, dtype=np.int32)
    stored = checkpoint.tensors.get("d2t", checkpoint.tensors.get("model.d2t"))
    if stored is None:
        if count == vocab_size:
            return None
        raise WeightsError(
            f"{checkpoint.place}: tensor 'd2t' [{count}] is missing: draft_vocab_size is {count} of {vocab_size} tokens"
        )
    where = f"{checkpoint.place}: tensor {stored.name!r}"
    if stored.shape != (count,) or stored.type_name not in ("I64", "I32"):
        shape = list(stored.shape)
        raise WeightsError(f"{where} is {stored.type_name} {shape}, must be I64 or I32 [{count}]")
    offsets: NDArray[Any] = stored.array().astype(np.int64)
    ids = np.arange(count) + offsets
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size) | (np.abs(offsets) > vocab_size))
    if wrong.size:
        place = int(wrong[0])
        raise WeightsError(f"{where}[{place}] is {offsets[place]}: there is no token {ids[place]} of {vocab_size}")
    if np.unique(ids).size < count:
        raise WeightsError(f"{where} names a token twice")
    return None if count == vocab_size and not offsets.any() else ids.astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The configuration of a drafter with layers of its own.

    Attributes:
        decoder: of its layers.
        draft_vocab_size: tokens that its head knows.
        target_hidden_size: width of the model's hidden states.
        layers: of the model, after which it reads them, counted from 1; 0 for the embeddings.
    """

    decoder: LlamaConfig
    draft_vocab_size: int
    target_hidden_size: int
    layers: tuple[int, ...]


def begin_reading(
    fields: Fields, names: list[str], architectures: tuple[str, ...], kind: str, kinds: tuple[str, ...]
) -> Fields:
    """The fields of a drafter's layers: in `speculators`' layout those of an object. Raises `ConfigError` for `names`
    of other architectures, and for another kind of `speculators_model_type`."""
    if names and not set(names) & set(architectures):
        known = ", ".join(architectures)
        raise fields.error("architectures", f"{', '.join(names)!r:.200} is no {kind} drafter; those are {known}")
    fields.owner = f"{kind} drafters"
    if not fields.has("speculators_model_type"):
        return fields
    if (given := fields.string("speculators_model_type")) not in kinds:
        raise fields.error("speculators_model_type", f"{given!r:.80} must be {' or '.join(kinds)}")
    fields.expect("tie_word_embeddings", False)
    for name in ("speculators_config", "dtype", "torch_dtype"):  # its use, and the layers' type again
        fields.raw(name)
    return fields.object("transformer_layer_config")


class OwnLayersDrafter:
    """The parts of a drafter with layers of its own. It shares the model's table and head where it has none.

    Attributes:
        config: of its `config.json`.
    """

    longrope_threshold: int | None = None
    weight_bytes: int

    def __init__(self, config: DraftConfig, maker: Maker, target: Decoder, ends: StoredEnds) -> None:
        self.target, self.layers, self._decoder = target, config.layers, config.decoder
        self.device, self.dtype, self.max_positions = maker.options.device, maker.dtype, maker.max_positions
        self._eps, hidden = config.decoder.norm_eps, config.decoder.hidden_size
        self._ends = DraftEnds(maker, target, ends)
        self._fc = maker.linear("fc", outputs=hidden, inputs=config.target_hidden_size * len(config.layers))
        self._norm = maker.vector("norm.weight", hidden)
        rope = config.decoder.layer_ropes[0]
        assert rope is not None, "of this family"
        if rope.switch(maker.max_positions) is not None:
            raise ConfigError("rope_scaling: a drafter's rotations may not depend on the length (longrope)")
        self._rope = maker.rope(rope)

    @property
    def token_ids(self) -> NDArray[np.int32] | None:
        return self._ends.token_ids

    def know(self) -> None:
        self._ends.know()

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        decoder = self._decoder
        return KVCacheSpec.uniform(
            decoder.num_layers, decoder.num_kv_heads, decoder.head_dim, block_size, self.dtype, self.device
        )


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


C = TypeVar("C", bound=DraftConfig)
L = TypeVar("L", bound=OwnLayersDrafter)


def load_own_layers(
    kind: str, read: Callable[[Fields, int], C], make: Callable[[C, Maker, Decoder, StoredEnds], L],
    harmless: re.Pattern[str], renames: Mapping[str, str], folder: Path, target: Model, *,
    more_positions: Callable[[C], int] = lambda config: 0, max_model_len: int | None = None,
    load_format: str = "auto", seed: int = 0, declares: bool = False, **settings: Unpack[LoadSettings],
) -> L:  # fmt: skip
    """The drafter in a folder, for a model that it shares the device and the types with. With `declares` it is only
    declared, and cannot run. `more_positions` are needed beside those of a sequence.

    Raises `ModelLoadError`, naming file, field or tensor, and value.
    """
    if not isinstance(target, Decoder):
        raise ModelLoadError(
            f"{folder}: {target.config.architecture} gives no hidden states of its layers, which {kind} reads"
        )
    files = open_model(folder)
    fields = files.config()
    config = read(fields, target.config.num_layers)
    decoder, sizes = config.decoder, (target.config.vocab_size, target.config.hidden_size)
    own_sizes = decoder.vocab_size, config.target_hidden_size
    for name, own, wanted in zip(("vocab_size", "target_hidden_size"), own_sizes, sizes, strict=True):
        if own != wanted:
            raise fields.error(name, f"= {own}, but the model has {wanted}")
    longest = (max_model_len or target.max_positions) + more_positions(config)
    checkpoint = None if load_format == "dummy" else files.checkpoint()
    ends = read_ends(
        checkpoint, folder, target, hidden_size=decoder.hidden_size, draft_vocab_size=config.draft_vocab_size
    )
    drafter = make_drafter(
        lambda maker: make(config, maker, target, ends), checkpoint, options_of(target, settings),
        min(decoder.max_position_embeddings, longest), prefix="", harmless=harmless, renames=renames,
        dummy_dtype=decoder.dtype or float32, seed=seed, declares=declares,
    )  # fmt: skip
    drafter.know()
    return drafter
