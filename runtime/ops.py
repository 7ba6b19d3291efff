"""Every operation of a model, dispatched to the kernels of the device that the tensors lie on.

Activations on the CPU are float32. On a GPU, real or emulated, they are float32, float16 or bfloat16, one type
throughout, with float32 arithmetic inside each kernel. Weights and the KV cache are of any of the three on the CPU, of
the activations' type on a GPU, where norm weights and biases are float32.

Every function checks dtype, shape, contiguity and device of each argument before anything is launched, and raises
InvalidArgumentError naming the operation and the argument. `runtime.backends` holds the implementations. The generic
arithmetic of Tensor's operators is `runtime.tensor.arithmetic`; its functions are available here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from numba_kernels.latent_rows import LatentBytes
from numba_kernels.split_k import SEGMENTS
from runtime.backends import backend_of, cpu_sampling, cuda_tensor
from runtime.backends.checks import check, check_chosen, check_rows, check_sampling, fail
from runtime.batch import AdaptedRows, Batch
from runtime.device.device import CPU, Device
from runtime.dtype import STORED, DType, NDArray, float8_e4m3, float32, int32, int64
from runtime.kv.forms import LATENT_PAGES
from runtime.linear.experts import ExpertsWeight
from runtime.linear.gpu_slots import GpuSlots, Slots
from runtime.linear.latent import LatentMaps
from runtime.linear.low_rank_slots import CpuSlots, LowRank
from runtime.linear.norm import RmsNorm
from runtime.linear.shared_table import SharedTable
from runtime.linear.stored_table import StoredTable
from runtime.linear.weight import LinearWeight, prepare_linear
from runtime.rope_table import RopeTable
from runtime.routing import Routing, RoutingRule
from runtime.sampling_arrays import SAMPLING_FIELDS, Int32Array, SampledTokens, SamplingArrays, TopLogprobs
from runtime.state_ops import delta_rule, mamba, short_conv
from runtime.tensor import arithmetic
from runtime.tensor.tensor import Tensor, operation

__all__ = [
    "LinearWeight", "RopeTable", "adapted_experts", "adapter_ids", "add_embedding", "add_partials", "add_scaled",
    "attention", "check_ids", "clamp", "delta_rule", "distributions", "embedding", "experts", "forbid", "gather_rows",
    "gelu", "gelu_gate", "glu", "keep_groups", "keep_proposals", "latent_attention", "latent_queries", "latent_values",
    "layer_norm", "linear", "linear_glu", "linear_partial", "log_softmax_topk", "logits_linear", "low_rank", "mamba",
    "normed_route", "place", "pooled_texts", "prepare_linear", "qkv_attention", "qkv_prepare", "rms_norm", "route",
    "sample", "sample_into", "short_conv", "sigmoid_gate", "silu", "squared_relu", "take_decode_inputs",
    "takes_low_rank", "text_attention", "xielu",
]  # fmt: skip

GluActivation = Literal["silu", "gelu_tanh", "clamped_silu"]
ExpertsActivation = Literal[GluActivation, "squared_relu"]
GLU_ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu")
Gate = Literal[GluActivation, "gelu_erf", "gelu_sigmoid"]
GATES = (*GLU_ACTIVATIONS, "gelu_erf", "gelu_sigmoid")
QkNorm = Literal["before", "after", "centred"]
QK_NORMS = ("before", "after", "centred")
Values = Literal["own", "normed", "keys"]
VALUES = ("own", "normed", "keys")
FLOATS = tuple(STORED)


def __getattr__(name: str) -> Any:
    """The generic arithmetic: ``ops.add`` and the rest, numpy's on the CPU, where it cannot be recorded."""
    if name not in arithmetic.__all__:
        raise AttributeError(f"module 'runtime.ops' has no attribute {name!r}")
    return operation(name)


def _backend(op: str, argument: str, tensor: Tensor) -> Any:
    """The implementation for the device of the operation's first tensor."""
    if not isinstance(tensor, Tensor):
        raise fail(op, argument, f"must be a Tensor, not {type(tensor).__name__}")
    return backend_of(tensor.device)


def _sampling_backend(op: str, logits: Tensor) -> Any:
    """The implementation for checked ``logits [n, V]`` float32."""
    backend = _backend(op, "logits", logits)
    check(op, "logits", logits, logits.device, float32, (None, None))
    return backend


def place(arrays: Sequence[NDArray], device: Device) -> list[Tensor]:
    """The arrays as tensors on a device: over their own memory on the CPU, else copied together."""
    if device.kind == "cpu":
        return [Tensor.from_numpy(array) for array in arrays]
    return cuda_tensor.upload_together(arrays, device)


# ------------------------------------------------------------------------------------------ linear, embedding


def linear(
    x: Tensor, weight: LinearWeight, *, residual: Tensor | None = None, out: Tensor | None = None,
    norm: RmsNorm | None = None, low_rank: LowRank | None = None,
) -> Tensor:  # fmt: skip
    """``x [T, K] . weight^T + bias + residual [T, N]`` -> ``[T, N]``. ``out`` may be ``residual``, but not ``x``.
    ``low_rank`` of x, normalised if there is a norm, is added, too, where `takes_low_rank` holds.

    ``norm`` normalises the rows of x first. It is required for a weight that includes the norm's weights, optional for
    one that rounds rows (one launch then does both), and not allowed for others, which take normalised rows.
    """
    backend = _check_factors("linear", x, weight)
    normed = _check_norm("linear", x, weight, norm)
    if residual is not None or out is not None:
        _check_addends("linear", (x.shape[0], weight.shape[0]), "x", x, weight, residual, out)
    if low_rank is not None:
        _check_low_rank("linear", low_rank, (x.shape[0], weight.shape[0]))
        return backend.linear(  # type: ignore[no-any-return]
            x, weight, residual, out, x.dtype, *normed, low_rank=low_rank
        )
    return backend.linear(x, weight, residual, out, x.dtype, *normed)  # type: ignore[no-any-return]


def _check_low_rank(op: str, added: LowRank, shape: tuple[int, int]) -> None:
    """Checks low-rank sums that are added to a product's result of this shape."""
    (rows, width), slots, x = shape, added.slots, added.x
    kind = CpuSlots if x.device == CPU else GpuSlots
    if not isinstance(slots, kind) or sum(slots.shape.heights) != width:
        raise fail(op, "low_rank.slots", f"must be a {kind.__name__} of {width} outputs")
    check(op, "low_rank.x", x, x.device, float32 if x.device == CPU else x.dtype, (rows, slots.shape.depth))
    check(op, "low_rank.adapters", added.adapters, x.device, int32, (rows,))


def takes_low_rank(
    x: Tensor, weight: LinearWeight, norm: RmsNorm | None, activation: str | None, slots: object
) -> bool:  # fmt: skip
    """Whether a product takes low-rank sums of ``slots`` for these rows. The product is `linear` if ``activation`` is
    "", `linear_glu` if it is a gate's, and `add_partials` if it is None."""
    backend = _backend("takes_low_rank", "x", x)
    return backend.takes_low_rank(x, weight, norm, activation, slots)  # type: ignore[no-any-return]


