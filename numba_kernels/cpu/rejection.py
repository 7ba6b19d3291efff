"""Rejection sampling of draft tokens, so that the accepted tokens have the target distribution.

A proposal x, drawn from q, is kept with probability min(1, p(x) / q(x)). The first that is not is replaced by a draw
from max(p - q, 0) (Leviathan et al. 2023, Chen et al. 2023). Random numbers are Philox's, with the request's seed as
key and (0, choice, position, 1) as counter: those of other draws have a 0 there. Two words of it decide, two draw. Sums
are of float64.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.intrinsics.scalars import philox
from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at, int32_at, int64_at

FIELDS = Fields(
    "*wanted *proposed *drafts *first_row *counts *seeds *choices *positions *kept *replacements num_sequences "
    "num_rows vocab"
)
_STREAM = np.uint32(1)


@njit(nogil=True)
def _uniform(high, low):
    """A random number in (0, 1), of 64 bits."""
    return (np.float64(high) * 2.0**32 + np.float64(low) + 0.5) * 2.0**-64


@njit(nogil=True)
def _replacement(p, q, uniform):
    """A token drawn from max(p - q, 0); from p where rounding has made that 0."""
    vocab, total = p.shape[0], 0.0
    for i in range(vocab):
        total += max(np.float64(p[i]) - np.float64(q[i]), 0.0)
    is_rest = total > 0.0
    if not is_rest:
        for i in range(vocab):
            total += np.float64(p[i])
    at, last, mass = uniform * total, np.int64(-1), 0.0
    for i in range(vocab):
        more = np.float64(p[i]) - (np.float64(q[i]) if is_rest else 0.0)
        if more > 0.0:
            mass += more
            last = np.int64(i)
            if mass > at:
                break
    return last


@functools.cache
def rejection_kernel() -> Kernel:
    """A work item is a sequence, with ``counts`` proposals from ``first_row`` on: ``wanted`` and ``proposed [num_rows,
    vocab]`` float32 are p and q of each, ``drafts`` and ``positions [num_rows]`` int32. ``kept`` gets how many are
    kept, ``replacements`` the token instead of the next one, -1 where all are kept. A p of all zeros keeps no draft,
    and has no replacement."""

    def rejection(arguments, work_item):
        a = carray(arguments, 1)[0]
        sequences, rows, vocab = a.num_sequences, a.num_rows, a.vocab
        first = int64_at(a.first_row, sequences)[work_item]
        count = np.int64(int32_at(a.counts, sequences)[work_item])
        seed = np.uint64(int64_at(a.seeds, sequences)[work_item])
        choice = np.uint32(int32_at(a.choices, sequences)[work_item])
        key_low, key_high = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
        kept, replacement = np.int64(0), np.int64(-1)
        for place in range(count):
            row = first + place
            draft = np.int64(int32_at(a.drafts, rows)[row])
            position = np.uint32(int32_at(a.positions, rows)[row])
            words = philox(np.uint32(0), choice, position, _STREAM, key_low, key_high)
            p = float32_at(a.wanted + row * vocab * 4, vocab)
            q = float32_at(a.proposed + row * vocab * 4, vocab)
            if _uniform(words[0], words[1]) * np.float64(q[draft]) < np.float64(p[draft]):
                kept += 1
                continue
            replacement = _replacement(p, q, _uniform(words[2], words[3]))
            break
        int32_at(a.kept, sequences)[work_item] = kept
        int32_at(a.replacements, sequences)[work_item] = replacement

    return Kernel(rejection, FIELDS)
