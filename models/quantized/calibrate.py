"""Scales of channels that minimise a product's rounding error on a text's activations, folded into the previous
weights.

A product ``W x`` is ``(W diag(s)) (x / s)``. Salient channels are scaled up before rounding, so that they lose less,
and the division goes into existing weights (AWQ: Lin et al. 2023, https://arxiv.org/abs/2306.00978):

    query, key, value     the weights of the norm before them
    gate, up              the same
    down                  the rows of `up`
    output of attention   the rows of `value`; heads that share one share its scales

``s`` is the mean magnitude of a channel to the power of one of `POWERS`; 0, which changes nothing, is one of them. A
model's forward pass runs over all tokens at once, and each matrix is read when it is needed and then dropped: the most
memory is that of one map, the activations of a layer, and the pages of these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from models.base import Model
from models.checkpoints.checkpoint import Checkpoint
from models.configuration.config import ModelConfig
from models.decoder import Attention, Decoder, DecoderConfig, GatedMlp, PreNormLayer
from models.errors import WeightsError
from models.experts import MoeConfig
from models.makers.declaration import LinearDeclaration
from models.makers.loading_maker import LoadingMaker
from runtime import ops
from runtime.batch import AdaptedRows, Batch
from runtime.dtype import bfloat16, float32
from runtime.errors import InvalidArgumentError
from runtime.kv.cache import KVCache
from runtime.linear.linear import Linear
from runtime.linear.options import LoadOptions
from runtime.linear.quantise import Rounding, quantise
from runtime.linear.weight import LinearWeight
from runtime.tensor.cast import cast_array
from runtime.tensor.tensor import Tensor

Array = np.ndarray[Any, Any]

POWERS = tuple(step / 10 for step in range(11))
SEQUENCE_TOKENS = 256
MOST_ROWS = 512
"""Rows of activations, evenly spaced, for a product's loss."""
_BLOCK_SIZE = 16


@dataclass(slots=True)
class Folded:
    """Calibration's changes to a model's tensors, by name.

    Attributes:
        columns: float32 ``[K]``, the factors of a matrix's columns.
        rows: rows of a matrix, or elements of a bias, and their float32 divisors.
        vectors: the weights of norms, as they are stored.
        gains: the loss of each product over that without scales.
    """

    columns: dict[str, Array] = field(default_factory=dict)
    rows: dict[str, tuple[slice, Array]] = field(default_factory=dict)
    vectors: dict[str, Array] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)

    def changes(self, name: str) -> bool:
        """Whether a matrix or bias differs from the stored one."""
        return name in self.columns or name in self.rows

    def apply(self, name: str, values: Array) -> Array:
        """A matrix or bias in float32, as it is to be rounded."""
        if (divided := self.rows.get(name)) is not None:
            places, by = divided
            values = values.copy()
            values[places] /= by.reshape(-1, *[1] * (values.ndim - 1))
        return values * self.columns[name] if name in self.columns else values


def calibrate(
    config: ModelConfig, model_class: type[Model], checkpoint: Checkpoint, token_ids: Sequence[int],
    rounding: Callable[[str], Rounding | None], show: Callable[[int, int], None],
) -> Folded:  # fmt: skip
    """The scales for a checkpoint that fits the config. `rounding` gives a matrix's new format, or None if it stays.

    Raises `InvalidArgumentError` for a family without such folds and for too few tokens, `ModelLoadError` for tensors
    that cannot be read.
    """
    if isinstance(config, MoeConfig):
        raise InvalidArgumentError(
            f"calibration: {model_class.__name__} has experts or states, for which it is not done"
        )
    if not (issubclass(model_class, Decoder) and isinstance(config, DecoderConfig)):
        raise InvalidArgumentError(f"calibration: {model_class.__name__} has no norms or maps that scales fold into")
    length = min(SEQUENCE_TOKENS, config.max_position_embeddings)
    count = len(token_ids) // length
    if not count:
        raise InvalidArgumentError(f"calibration: the text has {len(token_ids)} tokens, must have at least {length}")
    maker = _StreamingMaker(LoadOptions(), length, checkpoint)
    model = model_class(config, maker)
    folded, search = Folded(), _Search(checkpoint, rounding)
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        if isinstance(layer, PreNormLayer) and isinstance(layer.attention, Attention):
            search.behind_norm(layer.attention.qkv_proj, f"{prefix}.input_layernorm.weight", model.norm_offset, folded)
            if isinstance(layer.mlp, GatedMlp):
                norm = f"{prefix}.post_attention_layernorm.weight"
                search.behind_norm(layer.mlp.gate_up_proj, norm, model.norm_offset, folded)
        attention, mlp = getattr(layer, "attention", None), getattr(layer, "mlp", None)
        if isinstance(attention, Attention):
            heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
            search.behind_rows(attention.o_proj, attention.qkv_proj, 2, heads, folded)
        if isinstance(mlp, GatedMlp):
            search.behind_rows(mlp.down_proj, mlp.gate_up_proj, 1, None, folded)
    watches = [(linear, linear.watch) for linear in maker.streamed if linear.watch is not None]
    for done, (linear, watch) in enumerate(watches, 1):
        linear.watch = partial(_watch_and_show, watch, show, done, len(watches))
    show(0, len(watches))
    _forward(model, np.asarray(token_ids[: count * length], np.int32), count, length)
    return folded


