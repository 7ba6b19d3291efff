"""The one door to every operation of a model: the kernels of the device that the tensors lie on.

Activations on the cpu are float32. On a GPU, real or emulated, they are float32, float16 or bfloat16, one type
throughout, with float32 arithmetic inside each kernel. Weights and the KV cache are of any of the three on the cpu, of
the activations' type on a GPU; norm weights and biases are float32 there.

Every function checks dtype, shape, contiguity and device of each argument before anything is launched, and raises
InvalidArgumentError naming the operation and the argument. `runtime.backends` holds the implementations. The generic
arithmetic behind Tensor's operators is `runtime.tensor.arithmetic`; its functions are reached through here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

from numba_kernels.cpu.recording import NotRecordableError, current
from runtime.backends import cpu, cpu_decode, cpu_sampling
from runtime.backends.cpu_checks import fail
from runtime.batch import Batch
from runtime.device.device import CPU, Device
from runtime.linear.weight import LinearWeight, prepare_linear
from runtime.rope_table import RopeTable
from runtime.sampling_arrays import Int32Array, SampledTokens, SamplingArrays, TopLogprobs
from runtime.tensor import arithmetic
from runtime.tensor.storage import NDArray
from runtime.tensor.tensor import Tensor

__all__ = [
    "LinearWeight", "RopeTable", "add_embedding", "attention", "check_ids", "draw", "embedding", "gather_rows", "gelu",
    "glu", "layer_norm", "linear", "linear_glu", "log_softmax_topk", "logits_linear", "place", "prepare_linear",
    "qkv_prepare", "rms_norm", "sample", "silu", "take_decode_inputs",
]  # fmt: skip

GluActivation = Literal["silu", "gelu_tanh"]
GLU_ACTIVATIONS = ("silu", "gelu_tanh")


def __getattr__(name: str) -> Any:
    """The generic arithmetic: ``ops.add`` and the rest, numpy's on the cpu, which no recording knows of."""
    if current() is not None and name in arithmetic.__dict__:
        raise NotRecordableError(f"{name} is not a kernel on the cpu")
    return getattr(arithmetic, name)


def _backend(op: str, argument: str, tensor: Tensor) -> ModuleType:
    """The implementation for the device of the operation's first tensor."""
    if not isinstance(tensor, Tensor):
        raise fail(op, argument, f"must be a Tensor, not {type(tensor).__name__}")
    if tensor.storage.device is CPU or tensor.device.kind == "cpu":
        return cpu
    from runtime.backends import cuda  # needs numba-cuda, which only those devices ask for

    return cuda


def _sampling_backend(op: str, logits: Tensor) -> ModuleType:
    if _backend(op, "logits", logits) is cpu:
        return cpu_sampling
    from runtime.backends import cuda_sampling

    return cuda_sampling


def place(arrays: Sequence[NDArray], device: Device) -> list[Tensor]:
    """The arrays as tensors on a device: over their own memory on the cpu, else copied together."""
    if device.kind == "cpu":
        return [Tensor.from_numpy(array) for array in arrays]
    from runtime.backends import cuda_tensor

    return cuda_tensor.upload_together(arrays, device)


# ------------------------------------------------------------------------------------------ linear, embedding


