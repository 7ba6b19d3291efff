"""The operations of layers with a recurrent state: their checks, and the call of the device's kernel.

A batch's sequence s has n tokens from position ``p = seq_lens[s] - n`` on. With p > 0 it reads page
``block_tables[group][s, 1]``, of the form `runtime.kv.forms.Recurrent`, which holds the state after L <= p tokens and
what tokens L to p - 1 need, if they are few; it writes page ``block_tables[group][s, 0]``, another one. If n - 1 tokens
fit the page's pending rows they may be rejected later: the page gets the state after the first one, and those rows.
Otherwise it gets the state after the last token. Padding (``seq_lens[s]`` is 0) writes nothing.

On the cpu a token's bits depend on the sequence alone, however it was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.backends import backend_of
from runtime.backends.checks import check, fail
from runtime.batch import Batch
from runtime.dtype import bfloat16, float32, int32
from runtime.linear.recurrent import DeltaRule, Mamba, ShortConv
from runtime.tensor.tensor import Tensor

MOST_KEYS = 1024
"""The most rows of a head's state."""


def short_conv(x: Tensor, weights: ShortConv, *, pages: Sequence[Tensor], batch: Batch, group: int) -> Tensor:
    """A gated short convolution of ``x [T, 3 h]``, columns B, C and x, -> ``[T, h]``: ``C * conv(B * x)``."""
    op = "short_conv"
    backend, channels = _start(op, x, weights, ShortConv), weights.conv.shape[0]
    _check_conv(op, x, weights.conv, weights.bias, channels, "bias")
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, 3 * channels))
    pending = _check_pages(op, backend, x, pages, weights.conv, 0, None)
    _check_batch(op, batch, group, x)
    return backend.short_conv(x, weights, tuple(pages), batch, group, pending)  # type: ignore[no-any-return]


def delta_rule(x: Tensor, weights: DeltaRule, *, pages: Sequence[Tensor], batch: Batch, group: int) -> Tensor:
    """The gated delta rule of ``x [T, 2 Kd + 2 Vd + 2 Hv]``, columns q, k, v, z, b and a, -> ``[T, Vd]``.

    q, k and v are convolved and go through SiLU; q and k are normalised to length 1, q is then divided by
    ``sqrt(dk)``. For each value head, with ``beta = sigmoid(b)`` and ``g = a * softplus(a_column + dt_bias)``::

        S = e^g S;  S = S + k (beta (v - S^T k))^T;  o = S^T q;  y = RMSNorm(o) * norm * gate(z)
    """
    op, w = "delta_rule", weights
    backend = _start(op, x, w, DeltaRule)
    _check_positive(op, w, ("num_key_heads", "num_value_heads", "key_dim", "value_dim"))
    if w.num_value_heads % w.num_key_heads:
        raise fail(
            op,
            "weights.num_value_heads",
            f"is {w.num_value_heads}, must be a multiple of the {w.num_key_heads} key heads",
        )
    if w.gate not in ("silu", "sigmoid"):
        raise fail(op, "weights.gate", f"is {w.gate!r}, must be silu or sigmoid")
    _check_rows(op, "key_dim", w.key_dim)
    _check_conv(op, x, w.conv, None, w.channels, "")
    for name in ("a", "dt_bias"):
        check(op, f"weights.{name}", getattr(w, name), x.device, float32, (w.num_value_heads,))
    check(op, "weights.norm", w.norm, x.device, float32, (w.value_dim,))
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, w.channels + w.values + w.num_gates))
    sizes = w.num_value_heads, w.key_dim, w.value_dim
    pending = _check_pages(op, backend, x, pages, w.conv, w.num_gates, sizes)
    _check_batch(op, batch, group, x)
    return backend.delta_rule(x, w, tuple(pages), batch, group, pending)  # type: ignore[no-any-return]


