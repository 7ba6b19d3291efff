"""Layers with a recurrent state in numpy float64, one sequence and one token at a time, from its start."""

from __future__ import annotations

import numpy as np


def _sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def _silu(x):
    return x * _sigmoid(x)


def _softplus(x):
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def causal_conv(x, conv, bias=None):
    """``x [T, C]``, ``conv [C, K]`` -> ``[T, C]``; the last column is the token's own."""
    taps = conv.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    result = sum(padded[tap : tap + len(x)] * conv[:, tap] for tap in range(taps))
    return result if bias is None else result + bias


def short_conv(x, conv, bias=None):
    """``x [T, 3 h]``, columns B, C, x, -> ``[T, h]``."""
    b, c, x = np.split(x.astype(np.float64), 3, axis=1)
    return c * causal_conv(b * x, conv.astype(np.float64), bias)


def delta_rule(
    x, conv, a, dt_bias, norm, eps, num_key_heads, num_value_heads, key_dim, value_dim, tiled=False, gate="silu",
    rounded=lambda state: state,
):  # fmt: skip
    """``x [T, 2 Kd + 2 Vd + 2 Hv]``, columns q, k, v, z, b, a -> ``[T, Vd]`` and the states ``[T, Hv, dk, dv]`` after
    each token. ``rounded`` is applied to each state."""
    x, tokens = x.astype(np.float64), len(x)
    keys, values = num_key_heads * key_dim, num_value_heads * value_dim
    mixed = _silu(causal_conv(x[:, : 2 * keys + values], conv.astype(np.float64)))
    q, k = (mixed[:, first : first + keys].reshape(tokens, num_key_heads, key_dim) for first in (0, keys))
    q, k = (each / np.sqrt((each**2).sum(2, keepdims=True) + 1e-6) for each in (q, k))
    q = q / np.sqrt(key_dim)
    v = mixed[:, 2 * keys :].reshape(tokens, num_value_heads, value_dim)
    z = x[:, 2 * keys + values : 2 * keys + 2 * values].reshape(v.shape)
    beta = _sigmoid(x[:, -2 * num_value_heads : -num_value_heads])
    decay = np.exp(a * _softplus(x[:, -num_value_heads:] + dt_bias))
    heads = np.arange(num_value_heads)
    of = heads % num_key_heads if tiled else heads // (num_value_heads // num_key_heads)
    state, states, out = np.zeros((num_value_heads, key_dim, value_dim)), [], np.empty_like(v)
    for t in range(tokens):
        state = state * decay[t, :, None, None]
        error = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t, of]))
        state = rounded(state + k[t, of][:, :, None] * error[:, None])
        out[t] = np.einsum("hkv,hk->hv", state, q[t, of])
        states.append(state)
    out = out / np.sqrt((out**2).mean(2, keepdims=True) + eps) * norm
    return (out * (_silu(z) if gate == "silu" else _sigmoid(z))).reshape(tokens, values), np.array(states)


def mamba(
    x, conv, conv_bias, a, dt_bias, d, norm, eps, num_heads, head_dim, num_groups, state_size, norm_groups, dt_limit,
    rounded=lambda state: state,
):  # fmt: skip
    """``x [T, inner + C + heads]``, columns gate, x B C, dt -> ``[T, inner]`` and the states ``[T, heads, N, P]``."""
    x, tokens, inner = x.astype(np.float64), len(x), num_heads * head_dim
    size = num_groups * state_size
    mixed = _silu(causal_conv(x[:, inner : 2 * inner + 2 * size], conv.astype(np.float64), conv_bias))
    own = mixed[:, :inner].reshape(tokens, num_heads, head_dim)
    b, c = (mixed[:, inner + i * size :][:, :size].reshape(tokens, num_groups, state_size) for i in (0, 1))
    b, c = (np.repeat(each, num_heads // num_groups, axis=1) for each in (b, c))
    step = np.clip(_softplus(x[:, -num_heads:] + dt_bias), *dt_limit)
    state, states, y = np.zeros((num_heads, state_size, head_dim)), [], np.empty_like(own)
    for t in range(tokens):
        added = b[t][:, :, None] * (step[t, :, None] * own[t])[:, None]
        state = rounded(state * np.exp(step[t] * a)[:, None, None] + added)
        y[t] = np.einsum("hnp,hn->hp", state, c[t]) + d[:, None] * own[t]
        states.append(state)
    gated = (y.reshape(tokens, inner) * _silu(x[:, :inner])).reshape(tokens, norm_groups, -1)
    gated = gated / np.sqrt((gated**2).mean(2, keepdims=True) + eps)
    return gated.reshape(tokens, inner) * norm, np.array(states)