def linear(x: Tensor, weight: LinearWeight, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``x [T, K] . weight^T + bias + residual [T, N]`` -> ``[T, N]``. ``out`` may be ``residual``, but not ``x``."""
    return _backend("linear", "x", x).linear(x, weight, residual=residual, out=out)  # type: ignore[no-any-return]


def linear_glu(x: Tensor, weight: LinearWeight, activation: GluActivation) -> Tensor:
    """``glu(linear(x, weight), activation)``, gate's rows first in ``weight [2 I, K]`` -> ``[T, I]``.

    One launch where that is faster, and then rounded once. Errors are those of `linear` and `glu`.
    """
    _check_glu("linear_glu", "weight", weight.shape[0], activation)
    return _backend("linear", "x", x).linear_glu(x, weight, activation)  # type: ignore[no-any-return]


def logits_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """As `linear`, with a float32 result whatever the activations' type: ``[T, K]`` -> ``[T, V]``."""
    return _backend("logits_linear", "x", x).logits_linear(x, weight)  # type: ignore[no-any-return]


def embedding(token_ids: Tensor, table: Tensor | LinearWeight) -> Tensor:
    """Rows of ``table [V, H]`` for ``token_ids [T]`` int32 -> ``[T, H]`` in the activations' type.

    A LinearWeight serves as the table too, so that a weight tied to the output layer is stored once.
    """
    return _backend("embedding", "token_ids", token_ids).embedding(token_ids, table)  # type: ignore[no-any-return]


def add_embedding(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Adds rows of ``table [P, H]`` for ``positions [T]`` to ``x [T, H]`` in place; returns ``x``."""
    return _backend("add_embedding", "x", x).add_embedding(x, positions, table)  # type: ignore[no-any-return]


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices [n]`` int32 of ``x [T, H]`` -> ``[n, H]``."""
    return _backend("gather_rows", "x", x).gather_rows(x, indices)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------ norms, activations


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over rows ``[T, H]``; weight ``[H]``."""
    return _backend("rms_norm", "x", x).rms_norm(x, weight, eps)  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over rows ``[T, H]``; weight and bias ``[H]`` of one dtype."""
    return _backend("layer_norm", "x", x).layer_norm(x, weight, bias, eps)  # type: ignore[no-any-return]


def gelu(x: Tensor, kind: Literal["erf", "tanh", "sigmoid"], *, out: Tensor | None = None) -> Tensor:
    """GELU by its erf, its tanh approximation, or ``x sigmoid(1.702 x)``; ``out`` may be ``x``."""
    if kind not in ("erf", "tanh", "sigmoid"):
        raise fail("gelu", "kind", f"is {kind!r}, must be 'erf', 'tanh' or 'sigmoid'")
    return _backend("gelu", "x", x).activate("gelu", f"gelu_{kind}", x, out)  # type: ignore[no-any-return]


def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x sigmoid(x)``; ``out`` may be ``x``."""
    return _backend("silu", "x", x).activate("silu", "silu", x, out)  # type: ignore[no-any-return]


def glu(gate_up: Tensor, activation: GluActivation) -> Tensor:
    """``f(gate) * up`` of ``[T, 2 I]``, gate first -> ``[T, I]``; f is SiLU or GELU by its tanh approximation."""
    backend = _backend("glu", "gate_up", gate_up)
    _check_glu("glu", "gate_up", gate_up.shape[-1], activation)
    return backend.glu(gate_up, activation)  # type: ignore[no-any-return]


def _check_glu(op: str, argument: str, both: int, activation: str) -> None:
    if activation not in GLU_ACTIVATIONS:
        raise fail(op, "activation", f"is {activation!r}, must be one of {', '.join(GLU_ACTIVATIONS)}")
    if both % 2:
        raise fail(op, argument, f"gives {both} columns, must be an even number")


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
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Splits ``qkv [T, (Hq + 2 Hkv) D]``, normalises (weights ``[D]``) and rotates q and k -> q ``[T, Hq, D]``.

    K and V of token t are written to slot ``slot_mapping[t]`` (int64: block * block_size + offset; negative: nowhere).
    The pages' layout is the device's own (`runtime.kv.cache`).
    """
    return _backend("qkv_prepare", "qkv", qkv).qkv_prepare(  # type: ignore[no-any-return]
        qkv,
        positions,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=norm_eps,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
    )


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
) -> Tensor:
    """Paged causal attention of ``q [T, Hq, D]`` -> ``[T, Hq * D]``.

    ``group`` picks the batch's block tables. ``window`` counts the keys that a query sees, its own included. ``sinks``
    (float32 ``[Hq]``): a logit of each head that joins the softmax over its keys and has no value, as gpt-oss learns
    them. A sequence longer than its block table, or a table entry outside the pages, is an error.
    """
    return _backend("attention", "q", q).attention(  # type: ignore[no-any-return]
        q, k_cache, v_cache, batch, group, scale=scale, window=window, sinks=sinks
    )


# ------------------------------------------------------------------------------------------ sampling


def sample(logits: Tensor, params: SamplingArrays) -> SampledTokens:
    """Draws one token for each row of ``logits [n, V]`` float32, which stay unchanged.

    The draw of a row depends on its logits and parameters alone, its seed, choice and position among them, and is the
    same on every device for the same logits.
    """
    return _sampling_backend("sample", logits).sample(logits, params)  # type: ignore[no-any-return]


def draw(logits: Tensor, fields: Sequence[Tensor], results: Tensor, *, has_penalties: bool) -> None:
    """As `sample`, of parameters that lie on the device: on a GPU queued only, so that a graph can record it.

    ``fields`` are the arrays of SamplingArrays but for the mask, in their order; seeds int64. Starts may begin above 0.
    ``results [2 n + 1]`` int32 gets ids, statuses (0: drawn), and on a GPU whether an id was outside its table since
    the last `check_ids`. Without ``has_penalties`` no row may have one. What the arrays hold is for the caller to vouch
    for.
    """
    _sampling_backend("draw", logits).draw(logits, fields, results, has_penalties=has_penalties)


def check_ids(device: Device) -> None:
    """Waits for a GPU; InvalidArgumentError where an id was outside its table since the last call."""
    from runtime.backends import cuda_tensor

    cuda_tensor.check_id_flag(device)


def take_decode_inputs(
    changes: Tensor, num_changes: Tensor, tables: Tensor, sources: Tensor, drawn: Tensor, token_ids: Tensor
) -> None:
    """Completes the inputs of a decode step; all int32.

    ``tables [rows, width]`` gets the first ``num_changes [1]`` pairs of ``changes [n]``: a place in it, and its value.
    ``token_ids [T]`` gets ``drawn[sources[t]]`` where ``sources [T]`` is not negative. Places and sources must exist.
    """
    backend: ModuleType = cpu_decode
    if _backend("take_decode_inputs", "changes", changes) is not cpu:
        from runtime.backends import cuda_decode as backend

    backend.take_decode_inputs(changes, num_changes, tables, sources, drawn, token_ids)


def log_softmax_topk(logits: Tensor, chosen: Int32Array, top_n: int) -> TopLogprobs:
    """Log-probability and rank of ``chosen [n]`` int32, and the ``top_n`` best, of each row of ``logits [n, V]``.

    A row with NaN or +inf gives NaN.
    """
    return _sampling_backend("log_softmax_topk", logits).log_softmax_topk(  # type: ignore[no-any-return]
        logits, chosen, top_n
    )