def _watch_and_show(
    watch: Callable[[Tensor], None], show: Callable[[int, int], None], done: int, total: int, x: Tensor
) -> None:
    watch(x)
    show(done, total)


def _forward(model: Model, token_ids: Array, count: int, length: int) -> None:
    """One batch of `count` sequences, each `length` tokens."""
    blocks_each = -(-length // _BLOCK_SIZE)
    spec = model.kv_cache_spec(_BLOCK_SIZE, bfloat16)
    tables, num_used = [], [1] * len(spec.block_bytes)  # by group, and by pool
    for pool in spec.group_pools:
        blocks = np.arange(num_used[pool], num_used[pool] + count * blocks_each, dtype=np.int32)
        tables.append(blocks.reshape(count, blocks_each))
        num_used[pool] += blocks.size
    cache = KVCache(spec, num_used)
    at = np.tile(np.arange(length), count)
    sequence = np.repeat(np.arange(count), length)
    slots = [table[sequence, at // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + at % _BLOCK_SIZE for table in tables]
    is_long = model.longrope_threshold is not None and length > model.longrope_threshold
    offset = (model.longrope_threshold or 0) if is_long else 0
    model.forward(
        Batch(
            token_ids=Tensor.from_numpy(token_ids),
            positions=Tensor.from_numpy((at + offset).astype(np.int32)),
            query_start=Tensor.from_numpy(np.arange(count + 1, dtype=np.int32) * np.int32(length)),
            seq_lens=Tensor.from_numpy(np.full(count, length, np.int32)),
            slot_mappings=tuple(Tensor.from_numpy(each) for each in slots),
            block_tables=tuple(Tensor.from_numpy(table) for table in tables),
            logits_indices=Tensor.from_numpy(np.arange(1, dtype=np.int32)),
            max_query_len=length,
            max_seq_len=length,
        ),
        cache,
    )


class _StreamingMaker(LoadingMaker):
    """Makes linear maps that read their weights at each call and drop them; tables are read at once."""

    def __init__(self, options: LoadOptions, max_positions: int, source: Checkpoint) -> None:
        super().__init__(options, max_positions, source)
        self.streamed: list[_StreamedLinear] = []  # shared with the makers below

    def linear(self, *arguments: Any, **settings: Any) -> Linear:
        made = super().linear(*arguments, **settings)
        if isinstance(made.weight, _Unread):
            made = _StreamedLinear(made.weight.declaration, super()._linear, made)
            self.streamed.append(made)
        return made

    def _linear(self, declaration: LinearDeclaration) -> LinearWeight:
        if f"{declaration.names[0]}.weight" in self.tables:
            return super()._linear(declaration)
        return _Unread(declaration, self.options)


class _Unread(LinearWeight):
    """A weight that is not loaded."""

    def __init__(self, declaration: LinearDeclaration, options: LoadOptions) -> None:
        super().__init__(declaration.shape, options.format_of(float32), options.device, 0)
        self.declaration = declaration


class _StreamedLinear(Linear):
    """A map whose weights are read for each call; `watch` sees the rows that they multiply."""

    __slots__ = ("declaration", "load", "watch")

    def __init__(
        self, declaration: LinearDeclaration, load: Callable[[LinearDeclaration], LinearWeight], made: Linear
    ) -> None:
        super().__init__(made.weight, None, made.norm)
        self.declaration, self.load = declaration, load
        self.watch: Callable[[Tensor], None] | None = None

    def own_part(
        self, x: Tensor, batch: Batch | AdaptedRows | None = None, *, residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._read(x).own_part(x, batch, residual=residual, out=out)

    def glu(self, x: Tensor, activation: ops.GluActivation, batch: Batch | AdaptedRows | None = None) -> Tensor:
        return self._read(x).glu(x, activation, batch)

    def _read(self, x: Tensor) -> Linear:
        if self.watch is not None:
            self.watch(x if self.norm is None else ops.rms_norm(x, self.norm.weight, self.norm.eps))
        return Linear(self.load(self.declaration), None, self.norm)


@dataclass(frozen=True, slots=True)
class _Search:
    """Chooses which activations of a model's maps are watched, and searches their scales."""

    checkpoint: Checkpoint
    rounding: Callable[[str], Rounding | None]

    def behind_norm(self, linear: Linear, norm: str, offset: float, folded: Folded) -> None:
        """The scales of a map's inputs go into the norm's weights, whose own rounding goes into the columns."""
        assert isinstance(linear, _StreamedLinear)
        names = self._rounded_names(linear)
        if not names:
            return

        def watch(x: Tensor) -> None:
            scales = self._best(names, x, None, folded)
            if scales is None:
                return
            stored = self.checkpoint[norm].array()
            weight = stored.astype(np.float32) + np.float32(offset)
            changed = (weight / scales - np.float32(offset)).astype(stored.dtype)
            used = changed.astype(np.float32) + np.float32(offset)
            is_good = np.isfinite(used) & (used != 0)
            folded.vectors[norm] = np.where(is_good, changed, stored)
            for name in names:
                folded.columns[name] = np.where(is_good, weight / np.where(is_good, used, 1), 1).astype(np.float32)

        linear.watch = watch

    def behind_rows(
        self, linear: Linear, source: Linear, part: int, heads: tuple[int, int, int] | None, folded: Folded
    ) -> None:
        """The scales go into the rows of one of the outputs of `source`; see `_best` for `heads`."""
        assert isinstance(linear, _StreamedLinear)
        assert isinstance(source, _StreamedLinear)
        names = self._rounded_names(linear)
        if not names:
            return
        (name, rows, _), has_bias = list(source.declaration.parts)[part], source.declaration.has_bias

        def watch(x: Tensor) -> None:
            scales = self._best(names, x, heads, folded)
            if scales is None:
                return
            for each in names:
                folded.columns[each] = scales
            if heads is not None:
                num_heads, num_kv_heads, head_dim = heads
                scales = scales.reshape(num_kv_heads, num_heads // num_kv_heads, head_dim)[:, 0].reshape(-1)
            for suffix in ("weight", "bias")[: 1 + has_bias]:
                folded.rows[f"{name}.{suffix}"] = rows, scales

        linear.watch = watch

    def _rounded_names(self, linear: _StreamedLinear) -> list[str]:
        """The map's tensors; empty if one of them stays in floats."""
        names = [f"{name}.weight" for name in linear.declaration.names]
        return names if all(self.rounding(name) for name in names) else []

    def _best(self, names: list[str], x: Tensor, heads: tuple[int, int, int] | None, folded: Folded) -> Array | None:
        """The scales ``[K]`` with the least error of all products with the rows ``x [T, K]``; None if none improve it.

        `heads` (of queries, of keys, their size): channels of heads that share a value head share a scale.
        """
        rows: Array = x.array.astype(np.float32)
        size = np.abs(rows).mean(axis=0, dtype=np.float64)
        if not np.isfinite(size).all():
            raise WeightsError(f"calibration: the inputs of {names[0]!r} are not finite on this text")
        if heads is not None:
            num_heads, num_kv_heads, head_dim = heads
            shared = size.reshape(num_kv_heads, num_heads // num_kv_heads, head_dim)
            size = np.broadcast_to(shared.mean(axis=1, keepdims=True), shared.shape).reshape(-1)
        size = np.maximum(size, size.max() * 1e-4)
        some = np.ascontiguousarray(rows[:: max(1, -(-len(rows) // MOST_ROWS))].T)  # [K, rows]
        matrices = [cast_array(self.checkpoint[name].array(), float32) for name in names]
        losses: dict[float, float] = {}
        if size.max() <= 0:
            folded.gains[names[0]] = 1.0
            return None
        for power in POWERS:
            scales = _scales(size, power)
            losses[power] = 0.0
            for name, matrix in zip(names, matrices, strict=True):
                rounding = self.rounding(name)
                assert rounding is not None
                lost = quantise(matrix * scales, rounding).dequantise(float32) / scales - matrix
                losses[power] += float(np.square(lost @ some).sum(dtype=np.float64))
        best = _least(losses)
        folded.gains[names[0]] = losses[best] / losses[0.0] if losses[0.0] else 1.0
        return None if best == 0.0 else _scales(size, best)


def _least(losses: dict[float, float]) -> float:
    """The power with the least error."""
    return min(losses, key=lambda power: losses[power])


def _scales(size: Array, power: float) -> Array:
    raised = size**power
    scales: Array = (raised / np.sqrt(raised.max() * raised.min())).astype(np.float32)
    return scales
