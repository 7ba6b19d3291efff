"""Attention in numpy float64, one query and head at a time, over keys and values that lie in a plain row."""

from __future__ import annotations

import numpy as np


def attention_weights(queries, keys, scale, window=None, sinks=None, softcap=None):
    """The softmax weights ``[Q, Hq, L]``; zeros where a query sees nothing. Shapes as in `attention`.

    ``sinks [Hq]`` are logits of one more key of each head, whose own weight is left out. Scores s become
    ``softcap tanh(s / softcap)``."""
    num_queries, num_heads, _ = queries.shape
    length, num_kv_heads, _ = keys.shape
    weights = np.zeros((num_queries, num_heads, length))
    for j in range(num_queries):
        position = length - num_queries + j
        first = 0 if window is None else max(0, position - window + 1)
        if position < first:
            continue
        for head in range(num_heads):
            seen = keys[first : position + 1, head // (num_heads // num_kv_heads)].astype(np.float64)
            scores = seen @ queries[j, head].astype(np.float64) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            sink = -np.inf if sinks is None else np.float64(sinks[head])
            largest = max(scores.max(), sink)
            exponentials = np.exp(scores - largest)
            weights[j, head, first : position + 1] = exponentials / (exponentials.sum() + np.exp(sink - largest))
    return weights


def attention(queries, keys, values, scale, window=None, sinks=None, softcap=None):
    """One sequence: ``queries [Q, Hq, D]`` are the last Q of ``keys``, ``values [L, Hkv, D]`` -> ``[Q, Hq, D]``."""
    share = queries.shape[1] // keys.shape[1]
    by_head = np.repeat(values.astype(np.float64), share, axis=1)  # [L, Hq, D]
    return np.einsum("qhl,lhd->qhd", attention_weights(queries, keys, scale, window, sinks, softcap), by_head)
