"""Cases of layers with a recurrent state: chunks of sequences that have a state, against the cpu's operation."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from runtime import ops
from runtime.backends import cuda_state
from runtime.batch import Batch
from runtime.bench.kernels.case import TOLERANCE, Array, Case, Inputs, Prepared, sampled
from runtime.device.device import CPU, Device
from runtime.dtype import DType, float32
from runtime.kv.forms import Recurrent
from runtime.linear.recurrent import DeltaRule, Mamba, ShortConv
from runtime.tensor.tensor import Tensor

CONTEXT = 100
QWEN35_35B: dict[str, Any] = {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128}
NEMOTRON_30B: dict[str, Any] = {"num_heads": 64, "head_dim": 64, "num_groups": 8, "state_size": 128, "norm_groups": 8}

Weights = ShortConv | DeltaRule | Mamba


def delta_rule_case(seqs: int, queries: int, *, dtype: str = "bf16", state: str = "f32", **sizes: int) -> Case:
    """Chunks of `queries` tokens; sizes as `DeltaRule` names them."""

    def weights(inputs: Inputs) -> tuple[DeltaRule, Recurrent]:
        sized = DeltaRule(conv=_NONE, a=_NONE, dt_bias=_NONE, norm=_NONE, eps=1e-6, **sizes)  # type: ignore[arg-type]
        heads, (a, dt_bias) = sized.num_value_heads, _rates(inputs, sized.num_value_heads)
        conv, norm = _floats(inputs, (sized.channels, 4), 0.3), _floats(inputs, (sized.value_dim,), 1.0)
        form = Recurrent(
            channels=sized.channels, taps=4, heads=heads, rows=sized.key_dim, columns=sized.value_dim,
            activations=DType.parse(dtype), state_dtype=DType.parse(state),
        )  # fmt: skip
        return replace(sized, conv=conv, a=a, dt_bias=dt_bias, norm=norm), form

    heads, rows, columns = sizes["num_value_heads"], sizes["key_dim"], sizes["value_dim"]
    keys = sizes["num_key_heads"] * rows
    width = 2 * keys + 2 * heads * columns + 2 * heads
    name = f"delta_rule {dtype}{' bf16 state' if state == 'bf16' else ''}"
    shape = f"{seqs} x {queries} tokens, {sizes['num_key_heads']}/{heads} heads of {rows} x {columns}"
    return _case(name, shape, seqs, queries, width, heads * columns, 2 * keys + heads * columns, 4,
                 (heads, rows, columns), dtype, state, weights)  # fmt: skip


def mamba_case(seqs: int, queries: int, *, dtype: str = "bf16", state: str = "f32", **sizes: int) -> Case:
    """Chunks of `queries` tokens; sizes as `Mamba` names them."""

    def weights(inputs: Inputs) -> tuple[Mamba, Recurrent]:
        sized = Mamba(conv=_NONE, a=_NONE, dt_bias=_NONE, d=_NONE, norm=_NONE, eps=1e-5, **sizes)  # type: ignore[arg-type]
        heads, (a, dt_bias) = sized.num_heads, _rates(inputs, sized.num_heads)
        conv, norm = _floats(inputs, (sized.channels, 4), 0.3), _floats(inputs, (sized.inner,), 1.0)
        form = Recurrent(
            channels=sized.channels, taps=4, heads=heads, rows=sized.state_size, columns=sized.head_dim,
            activations=DType.parse(dtype), state_dtype=DType.parse(state),
        )  # fmt: skip
        made = replace(sized, conv=conv, a=a, dt_bias=dt_bias, norm=norm, d=_floats(inputs, (heads,), 1.0))
        return made, form

    heads, rows, columns = sizes["num_heads"], sizes["state_size"], sizes["head_dim"]
    inner, keys = heads * columns, sizes["num_groups"] * rows
    name = f"mamba {dtype}{' bf16 state' if state == 'bf16' else ''}"
    shape = f"{seqs} x {queries} tokens, {heads} heads of {rows} x {columns}"
    return _case(name, shape, seqs, queries, 2 * inner + 2 * keys + heads, inner, inner + 2 * keys, 4,
                 (heads, rows, columns), dtype, state, weights)  # fmt: skip


def short_conv_case(seqs: int, queries: int, channels: int, *, dtype: str = "bf16") -> Case:
    """Chunks of `queries` tokens, filters of 3 taps."""

    def weights(inputs: Inputs) -> tuple[ShortConv, Recurrent]:
        form = Recurrent(channels=channels, taps=3, activations=DType.parse(dtype))
        return ShortConv(conv=_floats(inputs, (channels, 3), 0.5)), form

    shape = f"{seqs} x {queries} tokens of {channels}"
    return _case(f"short_conv {dtype}", shape, seqs, queries, 3 * channels, channels, channels, 3, (0, 0, 0), dtype,
                 "f32", weights)  # fmt: skip


def _case(
    name: str, shape: str, seqs: int, queries: int, width: int, out: int, channels: int, taps: int,
    state: tuple[int, int, int], dtype: str, state_dtype: str, weights: Any,
) -> Case:  # fmt: skip
    """`state`: heads, rows and columns."""
    heads, rows, columns = state
    item = DType.parse(dtype).itemsize
    state_bytes = heads * rows * columns * DType.parse(state_dtype).itemsize
    tokens = seqs * queries
    least = 2 * seqs * (state_bytes + (taps - 1) * channels * item) + tokens * (width + out) * item
    least += channels * taps * 4
    flops = tokens * (8 * heads * rows * columns + 2 * taps * channels)

    def prepare(inputs: Inputs) -> Prepared:
        made, form = weights(inputs)
        x = inputs.normal((tokens, width), dtype)
        planes = [
            np.full((2 * seqs, 1), CONTEXT, np.int32) if plane.name == "length"
            else inputs.normal((2 * seqs, *plane.shape), plane.dtype.ptx, 0.3)
            for plane in form.planes(0, float32, is_cpu=False)
        ]  # fmt: skip
        device, chosen = inputs.gpu.device, sampled(seqs)
        pages = tuple(_put(plane, device) for plane in planes)
        batch = _batch(seqs, queries, device)
        given, moved = _put(x, device), _moved(made, device)
        queue, result, owners = cuda_state.queued(given, moved, pages, batch, 0, 0)
        inputs.keep(given, moved, result, owners, pages, batch)
        kept = np.concatenate([chosen, seqs + chosen])
        on_cpu = [plane[kept].astype(np.float32) if plane.dtype != np.int32 else plane[kept] for plane in planes]
        if heads:
            on_cpu[-1] = np.ascontiguousarray(on_cpu[-1].swapaxes(2, 3))
        of_seqs = x.reshape(seqs, queries, width)[chosen].reshape(-1, width).astype(np.float32)
        call: Any = {ShortConv: ops.short_conv, DeltaRule: ops.delta_rule, Mamba: ops.mamba}[type(made)]
        found = call(
            Tensor.from_numpy(of_seqs), made, pages=[Tensor.from_numpy(each) for each in on_cpu],
            batch=_batch(len(chosen), queries, CPU), group=0,
        )  # fmt: skip
        at = (chosen[:, None] * queries + np.arange(queries)).ravel()
        run = inputs.bind(*queue)
        return Prepared(run, result.address, result.shape, dtype, at, found.array.astype(np.float32), guard_bytes=0)

    return Case(name, shape, least, flops, TOLERANCE[dtype], prepare, "recurrent")


_NONE: Any = None


def _put(array: Array, device: Device) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(array)).to(device)


def _floats(inputs: Inputs, shape: tuple[int, ...], scale: float) -> Tensor:
    return Tensor.from_numpy(inputs.normal(shape, "f32", scale))


def _rates(inputs: Inputs, heads: int) -> tuple[Tensor, Tensor]:
    """a and dt_bias: memories of a few tokens and of many."""
    a = -np.exp(inputs.rng.uniform(-3, 2, heads)).astype(np.float32)
    return Tensor.from_numpy(a), _floats(inputs, (heads,), 1.0)


def _moved(weights: Weights, device: Device) -> Weights:
    given: dict[str, Any] = {each.name: getattr(weights, each.name) for each in fields(weights)}
    moved = {name: each.to(device) for name, each in given.items() if isinstance(each, Tensor)}
    return type(weights)(**given | moved)


def _batch(seqs: int, queries: int, device: Device) -> Batch:
    """Sequence s reads page s and writes page seqs + s."""
    start = np.arange(seqs + 1, dtype=np.int32) * np.int32(queries)
    table = np.stack([seqs + np.arange(seqs), np.arange(seqs)], axis=1).astype(np.int32)
    nothing = _put(np.zeros(1, np.int32), device)
    lens = np.full(seqs, CONTEXT + queries, np.int32)
    return Batch(
        nothing, nothing, _put(start, device), _put(lens, device), (), (_put(table, device),), nothing,
        max_query_len=queries, max_seq_len=CONTEXT + queries,
    )  # fmt: skip