def mamba(x: Tensor, weights: Mamba, *, pages: Sequence[Tensor], batch: Batch, group: int) -> Tensor:
    """The Mamba-2 recurrence of ``x [T, inner + C + heads]``, columns gate, x B C (convolved, then SiLU) and dt, ->
    ``[T, inner]``. For each head, with ``dt = clamp(softplus(dt + dt_bias))`` and B, C of its group::

        S = e^(dt a) S + B (dt x)^T;  y = S^T C + d x

    Then ``y * silu(gate)`` goes through the grouped RMSNorm.
    """
    op, w = "mamba", weights
    backend = _start(op, x, w, Mamba)
    _check_positive(op, w, ("num_heads", "head_dim", "num_groups", "state_size", "norm_groups"))
    if w.num_heads % w.num_groups:
        raise fail(op, "weights.num_heads", f"is {w.num_heads}, must be a multiple of the {w.num_groups} groups")
    if w.inner % w.norm_groups:
        raise fail(op, "weights.norm_groups", f"is {w.norm_groups}, must divide the {w.inner} channels")
    if not 0 <= w.dt_limit[0] <= w.dt_limit[1]:
        raise fail(op, "weights.dt_limit", f"is {w.dt_limit}, must rise from 0 or more")
    _check_rows(op, "state_size", w.state_size)
    _check_conv(op, x, w.conv, w.conv_bias, w.channels, "conv_bias")
    for name in ("a", "dt_bias", "d"):
        check(op, f"weights.{name}", getattr(w, name), x.device, float32, (w.num_heads,))
    check(op, "weights.norm", w.norm, x.device, float32, (w.inner,))
    check(op, "x", x, x.device, backend.ACTIVATIONS, (None, w.inner + w.channels + w.num_heads))
    sizes = w.num_heads, w.state_size, w.head_dim
    pending = _check_pages(op, backend, x, pages, w.conv, w.num_gates, sizes)
    _check_batch(op, batch, group, x)
    return backend.mamba(x, w, tuple(pages), batch, group, pending)  # type: ignore[no-any-return]


def _start(op: str, x: Tensor, weights: object, kind: type) -> Any:
    """The implementation for the device of x."""
    if not isinstance(x, Tensor):
        raise fail(op, "x", f"must be a Tensor, not {type(x).__name__}")
    if not isinstance(weights, kind):
        raise fail(op, "weights", f"must be {kind.__name__}, not {type(weights).__name__}")
    return backend_of(x.device)


def _check_positive(op: str, weights: object, names: tuple[str, ...]) -> None:
    for name in names:
        if (value := getattr(weights, name)) < 1:
            raise fail(op, f"weights.{name}", f"is {value}, must be at least 1")


def _check_rows(op: str, name: str, rows: int) -> None:
    if rows > MOST_KEYS:
        raise fail(op, f"weights.{name}", f"is {rows}, limit {MOST_KEYS}")


def _check_conv(op: str, x: Tensor, conv: Tensor, bias: Tensor | None, channels: int, name: str) -> None:
    check(op, "weights.conv", conv, x.device, float32, (channels, None))
    if conv.shape[1] < 2:
        raise fail(op, "weights.conv", f"has {conv.shape[1]} columns, must have at least 2")
    if bias is not None:
        check(op, f"weights.{name}", bias, x.device, float32, (channels,))


def _check_pages(
    op: str, backend: Any, x: Tensor, pages: Sequence[Tensor], conv: Tensor, gates: int,
    sizes: tuple[int, int, int] | None,
) -> int:  # fmt: skip
    """Checks the planes of a page, of a state of heads, rows and columns; returns the number of pending rows."""
    device, (channels, taps) = x.device, conv.shape
    if len(pages) < 2:
        raise fail(op, "pages", f"are {len(pages)} planes, must be a length, inputs and what the form has")
    check(op, "pages.length", pages[0], device, int32, (None, 1))
    num_pages = pages[0].shape[0]
    check(op, "pages.inputs", pages[1], device, x.dtype, (num_pages, None, channels))
    pending = pages[1].shape[1] - (taps - 1)
    if pending < 0 or num_pages == 0:
        raise fail(op, "pages.inputs", f"have {list(pages[1].shape)} rows, must be some pages of {taps - 1} or more")
    rest = list(pages[2:])
    if pending and gates:
        if not rest:
            raise fail(op, "pages", f"have no plane of gates for {pending} pending tokens")
        check(op, "pages.gates", rest.pop(0), device, x.dtype, (num_pages, pending, gates))
    if sizes is not None:
        if not rest:
            raise fail(op, "pages", "have no plane of states")
        heads, rows, columns = sizes
        shape = (num_pages, heads, rows, columns) if device.kind == "cpu" else (num_pages, heads, columns, rows)
        check(op, "pages.state", rest.pop(0), device, (float32, bfloat16), shape)
    if rest:
        raise fail(op, "pages", f"are {len(pages)} planes, {len(rest)} more than the operation has")
    return pending


def _check_batch(op: str, batch: Batch, group: int, x: Tensor) -> None:
    """Checks the fields of a batch that states need, once for all layers."""
    if ("checked states", group) in batch.plans:
        return
    device, seqs = x.device, batch.num_seqs
    check(op, "batch.query_start", batch.query_start, device, int32, (seqs + 1,))
    check(op, "batch.seq_lens", batch.seq_lens, device, int32, (seqs,))
    check(op, "batch.block_tables", table := batch.block_tables[group], device, int32, (seqs, None))
    if table.shape[1] < 2:
        raise fail(op, "batch.block_tables", f"have {table.shape[1]} entries a sequence, must have 2")
    batch.plans["checked states", group] = True
