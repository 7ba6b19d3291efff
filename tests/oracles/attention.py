"""Attention in numpy float64, one query and head at a time, over keys and values that lie in a plain row."""

from __future__ import annotations

import numpy as np


def attention(queries, keys, values, scale, window=None):
    """One sequence: ``queries [Q, Hq, D]`` are the last Q of ``keys``, ``values [L, Hkv, D]`` -> ``[Q, Hq, D]``."""
    num_queries, num_heads, head_dim = queries.shape
    length, num_kv_heads, _ = keys.shape
    out = np.zeros((num_queries, num_heads, head_dim))
    for j in range(num_queries):
        position = length - num_queries + j
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            seen = keys[first : position + 1, kv_head].astype(np.float64)
            scores = seen @ queries[j, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[j, head] = weights / weights.sum() @ values[first : position + 1, kv_head].astype(np.float64)
    return out
