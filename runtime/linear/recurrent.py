"""The weights of layers with a recurrent state besides their projections: convolutions, decays and gated norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShortConv:
    """A gated short convolution (LFM2). Tensors are float32.

    Attributes:
        conv: ``[h, K]``: a causal filter for each channel; column K - 1 is the token's own.
        bias: ``[h]``, or None.
    """

    conv: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeltaRule:
    """A gated delta rule (https://arxiv.org/abs/2412.06464) with its convolution and norm. Tensors are float32.

    Attributes:
        conv: ``[2 Hk dk + Hv dv, K]``, channels q, k, v; column K - 1 is the token's own.
        a: ``[Hv]``, ``-exp(A_log)``.
        dt_bias: ``[Hv]``.
        norm: ``[dv]``, the weight of each head's RMSNorm.
        eps: of the norm.
        num_key_heads, num_value_heads: Hk and Hv, a multiple of Hk.
        key_dim, value_dim: dk and dv.
        tiled: value head h uses key head ``h % Hk``, as in GGUF files, not ``h // (Hv / Hk)``.
        gate: the function of z that multiplies the norm's result.
    """

    conv: Tensor
    a: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def keys(self) -> int:
        """Channels of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values

    @property
    def num_gates(self) -> int:
        """Columns b and a of a token."""
        return 2 * self.num_value_heads


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Mamba:
    """A Mamba-2 mixer (https://arxiv.org/abs/2405.21060) without its projections. Tensors are float32.

    Attributes:
        conv: ``[inner + 2 G N, K]``, channels x, B, C; column K - 1 is the token's own.
        conv_bias: ``[inner + 2 G N]``, or None.
        a: ``[heads]``, ``-exp(A_log)``.
        dt_bias, d: ``[heads]``.
        norm: ``[inner]``; each of ``norm_groups`` equal parts has an RMSNorm of its own.
        eps: of the norm.
        num_heads, head_dim: of x; inner is their product.
        num_groups: G, of B and C; divides the heads.
        state_size: N.
        dt_limit: the least and the largest dt.
    """

    conv: Tensor
    conv_bias: Tensor | None = None
    a: Tensor
    dt_bias: Tensor
    d: Tensor
    norm: Tensor
    eps: float
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    norm_groups: int = 1
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def num_gates(self) -> int:
        """Columns dt of a token."""
        return self.num_heads
