"""Attention in numpy float64, one query and head at a time, over keys and values that lie in a plain row."""

from __future__ import annotations

import numpy as np


def attention_weights(queries, keys, scale, window=None, sinks=None, softcap=None, until=None):
    """The softmax weights ``[Q, Hq, L]``; zeros where a query sees nothing. Shapes as in `attention`.

    ``sinks [Hq]`` are logits of one more key of each head, whose own weight is left out. Scores s become
    ``softcap tanh(s / softcap)``. ``until [Q]``: the key behind the last that each query sees, its own at least."""
    num_queries, num_heads, _ = queries.shape
    length, num_kv_heads, _ = keys.shape
    weights = np.zeros((num_queries, num_heads, length))
    for j in range(num_queries):
        position = length - num_queries + j
        first = 0 if window is None else max(0, position - window + 1)
        if position < first:
            continue
        for head in range(num_heads):
            end = position + 1 if until is None else until[j]
            seen = keys[first:end, head // (num_heads // num_kv_heads)].astype(np.float64)
            scores = seen @ queries[j, head].astype(np.float64) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            sink = -np.inf if sinks is None else np.float64(sinks[head])
            largest = max(scores.max(), sink)
            exponentials = np.exp(scores - largest)
            weights[j, head, first:end] = exponentials / (exponentials.sum() + np.exp(sink - largest))
    return weights


def attention(queries, keys, values, scale, window=None, sinks=None, softcap=None, until=None):
    """One sequence: ``queries [Q, Hq, D]`` are the last Q of ``keys``, ``values [L, Hkv, D]`` -> ``[Q, Hq, D]``."""
    share = queries.shape[1] // keys.shape[1]
    by_head = np.repeat(values.astype(np.float64), share, axis=1)  # [L, Hq, D]
    weights = attention_weights(queries, keys, scale, window, sinks, softcap, until)
    return np.einsum("qhl,lhd->qhd", weights, by_head)


def random_spans(rng, chunks):
    """For tokens of ``chunks``, (context, queries) each: the position behind the last that each sees. Some in a row see
    each other. int32."""
    ends = []
    for context, count in chunks:
        own = np.arange(context + 1, context + count + 1)
        first = 0
        while first < count:
            length = min(count - first, int(rng.integers(1, 50)))
            if rng.integers(2):
                own[first : first + length] = own[first + length - 1]
            first += length
        ends.append(own)
    return np.concatenate(ends).astype(np.int32)