def _check_addends(
    op: str, shape: tuple[int, ...], name: str, x: Tensor, weight: LinearWeight, residual: Tensor | None,
    out: Tensor | None,
) -> None:  # fmt: skip
    """Checks the residual and output of a product of x, or of the sum of its partials."""
    if residual is not None:
        check(op, "residual", residual, x.device, weight.activations, shape)
    if out is not None:
        _check_written(op, "out", out, x.device, weight.activations, shape)
        if max(x.address, out.address) < min(x.address + x.size_bytes, out.address + out.size_bytes):
            raise fail(op, "out", f"shares memory with {name}")


def linear_partial(x: Tensor, weight: LinearWeight) -> Tensor:
    """A rank's part of an exact product that is split over its inputs: ``x [T, K] . weight^T`` -> ``[T, N]`` float32.

    The sum of the rank's segments (`numba_kernels.split_k`), before the outputs' scales and bias.
    """
    backend = _check_factors("linear_partial", x, weight)
    _check_segments("linear_partial", weight)
    return backend.linear_partial(x, weight)  # type: ignore[no-any-return]


def add_partials(
    partials: Tensor, weight: LinearWeight, *, residual: Tensor | None = None, out: Tensor | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:  # fmt: skip
    """Adds the partial products of 2, 4 or 8 ranks from `linear_partial`, ``partials [R, T, N]`` -> ``[T, N]``.

    Partials are added in pairs, in rank order; then outputs are scaled, bias and ``residual [T, N]`` added. Bitwise
    equal to `linear` on one rank. ``out`` may be ``residual``. On the cpu ``low_rank`` is added, too.
    """
    op, backend = "add_partials", _backend("add_partials", "partials", partials)
    _check_segments(op, weight)
    num_ranks = SEGMENTS // weight.num_segments
    if num_ranks == 1:
        raise fail(op, "weight", "has all inputs, must be a rank's part")
    check(op, "partials", partials, weight.device, float32, (num_ranks, None, weight.shape[0]))
    _check_addends(op, partials.shape[1:], "partials", partials, weight, residual, out)
    if low_rank is not None:
        _check_low_rank(op, low_rank, (partials.shape[1], weight.shape[0]))
        return backend.add_partials(partials, weight, residual, out, low_rank)  # type: ignore[no-any-return]
    return backend.add_partials(partials, weight, residual, out)  # type: ignore[no-any-return]


def _check_segments(op: str, weight: LinearWeight) -> None:
    if not isinstance(weight, LinearWeight) or not weight.num_segments:
        raise fail(op, "weight", "must be exact and split over its inputs")


def linear_glu(
    x: Tensor, weight: LinearWeight, activation: GluActivation, *, norm: RmsNorm | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:  # fmt: skip
    """``glu(linear(x, weight, norm=norm), activation)``, gate's rows first in ``weight [2 I, K]`` -> ``[T, I]``.

    One launch if a kernel can fuse it, and then rounded once. ``low_rank`` is added before the gate, as in `linear`.
    """
    backend = _check_factors("linear_glu", x, weight)
    normed = _check_norm("linear_glu", x, weight, norm)
    _check_glu("linear_glu", "weight", weight.shape[0], activation, backend.GLU_ACTIVATIONS)
    if low_rank is not None:
        _check_low_rank("linear_glu", low_rank, (x.shape[0], weight.shape[0]))
        return backend.linear_glu(  # type: ignore[no-any-return]
            x, weight, activation, *normed, low_rank=low_rank
        )
    return backend.linear_glu(x, weight, activation, *normed)  # type: ignore[no-any-return]


def logits_linear(x: Tensor, weight: LinearWeight, *, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """As `linear`, with a float32 result whatever the activations' type: ``[T, K]`` -> ``[T, V]``, times ``scale``.

    With ``softcap`` c a logit l becomes ``c tanh(l / c)``.
    """
    backend = _check_factors("logits_linear", x, weight)
    _check_norm("logits_linear", x, weight, None)
    _check_softcap("logits_linear", softcap)
    return scale_logits(backend.linear(x, weight, None, None, float32), scale, softcap)


def scale_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """``logits [T, V]`` float32 times ``scale``, capped as by `logits_linear`, in place; returns them."""
    _check_softcap("scale_logits", softcap)
    if (scale != 1.0 or softcap is not None) and logits.size:
        _backend("scale_logits", "logits", logits).scale_logits(logits, scale, softcap)
    return logits


def _check_factors(op: str, x: Tensor, weight: LinearWeight) -> Any:
    """The implementation of a product of rows with a weight, after checking both."""
    backend = _backend(op, "x", x)
    if not isinstance(weight, backend.WEIGHT) or (weight.device is not x.device and weight.device != x.device):
        what = f"on {weight.device}" if isinstance(weight, LinearWeight) else type(weight).__name__
        if type(weight) is LinearWeight:
            what = "one that is only declared"
        raise fail(op, "weight", f"must be a LinearWeight from prepare_linear on {x.device}, not {what}")
    check(op, "x", x, x.device, weight.activations, (None, weight.shape[1]))
    return backend


def _check_norm(op: str, x: Tensor, weight: LinearWeight, norm: RmsNorm | None) -> tuple[RmsNorm, ...]:
    """The arguments of a product for its fused norm."""
    if norm is None:
        if weight.is_normed:
            raise fail(op, "norm", "is None, but a norm's weights are multiplied into the weight")
        return ()
    if not weight.takes_norm:
        raise fail(op, "norm", "is given, but products with the weight apply none")
    check(op, "norm.weight", norm.weight, x.device, float32, (x.shape[1],))
    return (norm,)


def _check_written(op: str, argument: str, out: Tensor, device: Device, dtype: DType, shape: tuple[int, ...]) -> None:
    """Checks an output tensor."""
    check(op, argument, out, device, dtype, shape)
    if out.is_read_only:
        raise fail(op, argument, "is read-only")


def _check_softcap(op: str, softcap: float | None) -> None:
    if softcap is not None and not 0 < softcap < math.inf:
        raise fail(op, "softcap", f"is {softcap}, must be above 0 and finite")


def embedding(
    token_ids: Tensor, table: Tensor | LinearWeight | SharedTable | StoredTable, *, scale: float = 1.0
) -> Tensor:  # fmt: skip
    """``scale`` times rows of ``table [V, H]`` for ``token_ids [T]`` int32 -> ``[T, H]`` in the activations' type.

    A LinearWeight serves as the table too, so that a weight tied to the output layer is stored once. With a SharedTable
    each rank looks up its columns, which are then gathered. Rows of a StoredTable, on the cpu, are read as stored.
    """
    if isinstance(table, SharedTable):
        rows = embedding(token_ids, table.part, scale=scale)
        gathered: Tensor = table.communicator.all_gather_columns(rows, table.share, table.columns)
        return gathered
    op, backend = "embedding", _backend("embedding", "token_ids", token_ids)
    check(op, "token_ids", token_ids, token_ids.device, int32, (None,))
    if isinstance(table, StoredTable):
        if token_ids.device.kind != "cpu":
            raise fail(op, "table", f"is in stored blocks, must be of floats on {token_ids.device}")
    elif not isinstance(table, LinearWeight):
        check(op, "table", table, token_ids.device, FLOATS, (None, None))
    elif not isinstance(table, backend.TABLE):
        raise fail(op, "table", f"is on {table.device}, the other arguments are on {token_ids.device}")
    return backend.embedding(token_ids, table, scale)  # type: ignore[no-any-return]


def add_embedding(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Adds rows of ``table [P, H]`` for ``positions [T]`` to ``x [T, H]`` in place; returns ``x``."""
    op, backend = "add_embedding", _backend("add_embedding", "x", x)
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, None))
    _check_written(op, "x", x, x.device, x.dtype, x.shape)
    check(op, "positions", positions, x.device, int32, (x.shape[0],))
    check(op, "table", table, x.device, FLOATS, (None, x.shape[1]))
    return backend.add_embedding(x, positions, table)  # type: ignore[no-any-return]


def add_scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """``x + scale * y`` of ``[T, H]``, rounded once."""
    op, backend = "add_scaled", _backend("add_scaled", "x", x)
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, None))
    check(op, "y", y, x.device, x.dtype, x.shape)
    return backend.add_scaled(x, y, scale)  # type: ignore[no-any-return]


def forbid(logits: Tensor, token_ids: Tensor) -> None:
    """Writes minus infinity over the columns ``token_ids [n]`` int32 of ``logits [T, V]`` float32. The ids are in the
    vocabulary."""
    op, backend = "forbid", _backend("forbid", "logits", logits)
    check(op, "logits", logits, logits.device, float32, (None, None))
    _check_written(op, "logits", logits, logits.device, float32, logits.shape)
    check(op, "token_ids", token_ids, logits.device, int32, (None,))
    if logits.size and token_ids.size:
        backend.forbid(logits, token_ids)


def keep_groups(logits: Tensor, scores: Tensor, columns: Tensor, num_best: int) -> None:
    """Writes minus infinity over the columns of ``logits [T, V]`` float32 outside the ``num_best`` groups with the
    largest ``scores [T, G]`` float32, of equal ones the first. ``columns [G, V / G]`` int32 has each column once."""
    op, backend = "keep_groups", _backend("keep_groups", "logits", logits)
    check(op, "logits", logits, logits.device, float32, (None, None))
    _check_written(op, "logits", logits, logits.device, float32, logits.shape)
    groups = columns.shape[0]
    if not groups or logits.shape[1] % groups:
        raise fail(op, "columns", f"are {groups} groups, which must divide the {logits.shape[1]} columns of logits")
    check(op, "columns", columns, logits.device, int32, (None, logits.shape[1] // groups))
    check(op, "scores", scores, logits.device, float32, (logits.shape[0], groups))
    if not 1 <= num_best <= groups:
        raise fail(op, "num_best", f"is {num_best}, must be 1 to {groups}")
    if logits.size:
        backend.keep_groups(logits, scores, columns, num_best)


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices [n]`` int32 of ``x [T, H]`` -> ``[n, H]``."""
    op, backend = "gather_rows", _backend("gather_rows", "x", x)
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, None))
    check(op, "indices", indices, x.device, int32, (None,))
    return backend.gather_rows(x, indices)  # type: ignore[no-any-return]


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """``[T, W1]``, ``[T, W2]`` ... side by side -> ``[T, W1 + W2 + ...]``."""
    if not parts:
        raise fail("join_columns", "parts", "are none, must be at least one")
    op, first = "join_columns", parts[0]
    backend = _backend(op, "parts", first)
    for number, each in enumerate(parts):
        check(op, f"parts[{number}]", each, first.device, backend.ACTIVATIONS, (first.shape[0], None))
        check(op, f"parts[{number}]", each, first.device, first.dtype, each.shape)
    return backend.join_columns(parts)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------ norms, activations


def deferred_norm(x: Tensor, parts: int) -> Tensor:
    """float32 ``[T, parts]`` whose rows add up to the sums of squares of the rows of ``x [T, H]``, on a GPU. Those of
    the product that made x are reused (`Tensor.deferred_norm`), otherwise they are computed in its order; the rest are
    zeros."""
    op, backend = "deferred_norm", _backend("deferred_norm", "x", x)
    if x.device == CPU:
        raise fail(op, "x", "is on the cpu, which normalises rows before it multiplies them")
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, None))
    return backend.deferred_norm(x, parts)  # type: ignore[no-any-return]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, factor: float = 1.0
) -> Tensor:  # fmt: skip
    """``(x / sqrt(mean(x^2) + eps) * weight + residual) * factor`` over rows ``[T, H]``; weight ``[H]``; rounded
    once."""
    op, backend = "rms_norm", _backend("rms_norm", "x", x)
    device = x.device
    check(op, "x", x, device, backend.ACTIVATIONS, (None, None))
    check(op, "weight", weight, device, backend.NORM_WEIGHTS, (x.shape[1],))
    if residual is not None:
        check(op, "residual", residual, device, x.dtype, x.shape)
    return backend.rms_norm(x, weight, eps, residual, factor)  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over rows ``[T, H]``; weight and bias ``[H]`` of one dtype."""
    op, backend = "layer_norm", _backend("layer_norm", "x", x)
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, None))
    check(op, "weight", weight, x.device, backend.NORM_WEIGHTS, (x.shape[1],))
    if bias is not None:
        check(op, "bias", bias, x.device, weight.dtype, weight.shape)
    return backend.layer_norm(x, weight, bias, eps)  # type: ignore[no-any-return]


def gelu(
    x: Tensor, kind: Literal["erf", "tanh", "sigmoid"], *, out: Tensor | None = None, rough: bool = False
) -> Tensor:
    """GELU by its erf, its tanh approximation, or ``x sigmoid(1.702 x)``; ``out`` may be ``x``. With ``rough``,
    for erf's on the CPU, the error is up to 3e-5: enough if the next product rounds x (`LinearWeight.rounds_x`)."""
    if kind not in ("erf", "tanh", "sigmoid"):
        raise fail("gelu", "kind", f"is {kind!r}, must be 'erf', 'tanh' or 'sigmoid'")
    if rough:
        if kind != "erf" or x.device.kind != "cpu":
            raise fail("gelu", "rough", f"is for the kind 'erf' on the CPU, not {kind!r} on {x.device}")
        return _activate("gelu", "gelu_erf_rough", x, out)
    return _activate("gelu", f"gelu_{kind}", x, out)


