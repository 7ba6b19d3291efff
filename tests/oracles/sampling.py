"""Sampling in plain Python and float64 with full sorts: masks, penalties, filters and the exponential race."""

from __future__ import annotations

import math

import numpy as np

_MASK = 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32-10 of four and two words, as Salmon et al. (SC 2011) write it."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0], second & _MASK, (first >> 32) ^ counter[3] ^ key[1], first & _MASK
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return counter


def processed(logits, *, allowed=None, bias=(), prompt=(), output=(), repetition=1.0, presence=0.0, frequency=0.0):
    """Logits after mask, bias and penalties, rounded to float32 after each step as a float32 engine does."""
    out = np.array(logits, np.float32)
    if allowed is not None:
        out[~allowed] = -np.inf
    for token, value in bias:
        out[token] += np.float32(value)
    for token in set(prompt) | set(output):
        out[token] = out[token] / np.float32(repetition) if out[token] > 0 else out[token] * np.float32(repetition)
    for token in set(output):
        out[token] -= np.float32(frequency) * np.float32(list(output).count(token))
        out[token] -= np.float32(presence)
    return out


def kept_tokens(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Ids that survive the filters, and their probabilities before the draw, renormalised over them."""
    scaled = (np.asarray(logits, np.float32) / np.float32(temperature)).astype(np.float64)
    weights = np.exp(scaled - scaled.max())
    keep = weights > 0
    if min_p > 0:
        keep &= weights >= min_p
    order = sorted(np.flatnonzero(keep), key=lambda token: (-scaled[token], token))
    if 0 < top_k < len(order):
        lowest = scaled[order[top_k - 1]]
        order = [token for token in order if scaled[token] >= lowest]
    if top_p < 1:
        target = np.float64(np.float32(top_p)) * weights[order].sum()
        mass, count = 0.0, 0
        while count < len(order) and (count == 0 or mass < target):
            mass += weights[order[count]]
            count += 1
        order = order[:count]
    ids = np.array(sorted(order))
    return ids, weights[ids] / weights[ids].sum()


def sample(ids, probabilities, seed, choice, position):
    """The token that finishes first: argmin E / p with E from Philox."""
    best, winner = math.inf, -1
    for token, probability in zip(ids.tolist(), probabilities.tolist()):
        words = philox((token >> 2, choice, position, 0), (seed & _MASK, seed >> 32))
        finish = -math.log1p(-(words[token & 3] + 0.5) * 2.0**-32) / probability
        if finish < best:
            best, winner = finish, token
    return winner
