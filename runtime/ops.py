"""The one door to every operation of a model: validate, then the kernels of the tensor's device.

Activations on cpu are float32; weights are float32, float16 or bfloat16 as stored, widened in the kernel; so is the KV
cache. Every function checks dtype, shape, contiguity and device of each argument and raises InvalidArgumentError that
names the operation and the argument. (Being built: the signatures stand, the bodies follow.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.batch import Batch
from runtime.device.device import Device
from runtime.dtype import DType
from runtime.sampling_arrays import Int32Array, SampledTokens, SamplingArrays, TopLogprobs
from runtime.tensor import Tensor
from runtime.tensor_ops import *  # noqa: F403  generic arithmetic, which Tensor's operators reach through this door


class LinearWeight:
    """A weight matrix ``[N, K]`` (and its bias) in the layout that `linear` reads; made by `prepare_linear`."""

    shape: tuple[int, int]
    dtype: DType
    device: Device
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotations for each position: ``cos`` and ``sin`` ``[max_position, head_dim / 2]`` float32."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


def prepare_linear(
    weight: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor | None] | None = None
) -> LinearWeight:
    """Packs ``weight [N, K]`` (several tensors: concatenated over N), any strides; the source can be released after."""
    raise NotImplementedError


def linear(
    x: Tensor, weight: LinearWeight, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``x [T, K] . weight^T + bias + residual [T, N]`` -> ``[T, N]`` float32. ``out`` may be ``residual``."""
    raise NotImplementedError


def embedding(token_ids: Tensor, table: Tensor | LinearWeight) -> Tensor:
    """Rows of ``table [V, H]`` for ``token_ids [T]`` int32 -> ``[T, H]`` float32."""
    raise NotImplementedError


def add_embedding(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Adds rows of ``table [P, H]`` for ``positions [T]`` to ``x [T, H]`` in place; returns ``x``."""
    raise NotImplementedError


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over rows ``[T, H]``; weight ``[H]`` of any weight dtype."""
    raise NotImplementedError


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over rows ``[T, H]``."""
    raise NotImplementedError


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
    """Splits ``qkv [T, (Hq + 2 Hkv) D]``, norms and rotates q and k, writes k and v into the pages -> q ``[T, Hq, D]``."""
    raise NotImplementedError


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    group: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Paged causal attention of ``q [T, Hq, D]`` -> ``[T, Hq * D]``; ``window`` counts keys, the query's own included."""
    raise NotImplementedError


def gelu(x: Tensor, kind: Literal["erf", "tanh", "sigmoid"], *, out: Tensor | None = None) -> Tensor:
    """GELU by its erf, its tanh approximation, or ``x sigmoid(1.702 x)``; ``out`` may be ``x``."""
    raise NotImplementedError


def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x sigmoid(x)``; ``out`` may be ``x``."""
    raise NotImplementedError


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 I]``, gate first -> ``[T, I]``."""
    raise NotImplementedError


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices [n]`` int32 of ``x [T, H]`` -> ``[n, H]``."""
    raise NotImplementedError


def sample(logits: Tensor, params: SamplingArrays) -> SampledTokens:
    """Draws one token a row of ``logits [n, V]`` float32, which stay unchanged."""
    raise NotImplementedError


def log_softmax_topk(logits: Tensor, chosen: Int32Array, top_n: int) -> TopLogprobs:
    """Log-probability and rank of ``chosen [n]`` int32 and the ``top_n`` best of each row of ``logits [n, V]``."""
    raise NotImplementedError