def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x sigmoid(x)``; ``out`` may be ``x``."""
    return _activate("silu", "silu", x, out)


def squared_relu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``max(x, 0)^2`` (https://arxiv.org/abs/2109.08668); ``out`` may be ``x``."""
    return _activate("squared_relu", "squared_relu", x, out)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """``x sigmoid(gate)`` of ``[T, H]``, rounded once."""
    op, backend = "sigmoid_gate", _backend("sigmoid_gate", "x", x)
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, None))
    check(op, "gate", gate, x.device, x.dtype, x.shape)
    return backend.sigmoid_gate(x, gate)  # type: ignore[no-any-return]


def gelu_gate(x: Tensor, up: Tensor, first: int) -> Tensor:
    """``gelu(x) * up[:, first : first + W]`` of ``x [T, W]``, by tanh's approximation, rounded once."""
    op, backend = "gelu_gate", _backend("gelu_gate", "x", x)
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, None))
    check(op, "up", up, x.device, x.dtype, (x.shape[0], None))
    if not 0 <= first <= up.shape[1] - x.shape[1]:
        raise fail(op, "first", f"is {first}, must be from 0 to {up.shape[1] - x.shape[1]} for {x.shape[1]} columns")
    return backend.gelu_gate(x, up, first)  # type: ignore[no-any-return]


def clamp(x: Tensor, limit: float, *, out: Tensor | None = None) -> Tensor:
    """``max(-limit, min(x, limit))`` of ``[T, H]``; ``out`` may be ``x``."""
    if not limit > 0.0:
        raise fail("clamp", "limit", f"is {limit}, must be above 0")
    return _activate("clamp", "clamp", x, out, (limit,))


def xielu(x: Tensor, positive: float, negative: float, beta: float, eps: float, *, out: Tensor | None = None) -> Tensor:
    """``positive x^2 + beta x`` above 0, else ``negative (e^min(x, eps) - 1 - x) + beta x``, of ``[T, H]``; ``out`` may
    be ``x``."""
    return _activate("xielu", "xielu", x, out, (positive, negative, beta, eps))


def _activate(op: str, function: str, x: Tensor, out: Tensor | None, factors: tuple[float, ...] = ()) -> Tensor:
    """The elementwise kernel `function`, with up to four numbers."""
    backend = _backend(op, "x", x)
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, None) if factors else (None,) * x.ndim)
    if out is not None:
        _check_written(op, "out", out, x.device, x.dtype, x.shape)
    return backend.activate(function, x, out, factors)  # type: ignore[no-any-return]


def glu(gate_up: Tensor, activation: Gate) -> Tensor:
    """``f(gate) * up`` of ``[T, 2 I]``, gate first -> ``[T, I]``; f is SiLU or a GELU.

    "clamped_silu" is gpt-oss's: ``g sigmoid(1.702 g) (u + 1)`` with ``g = min(gate, 7)``, ``u = max(-7, min(up, 7))``.
    """
    backend = _backend("glu", "gate_up", gate_up)
    check("glu", "gate_up", gate_up, gate_up.device, backend.ACTIVATIONS, (None, None))
    _check_glu("glu", "gate_up", gate_up.shape[1], activation, backend.GATES, GATES)
    return backend.glu(gate_up, activation)  # type: ignore[no-any-return]


def _check_glu(
    op: str, argument: str, both: int, activation: str, kernels: Sequence[str] = GLU_ACTIVATIONS,
    known: Sequence[str] = GLU_ACTIVATIONS,
) -> None:  # fmt: skip
    if activation not in known:
        raise fail(op, "activation", f"is {activation!r}, must be one of {', '.join(known)}")
    if activation not in kernels:
        raise fail(op, "activation", f"is {activation!r}, for which this product has no kernel")
    if both % 2:
        raise fail(op, argument, f"gives {both} columns, must be an even number")


# ------------------------------------------------------------------------------------------ experts


def route(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, factors: Tensor | None = None
) -> Routing:  # fmt: skip
    """The experts and weights of each row of ``logits [T, E]``, by the rule.

    ``bias [E]`` float32 is added to the scores for the choice alone; ``factors [E]`` float32 multiply weights.
    """
    op, backend = "route", _backend("route", "logits", logits)
    check(op, "logits", logits, logits.device, float32, (None, rule.num_experts))
    for name, each in (("bias", bias), ("factors", factors)):
        if each is not None:
            check(op, name, each, logits.device, float32, (rule.num_experts,))
            if rule.scores == "sparsemixer":
                raise fail(op, name, "is given, but scores are 'sparsemixer', which takes none")
    return backend.route(logits, rule, bias, factors)  # type: ignore[no-any-return]


def normed_route(
    x: Tensor, norm: RmsNorm, router: LinearWeight, rule: RoutingRule, bias: Tensor | None = None
) -> tuple[Tensor, Routing]:
    """``x [T, H]`` normalised, and the `route` of its logits, the product with ``router [E, H]``."""
    backend = _backend("normed_route", "x", x)
    check("normed_route", "x", x, x.device, backend.ACTIVATIONS, (None, router.shape[1]))
    if (found := backend.normed_route(x, norm, router, rule, bias)) is not None:
        return found  # type: ignore[no-any-return]
    x = rms_norm(x, norm.weight, norm.eps)
    return x, route(logits_linear(x, router), rule, bias)


def experts(
    x: Tensor, routing: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: ExpertsActivation, *,
    shared: Tensor | None = None, shared_gate: Tensor | None = None, residual: Tensor | None = None,
    gather: Callable[[Tensor, int], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The weighted sum of the outputs of each row's experts, ``x [T, H]`` -> ``[T, H]``.

    An expert is ``down(f(gate(x)) * up(x))``; ``gate_up [E, 2 I, H]``, gate first, and ``down [E, H, I]``; or, with
    "squared_relu", ``down(max(up(x), 0)^2)``, where ``gate_up [E, I, H]`` is up alone. Added to it
    are ``shared [T, H]``, times ``sigmoid(shared_gate [T, 1])`` if there is one, and ``residual [T, H]``.

    With `gather` this is one of several ranks, each with an equal part of the outputs of both maps, in exact
    mode: `gather` concatenates all ranks' columns, given their total number.
    """
    backend = _backend("experts", "x", x)
    added = shared, shared_gate, residual
    _check_experts("experts", backend, x, routing, gate_up, down, activation, added, is_whole=gather is None)
    return backend.experts(x, routing, gate_up, down, activation, *added, gather)  # type: ignore[no-any-return]


def _check_experts(
    op: str, backend: Any, x: Tensor, routing: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str,
    added: tuple[Tensor | None, Tensor | None, Tensor | None], *, is_whole: bool,
) -> None:  # fmt: skip
    """Checks the arguments of `experts`; `added` are the shared expert's results, its gate and the residual."""
    tokens, hidden = x.shape[0], down.shape[1] if is_whole else gate_up.shape[2]
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, gate_up.shape[2]))
    check(op, "routing.ids", routing.ids, x.device, int32, (tokens, routing.rule.top_k))
    if routing.weights is None:
        raise fail(op, "routing.weights", "is None, must be a Tensor")
    check(op, "routing.weights", routing.weights, x.device, float32, (tokens, routing.rule.top_k))
    is_gated = activation != "squared_relu"
    if is_gated:
        _check_glu(op, "gate_up", gate_up.shape[1], activation)
    for name, found, wanted in (
        ("gate_up", gate_up.shape[0], routing.rule.num_experts), ("down", down.shape[0], routing.rule.num_experts),
    ):  # fmt: skip
        if found != wanted:
            raise fail(op, name, f"has {found} experts, must have num_experts = {wanted}")
    if is_whole and (1 + is_gated) * down.shape[2] != gate_up.shape[1]:
        raise fail(op, "down", f"has {down.shape[2]} inputs, must have {gate_up.shape[1] // (1 + is_gated)}")
    for name, each, width in zip(("shared", "shared_gate", "residual"), added, (hidden, 1, hidden), strict=True):
        if each is not None:
            check(op, name, each, x.device, x.dtype, (tokens, width))


def adapted_experts(
    x: Tensor, routing: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: ExpertsActivation,
    batch: Batch, *, shared: Tensor | None = None, shared_gate: Tensor | None = None, residual: Tensor | None = None,
    gather: Callable[[Tensor, int], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """`experts`, where the `addend` of ``gate_up`` or of ``down`` has pairs of low rank for each adapter's experts. A
    row's adapter is that of `batch.adapters`; -1 adds nothing, nor does a batch without adapters. A row's bits depend
    on no other row, nor on whether others have adapters."""
    op, backend = "adapted_experts", _backend("adapted_experts", "x", x)
    added = shared, shared_gate, residual
    _check_experts(op, backend, x, routing, gate_up, down, activation, added, is_whole=gather is None)
    adapters = None if batch.adapters is None else _adapters_of(op, batch, x)
    pairs = [None if each.addend is None or adapters is None else each.addend.pairs for each in (gate_up, down)]
    return backend.adapted_experts(  # type: ignore[no-any-return]
        x, routing, gate_up, down, activation, adapters, pairs, *added, gather
    )


def _adapters_of(op: str, batch: Batch | AdaptedRows, x: Tensor) -> Tensor:
    """The adapters of the rows of x, checked."""
    if batch.adapters is None:
        raise fail(op, "batch.adapters", "is None, must be a Tensor")
    check(op, "batch.adapters", batch.adapters, x.device, int32, (x.shape[0],))
    return batch.adapters


def adapter_ids(batch: Batch | AdaptedRows, ids: Tensor, each: int, num_adapters: int, none: int) -> Tensor:
    """``adapters[t] * each + ids[t, j]`` for ``ids [T]`` or ``[T, k]`` int32, the numbers of an adapter's own rows or
    experts, of which each adapter has ``each``; or ``none`` for rows without an adapter."""
    op, backend = "adapter_ids", _backend("adapter_ids", "ids", ids)
    check(op, "ids", ids, ids.device, int32, (None,) * ids.ndim)
    return backend.adapter_ids(_adapters_of(op, batch, ids), ids, each, num_adapters, none)  # type: ignore[no-any-return]


def low_rank(
    x: Tensor, batch: Batch | AdaptedRows, slots: Slots, *, residual: Tensor | None = None, norm: RmsNorm | None = None
) -> Tensor:
    """``residual [T, N] + up[a] (down[a] x)`` for ``x [T, K]`` and a map's slots; a is the row's of `batch.adapters`,
    -1 adds nothing. ``norm`` normalises the rows of x first. A row's bits depend on no other row."""
    op, backend = "low_rank", _backend("low_rank", "x", x)
    width = sum(slots.shape.heights)
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, slots.shape.depth))
    adapters = _adapters_of(op, batch, x)
    if residual is not None:
        check(op, "residual", residual, x.device, x.dtype, (x.shape[0], width))
    if norm is not None:
        check(op, "norm.weight", norm.weight, x.device, float32, (x.shape[1],))
    if not x.shape[0]:
        return Tensor.new((0, width), x.dtype, x.device)
    return backend.low_rank(x, adapters, slots, residual, batch.computed, norm)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------ attention


def qkv_prepare(
    qkv: Tensor,
    positions: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope: RopeTable | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    norm_kind: QkNorm = "before",
    values: Values = "own",
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: Sequence[Tensor] = (),
) -> Tensor:
    """Splits ``qkv [T, (Hq + 2 Hkv) D]``, normalises and rotates q and k -> q ``[T, Hq, D]``.

    Norm weights ``[D]`` are per head; ``[Hq D]`` and ``[Hkv D]`` of all heads together. With ``norm_kind`` "after" each
    head is rotated first; with "centred" it has a LayerNorm with its own weights, ``[Hq D]`` and ``[Hkv D]``. Each head
    of "normed" ``values`` has an RMSNorm without weights; with "keys" that of k's numbers, before all else, is v's, and
    qkv is ``[T, (Hq + Hkv) D]``. Without KV heads q is all there is, and nothing is written. K and V
    of token t are written to slot ``slot_mapping[t]`` (int64: block * block_size + offset; negative: not written). The
    pages' layout is the device's (`runtime.kv.cache`). Pages of int8 or fp8 have ``scales``, of keys and of values:
    each head's numbers are divided by a scale that maps the largest to 127 or 448, and rounded.
    """
    op, backend = "qkv_prepare", _backend("qkv_prepare", "qkv", qkv)
    sizes, norms = (num_q_heads, num_kv_heads, head_dim), (q_norm, k_norm)
    kind = _check_heads(
        op, qkv, positions, sizes, rope, norms, norm_kind, values, k_cache, v_cache, slot_mapping, scales
    )
    return backend.qkv_prepare(  # type: ignore[no-any-return]
        qkv, positions, *sizes, rope, *norms, kind, norm_eps, values, k_cache, v_cache, slot_mapping, tuple(scales)
    )


def _check_heads(
    op: str, qkv: Tensor, positions: Tensor, sizes: tuple[int, int, int], rope: RopeTable | None,
    norm_weights: tuple[Tensor | None, Tensor | None], norm_kind: QkNorm, values: Values, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, scales: Sequence[Tensor],
) -> str:  # fmt: skip
    """Checks what `qkv_prepare` takes -> the norm as the kernels name it. `sizes`: q heads, KV heads, head dim."""
    backend, device = _backend(op, "qkv", qkv), qkv.device
    (num_q_heads, num_kv_heads, head_dim), (q_norm, k_norm) = sizes, norm_weights
    if values not in VALUES:
        raise fail(op, "values", f"is {values!r}, must be one of {', '.join(VALUES)}")
    num_heads = num_q_heads + (1 if values == "keys" else 2) * num_kv_heads
    check(op, "qkv", qkv, device, backend.ACTIVATIONS, (None, num_heads * head_dim))
    tokens = qkv.shape[0]
    check(op, "positions", positions, device, int32, (tokens,))
    check(op, "slot_mapping", slot_mapping, device, int64, (tokens,))
    _, heads, _ = shape = backend.page_shape(op, k_cache, v_cache, qkv, head_dim)
    _check_page_scales(op, k_cache, shape, scales)
    if num_kv_heads not in (0, heads):
        raise fail(op, "k_cache", f"has {heads} heads, must have num_kv_heads = {num_kv_heads}")
    if num_kv_heads and (q_norm is None) != (k_norm is None):
        raise fail(op, "k_norm", "must be given where q_norm is, and only there")
    if norm_kind not in QK_NORMS:
        raise fail(op, "norm_kind", f"is {norm_kind!r}, must be one of {', '.join(QK_NORMS)}")
    kind = ""
    norms = [
        (name, norm, count)
        for name, norm, count in (("q_norm", q_norm, num_q_heads), ("k_norm", k_norm, num_kv_heads))
        if norm is not None
    ]
    if norms:
        kind = "head" if norm_kind == "before" else norm_kind
        if norm_kind == "before" and any(norm.shape != (head_dim,) for _, norm, _ in norms):
            kind = "row"
        for name, norm, count in norms:
            size = head_dim * count if kind in ("row", "centred") else head_dim
            check(op, name, norm, device, backend.NORM_WEIGHTS, (size,))
    if rope is not None:
        check(op, "rope.cos", rope.cos, device, float32, (None, None))
        check(op, "rope.sin", rope.sin, device, float32, rope.cos.shape)
        if (rotary := 2 * rope.cos.shape[1]) > head_dim:
            raise fail(op, "rope.cos", f"rotates {rotary} dimensions, limit head_dim {head_dim}")
        if rope.is_spread and (rope.interleaved or head_dim % 2):
            raise fail(
                op, "rope.is_spread", f"is True, but pairs are neighbours, or heads of {head_dim} have no halves"
            )
        if rope.q_scales is not None:
            check(op, "rope.q_scales", rope.q_scales, device, float32, (rope.cos.shape[0],))
    return kind


def qkv_attention(
    qkv: Tensor,
    batch: Batch,
    group: int,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope: RopeTable | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    norm_kind: QkNorm = "before",
    values: Values = "own",
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scales: Sequence[Tensor] = (),
) -> Tensor:
    """`qkv_prepare` at the batch's positions and slots, and `attention`: one launch where the device has a kernel for
    both, with the same bits."""
    op, backend = "qkv_attention", _backend("qkv_attention", "qkv", qkv)
    sizes, norms = (num_q_heads, num_kv_heads, head_dim), (q_norm, k_norm)
    slots = batch.slot_mappings[group]
    kind = _check_heads(
        op, qkv, batch.positions, sizes, rope, norms, norm_kind, values, k_cache, v_cache, slots, scales
    )
    pages = backend.page_shape(op, k_cache, v_cache, qkv, head_dim)
    _check_scores(op, qkv, num_q_heads, pages, batch, group, window, sinks, softcap)
    of_heads, of_scores = (
        (*sizes, rope, *norms, kind, norm_eps, values, k_cache, v_cache),
        (scale, window, sinks, softcap),
    )
    out: Tensor | None = backend.qkv_attention(qkv, batch, group, *of_heads, pages, *of_scores, tuple(scales))
    if out is None:  # the device has no kernel for both
        q = backend.qkv_prepare(qkv, batch.positions, *of_heads, slots, tuple(scales))
        out = backend.attention(q, k_cache, v_cache, batch, group, pages, *of_scores, tuple(scales), None)
    return out


def _check_scores(
    op: str, q: Tensor, q_heads: int, pages: tuple[int, int, int], batch: Batch, group: int, window: int | None,
    sinks: Tensor | None, softcap: float | None,
) -> None:  # fmt: skip
    """Checks what attention of q, or qkv, takes beside its pages."""
    if q_heads % pages[1]:
        raise fail(op, "q", f"has {q_heads} heads, must be a multiple of the cache's {pages[1]}")
    if window is not None and window < 1:
        raise fail(op, "window", f"is {window}, must be at least 1")
    if sinks is not None:
        check(op, "sinks", sinks, q.device, float32, (q_heads,))
    _check_softcap(op, softcap)
    _check_batch(op, batch, group, q)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    group: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scales: Sequence[Tensor] = (),
    position_bias: Tensor | None = None,
) -> Tensor:
    """Paged causal attention of ``q [T, Hq, D]`` -> ``[T, Hq * D]``.

    ``group`` selects the batch's block tables. ``window`` counts the keys that a query sees, its own included; pages
    outside it are not read. A batch's ``bidirectional_until`` lets tokens see later ones, too. ``sinks`` (float32
    ``[Hq]``): a learned logit of each head that joins the softmax without a value (gpt-oss). With ``softcap`` c a score
    s becomes ``c tanh(s / c)``. A sequence longer than its block table, or a table entry outside the pages, is an
    error. ``scales`` are those of pages of int8 or fp8, of keys and of values (`qkv_prepare`). ``position_bias``
    (float32 ``[2 R, Hq]``, on the cpu alone) is added to scores: row R + key - query; R is at least the longest
    sequence plus BIAS_MARGIN.
    """
    op, backend = "attention", _backend("attention", "q", q)
    check(op, "q", q, q.device, backend.ACTIVATIONS, (None, None, None))
    _, q_heads, head_dim = q.shape
    pages = backend.page_shape(op, k_cache, v_cache, q, head_dim)
    _check_page_scales(op, k_cache, pages, scales)
    _check_position_bias(op, position_bias, batch, q, q_heads)
    _check_scores(op, q, q_heads, pages, batch, group, window, sinks, softcap)
    return backend.attention(  # type: ignore[no-any-return]
        q, k_cache, v_cache, batch, group, pages, scale, window, sinks, softcap, tuple(scales), position_bias
    )


def text_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, group: int, *, num_heads: int, head_dim: int,
    scale: float, scales: Sequence[Tensor] = (), position_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention among the tokens of each whole text, without rotation: ``qkv [T, 3 H D]`` -> ``[T, H D]``.

    `qkv_prepare` and `attention`, unless the device has a kernel that does without pages, which are not written then.
    """
    op, backend = "text_attention", _backend("text_attention", "qkv", qkv)
    if not backend.takes_texts(k_cache.dtype, head_dim):
        q = qkv_prepare(
            qkv, batch.positions, num_q_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, rope=None,
            q_norm=None, k_norm=None, norm_eps=0.0, k_cache=k_cache, v_cache=v_cache,
            slot_mapping=batch.slot_mappings[group], scales=scales,
        )  # fmt: skip
        return attention(
            q, k_cache, v_cache, batch, group, scale=scale, scales=scales, position_bias=position_bias
        )  # fmt: skip
    check(op, "qkv", qkv, qkv.device, backend.ACTIVATIONS, (None, 3 * num_heads * head_dim))
    _, _, block_size = backend.page_shape(op, k_cache, v_cache, qkv, head_dim)
    _check_position_bias(op, position_bias, batch, qkv, num_heads)
    _check_batch(op, batch, group, qkv)
    return backend.text_attention(  # type: ignore[no-any-return]
        qkv, batch, group, block_size, num_heads, head_dim, scale, position_bias
    )


def pooled_texts(x: Tensor, query_start: Tensor, pooling: str) -> Tensor:
    """The pooled rows ``[n, H]`` of n texts. ``x [T, H]`` has the hidden states of their tokens; text i begins at
    ``query_start[i]`` of ``[n + 1]``. ``pooling`` is one of `runtime.pooling.POOLINGS`. On the CPU alone."""
    op, backend = "pooled_texts", _backend("pooled_texts", "x", x)
    check(op, "x", x, x.device, float32, (None, None))
    check(op, "query_start", query_start, x.device, int32, (None,))
    return backend.pooled_texts(x, query_start, pooling)  # type: ignore[no-any-return]


def texts_need_pages(device: Device, page_dtype: DType, head_dim: int) -> bool:
    """Whether `text_attention` writes keys and values to pages of this type, and reads them there."""
    return not backend_of(device).takes_texts(page_dtype, head_dim)


BIAS_MARGIN = 64
"""Rows of a position bias beyond the longest sequence, which kernels read with the last keys."""


def _check_position_bias(op: str, bias: Tensor | None, batch: Batch, x: Tensor, heads: int) -> None:
    if bias is None:
        return
    check(op, "position_bias", bias, x.device, float32, (None, heads))
    if bias.shape[0] < 2 * (batch.max_seq_len + BIAS_MARGIN):
        least = f"must be at least {2 * (batch.max_seq_len + BIAS_MARGIN)} for {batch.max_seq_len} tokens"
        raise fail(op, "position_bias", f"has {bias.shape[0]} rows, {least}")


def _check_batch(op: str, batch: Batch, group: int, q: Tensor) -> None:
    """Checks the fields of a batch that attention reads, once for all layers."""
    if ("checked", group) in batch.plans:
        return
    device, seqs = q.device, batch.num_seqs
    check(op, "batch.query_start", batch.query_start, device, int32, (seqs + 1,))
    check(op, "batch.seq_lens", batch.seq_lens, device, int32, (seqs,))
    check(op, "batch.block_tables", batch.block_tables[group], device, int32, (seqs, None))
    if batch.bidirectional_until is not None:
        check(op, "batch.bidirectional_until", batch.bidirectional_until, device, int32, (q.shape[0],))
    batch.plans["checked", group] = True


def _check_page_scales(op: str, k_cache: Tensor, shape: tuple[int, int, int], scales: Sequence[Tensor]) -> None:
    """Pages of a byte a number have a float32 scale for each token and head; others have none."""
    wanted = 0 if k_cache.dtype in STORED else 2
    if len(scales) != wanted:
        raise fail(op, "scales", f"are {len(scales)} tensors, must be {wanted} for pages of {k_cache.dtype}")
    for name, each in zip(("k_scale", "v_scale"), scales):
        check(op, name, each, k_cache.device, float32, shape)


def latent_queries(
    q: Tensor, latent: Tensor, maps: LatentMaps, positions: Tensor, *, rope: RopeTable, norm: RmsNorm, pages: Tensor,
    slot_mapping: Tensor, out: Tensor | None = None, added: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Queries ``[T, H (key_dim + R)]``, each head's R rotated numbers last, as latent attention takes them, ``[T, H, R
    + C]``: the R are rotated, the others go through the keys' map, and all are multiplied by `rope.q_scales` if there
    are any. Writes each token's row of latent pages.

    ``latent [T, C + R]`` is the projection's output: C numbers, which are normalised, and R, which are rotated. The row
    in the pages (`runtime.kv.cache`) has the R first. ``slot_mapping`` as in `qkv_prepare`. Both may be columns of
    wider rows. A GPU writes the queries to `out` if it is given. ``added(q, made)`` returns what the keys' map has made
    of q plus what adapters add (`LatentAddend.add_queries`).
    """
    op, backend, device = "latent_queries", _backend("latent_queries", "q", q), q.device
    tokens, heads = q.shape[0], maps.num_heads
    check_rows(op, "q", q, device, backend.ACTIVATIONS, (None, heads * maps.head_dim))
    check_rows(op, "latent", latent, device, q.dtype, (tokens, maps.row_dim))
    check(op, "positions", positions, device, int32, (tokens,))
    check(op, "slot_mapping", slot_mapping, device, int64, (tokens,))
    check(op, "rope.cos", rope.cos, device, float32, (None, maps.rotary_dim // 2))
    check(op, "rope.sin", rope.sin, device, float32, rope.cos.shape)
    if rope.q_scales is not None:
        check(op, "rope.q_scales", rope.q_scales, device, float32, (rope.cos.shape[0],))
    check(op, "norm.weight", norm.weight, device, backend.NORM_WEIGHTS, (maps.latent_dim,))
    _check_latent_pages(op, backend, pages, device, maps.row_dim, maps.latent_dim)
    if out is not None:
        _check_written(op, "out", out, device, q.dtype, (tokens, heads, maps.row_dim))
    given = () if out is None else (out,)  # on a GPU alone
    return backend.latent_queries(  # type: ignore[no-any-return]
        q, latent, maps, positions, rope, norm, pages, slot_mapping, *given, added=added
    )


def latent_values(x: Tensor, maps: LatentMaps, *, out: Tensor | None = None) -> Tensor:
    """Results ``[T, H C]`` of latent attention times the values' maps, ``[T, H value_dim]``. A GPU writes them to `out`
    if it is given."""
    op, backend = "latent_values", _backend("latent_values", "x", x)
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, maps.num_heads * maps.latent_dim))
    if out is not None:
        _check_written(op, "out", out, x.device, x.dtype, (x.shape[0], maps.num_heads * maps.value_dim))
    return backend.latent_values(x, maps, *(() if out is None else (out,)))  # type: ignore[no-any-return]


def latent_attention(
    q: Tensor, pages: Tensor, batch: Batch, group: int, *, scale: float, value_dim: int, out: Tensor | None = None
) -> Tensor:
    """Paged causal attention of ``q [T, Hq, D]`` over latent pages -> ``[T, Hq * value_dim]``: a token's row is the key
    of all heads, and its last ``value_dim`` numbers are their value. `batch` and `group` as in `attention`. Only rows
    of the batch's sequences are read; a GPU writes them to `out` if it is given."""
    op, backend, device = "latent_attention", _backend("latent_attention", "q", q), q.device
    check(op, "q", q, device, backend.ACTIVATIONS, (None, None, None))
    width = q.shape[2]
    if not 1 <= value_dim <= width:
        raise fail(op, "value_dim", f"is {value_dim}, must be from 1 to q's {width}")
    _check_latent_pages(op, backend, pages, device, width, value_dim)
    if batch.bidirectional_until is not None:
        raise fail(op, "batch.bidirectional_until", "is given, but tokens see no later ones in latent pages")
    _check_batch(op, batch, group, q)
    if out is not None:
        _check_written(op, "out", out, device, q.dtype, (q.shape[0], q.shape[1] * value_dim))
    given = () if out is None else (out,)  # on a GPU alone
    return backend.latent_attention(q, pages, batch, group, scale, value_dim, *given)  # type: ignore[no-any-return]


def _check_latent_pages(op: str, backend: Any, pages: Tensor, device: Device, width: int, num_values: int) -> None:
    """Checks ``[blocks, 1, block size, width rounded up]`` in the device's layout, or of fp8 that of bytes."""
    check(op, "pages", pages, device, tuple(LATENT_PAGES), (None, 1, None, None))
    padded = -(-width // backend.LATENT_ROW_MULTIPLE) * backend.LATENT_ROW_MULTIPLE
    if pages.dtype is float8_e4m3:
        padded = LatentBytes(width, num_values).row_bytes
    if pages.shape[0] == 0 or pages.shape[2] % 8 or pages.shape[3] != padded:
        raise fail(
            op, "pages", f"are {list(pages.shape)}, must be some blocks of a multiple of 8 tokens and rows of {padded}"
        )


# ------------------------------------------------------------------------------------------ sampling


def sample(logits: Tensor, params: SamplingArrays) -> SampledTokens:
    """Samples one token for each row of ``logits [n, V]`` float32, which stay unchanged.

    A row's sample depends on its logits and parameters alone, its seed, choice and position among them, and is the same
    on every device for the same logits.
    """
    backend = _sampling_backend("sample", logits)
    check_sampling("sample", logits.shape[0], logits.shape[1], params)
    return backend.sample(logits, params)  # type: ignore[no-any-return]


def sample_into(
    logits: Tensor, fields: Sequence[Tensor], results: Tensor, *, has_penalties: bool, has_chains: bool = False
) -> None:
    """`sample` with parameters on the device: on a GPU queued only, so that a graph can record it.

    ``fields`` are the arrays of SamplingArrays except the mask, in their order; seeds int64. ``results [2 n + 1]``
    int32 gets ids, statuses (0: sampled), and on a GPU whether an id was outside its table since the last `check_ids`.
    Without ``has_penalties`` or ``has_chains`` no row may have one. With ``has_chains`` the ``results [3 n + 1]`` end
    with each row's next mu of mirostat, as bits of float32. The contents of the arrays are not checked; the caller must
    ensure that they are valid.
    """
    op, backend = "sample_into", _sampling_backend("sample_into", logits)
    rows, device = logits.shape[0], logits.device
    for field, (name, dtype, shape) in zip(fields, SAMPLING_FIELDS, strict=True):
        wanted = int64 if dtype == np.uint64 else DType.parse(dtype)
        check(op, f"fields.{name}", field, device, wanted, (rows if shape == "n" else None,))
    check(op, "results", results, device, int32, ((3 if has_chains else 2) * rows + 1,))
    backend.sample_into(logits, fields, results, has_penalties=has_penalties, has_chains=has_chains)


def distributions(logits: Tensor, params: SamplingArrays) -> NDArray:
    """The probabilities that `sample` samples each row from, float32 ``[n, V]``, computed on the host: 0 for filtered
    tokens, one 1 in a greedy row, all zeros in a row with nothing to sample. Waits for the device."""
    _sampling_backend("distributions", logits)
    check_sampling("distributions", logits.shape[0], logits.shape[1], params)
    return cpu_sampling.distributions(logits if logits.device.kind == "cpu" else logits.to("cpu"), params)


def processed_logits(logits: Tensor, params: SamplingArrays) -> Tensor:
    """The logits ``[n, V]`` that `sample` draws from, computed on the host: after masks, bias, penalties, temperature
    and filters, with minus infinity for tokens that cannot be drawn; a greedy row's are not divided. Waits for the
    device."""
    _sampling_backend("processed_logits", logits)
    check_sampling("processed_logits", logits.shape[0], logits.shape[1], params)
    given = logits if logits.device.kind == "cpu" else logits.to("cpu")
    return Tensor.from_numpy(cpu_sampling.processed_logits(given, params))


def process_logits(
    logits: Tensor, row: int, prompt_ids: Int32Array, output_ids: Int32Array, numbers: NDArray,
    function: Callable[..., Any],
) -> None:  # fmt: skip
    """Replaces row ``row`` of ``logits [n, V]`` float32, in place, by a user's function of each token:
    ``(token_id, logits, prompt_ids, num_prompt, output_ids, num_output, numbers)``, where ``logits`` are the row as it
    was. The function is compiled for the device when it is first used."""
    op, backend = "process_logits", _sampling_backend("process_logits", logits)
    if not 0 <= row < logits.shape[0]:
        raise fail(op, "row", f"is {row}, must be one of {logits.shape[0]}")
    for name, array, dtype in (
        ("prompt_ids", prompt_ids, np.int32), ("output_ids", output_ids, np.int32), ("numbers", numbers, np.float32),
    ):  # fmt: skip
        if array.dtype != dtype or array.ndim != 1:
            raise fail(op, name, f"is {array.dtype} {array.shape}, must be {np.dtype(dtype)} of one dimension")
    before = backend.gather_rows(logits, place([np.array([row], np.int32)], logits.device)[0])
    backend.process_logits_row(logits[row], before[0], prompt_ids, output_ids, numbers, function)


def keep_proposals(
    wanted: NDArray, proposed: NDArray, drafts: Int32Array, counts: Int32Array, seeds: NDArray, choices: Int32Array,
    positions: Int32Array,
) -> tuple[Int32Array, Int32Array]:  # fmt: skip
    """Rejection sampling of draft tokens, on the host. ``counts``, ``seeds``, ``choices [s]`` are per sequence; the
    others have a row a draft token, concatenated: ``drafts`` were sampled from ``proposed [r, V]`` and are verified
    against ``wanted [r, V]``, float32 probabilities; ``positions`` of the output. Returns how many of each are
    accepted, and the replacement of the first rejected one, or -1 if all are accepted or nothing can be sampled."""
    op, (rows, vocab), num = "keep_proposals", wanted.shape, len(counts)
    for name, array, dtype, shape in (
        ("wanted", wanted, np.float32, (rows, vocab)), ("proposed", proposed, np.float32, (rows, vocab)),
        ("drafts", drafts, np.int32, (rows,)), ("positions", positions, np.int32, (rows,)),
        ("counts", counts, np.int32, (num,)), ("seeds", seeds, np.uint64, (num,)),
        ("choices", choices, np.int32, (num,)),
    ):  # fmt: skip
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise fail(op, name, f"is {array.dtype} {array.shape}, must be contiguous {np.dtype(dtype)} {shape}")
    if counts.min(initial=0) < 0 or counts.sum() != rows:
        raise fail(op, "counts", f"add up to {counts.sum()}, must be the {rows} rows")
    if rows and (drafts.min() < 0 or drafts.max() >= vocab):
        raise fail(op, "drafts", f"hold {drafts.min()} to {drafts.max()}, must lie in 0 to {vocab - 1}")
    return cpu_sampling.keep_proposals(wanted, proposed, drafts, counts, seeds, choices, positions)


def check_ids(device: Device) -> None:
    """Waits for a GPU; InvalidArgumentError if an id was outside its table since the last call."""
    cuda_tensor.check_id_flag(device)


def take_decode_inputs(
    changes: Tensor, num_changes: Tensor, tables: Tensor, sources: Tensor, sampled: Tensor, token_ids: Tensor
) -> None:
    """Completes the inputs of a decode step; all int32.

    ``tables [rows, width]`` gets the first ``num_changes [1]`` pairs of ``changes [n]``: an index in it, and its value.
    ``token_ids [T]`` gets ``sampled[sources[t]]`` where ``sources [T]`` is not negative. Indices and sources must
    exist.
    """
    op, backend = "take_decode_inputs", _backend("take_decode_inputs", "changes", changes)
    device, num_tokens = changes.device, token_ids.shape[0]
    check(op, "changes", changes, device, int32, (None,))
    check(op, "num_changes", num_changes, device, int32, (1,))
    check(op, "tables", tables, device, int32, (None, None))
    check(op, "sources", sources, device, int32, (num_tokens,))
    check(op, "sampled", sampled, device, int32, (None,))
    check(op, "token_ids", token_ids, device, int32, (num_tokens,))
    backend.take_decode_inputs(changes, num_changes, tables, sources, sampled, token_ids)


def log_softmax_topk(logits: Tensor, chosen: Int32Array, top_n: int) -> TopLogprobs:
    """Log-probability and rank of ``chosen [n]`` int32, and the ``top_n`` best, of each row of ``logits [n, V]``.

    A row with NaN or +inf gives NaN.
    """
    backend = _sampling_backend("log_softmax_topk", logits)
    check_chosen("log_softmax_topk", logits.shape[0], logits.shape[1], chosen, top_n)
    return backend.log_softmax_topk(logits, chosen, top_n)  # type: ignore[no-any-return]
