"""Prepares what a recurrence reads, once for each token and head: convolution and SiLU; keys and queries, normalised
where the rule is the delta rule; decays and step sizes; and the inputs of the next chunk, in the page that is written.

    delta rule  q, k = x rsqrt(sum x^2 + 1e-6), q / sqrt(dk);  step = sigmoid(b)
                decay = e^(a softplus(alpha + dt_bias))
    mamba       q, k = C, B as they are;  step = clamp(softplus(dt + dt_bias));  decay = e^(step a)

Prepared rows ``[T + num_seqs * pending, channels]`` float32 hold a token's convolved channels: first those of the
batch's tokens, then of each sequence the pending tokens of the page that it reads. ``factors`` has for each row the
products k . q of the key heads, the decays of the value heads, and their step sizes.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.recurrent.convolution import (
    CHUNK_FIELDS,
    TOKENS,
    chunk_of,
    covered,
    history_row,
    written_page,
)
from numba_kernels.cpu.recurrent.tiles import convolve, gate_factors, inner_product
from numba_kernels.cpu.running.launch import Fields, Kernel, address, float32_at, int32_at

FIELDS = Fields(
    CHUNK_FIELDS + "*x *conv *bias *a *dt_bias *gates *prepared *factors stride x_first gates_first num_gates "
    "key_heads value_heads key_dim value_dim q_first k_first v_first parts_a_work_item",
    "least most",
)


@njit(nogil=True)
def _addresses(a, chunk, token, count, zeros, target):
    """``target [count]`` = addresses of the convolution's inputs of tokens from ``token`` on, ``zeros`` before a
    sequence's start."""
    start, p, page, length = chunk
    for i in range(count):
        at = token + i
        if at >= p:
            target[i] = a.x + ((start + at - p) * a.stride + a.x_first) * 4
        elif p == 0:
            target[i] = zeros
        else:
            target[i] = history_row(a, page, length, at)


@njit(nogil=True)
def _normalise(x, width, scale):
    factor = np.float32(scale / math.sqrt(inner_product(x, x, width) + np.float32(1e-6)))
    values = float32_at(x, width)
    for i in range(width):
        values[i] *= factor


@njit(nogil=True)
def _convolved(a, rows, count, place, first, width):
    """Channels of ``count`` tokens, into prepared rows from ``place`` on; returns the address of the first row's."""
    out, row_bytes = a.prepared + (place * a.channels + first) * 4, a.channels * 4
    convolve(rows, count, first, width, a.taps, True, a.conv, a.bias, out, row_bytes)
    return out


@njit(nogil=True)
def _factors(a, row):
    size = a.key_heads + 2 * a.value_heads
    return float32_at(a.factors + row * size * 4, size)


@njit(nogil=True)
def _key_head(a, head, rows, count, place, is_delta):
    """Prepares a head's keys and queries."""
    width = a.key_dim
    k = _convolved(a, rows, count, place, a.k_first + head * width, width)
    q = _convolved(a, rows, count, place, a.q_first + head * width, width)
    for i in range(count):
        moved = i * a.channels * 4
        if is_delta:
            _normalise(k + moved, width, 1.0)
            _normalise(q + moved, width, 1.0 / math.sqrt(width))
        _factors(a, place + i)[head] = inner_product(k + moved, q + moved, width)


@njit(nogil=True)
def _gates(a, first, heads, count, place, gates, stride, is_delta):
    """Decays and steps of some value heads; token i's gates stand ``i * stride`` numbers after ``gates``."""
    least, most = np.float32(a.least), np.float32(a.most)
    for i in range(count):
        given = gates + (i * stride + first) * 4
        decays = a.factors + ((place + i) * (a.key_heads + 2 * a.value_heads) + a.key_heads + first) * 4
        steps, bias, powers = decays + a.value_heads * 4, a.dt_bias + first * 4, a.a + first * 4
        if is_delta:
            gate_factors(1, given, given + a.value_heads * 4, bias, powers, decays, steps, heads, least, most)
        else:
            gate_factors(0, given, given, bias, powers, decays, steps, heads, least, most)


@njit(nogil=True)
def _copy(rows, count, first, width, target, channels):
    for i in range(count):
        given, kept = float32_at(rows[i] + first * 4, width), float32_at(target + (i * channels + first) * 4, width)
        for c in range(width):
            kept[c] = given[c]


@njit(nogil=True)
def _keep(a, part, rows, target, pending, gates, page):
    """Writes a part's inputs that the next chunk needs, to rows from ``target`` on, and gates of pending tokens."""
    count = a.taps - 1 + pending
    if part < a.key_heads:
        _copy(rows, count, a.k_first + part * a.key_dim, a.key_dim, target, a.channels)
        _copy(rows, count, a.q_first + part * a.key_dim, a.key_dim, target, a.channels)
        return
    head = part - a.key_heads
    _copy(rows, count, a.v_first + head * a.value_dim, a.value_dim, target, a.channels)
    for i in range(pending):
        given = float32_at(gates + i * a.stride * 4, a.num_gates)
        kept = float32_at(a.gates + (page * a.pending + i) * a.num_gates * 4, a.num_gates)
        for place in range(head, a.num_gates, a.value_heads):
            kept[place] = given[place]


@functools.cache
def prepare_kernel(is_delta: bool) -> Kernel:
    """A work item is ``parts_a_work_item`` heads of TOKENS tokens: key heads with their queries, then value heads. The
    one of a sequence's first tokens also prepares what is pending in its page, that of its last ones keeps inputs."""

    def prepare(arguments, work_item):
        a = carray(arguments, 1)[0]
        parts = a.key_heads + a.value_heads
        shares = (parts + a.parts_a_work_item - 1) // a.parts_a_work_item
        share, block = work_item % shares, work_item // shares
        first_part, end_part = share * a.parts_a_work_item, min(parts, (share + 1) * a.parts_a_work_item)
        rows = np.empty(a.taps - 1 + max(TOKENS, a.pending), np.int64)
        zero = np.zeros(0, np.float32)
        block_first, block_end = block * TOKENS, min(a.num_tokens, (block + 1) * TOKENS)
        for seq in range(a.num_seqs):
            start, n, p, page, length, status = chunk_of(a, seq)
            if status != 0:
                a.status = status
                return
            begin, end = max(start, block_first), min(start + n, block_end)
            if begin >= end:
                continue
            chunk = (start, p, page, length)
            if p == 0 and zero.shape[0] == 0:
                zero = np.zeros(a.channels, np.float32)
            zeros = address(zero)
            for run in range(2):  # pending tokens of the page, then the chunk's own
                count, token, place = end - begin, p + begin - start, begin
                gates, stride = a.x + (begin * a.stride + a.gates_first) * 4, a.stride
                if run == 0:
                    count, token, place = p - length, length, a.num_tokens + seq * a.pending
                    gates, stride = a.gates + page * a.pending * a.num_gates * 4, a.num_gates
                    if p == 0 or begin > start:
                        continue
                _addresses(a, chunk, token - a.taps + 1, a.taps - 1 + count, zeros, rows)
                for part in range(first_part, end_part):
                    if part < a.key_heads:
                        _key_head(a, part, rows, count, place, is_delta)
                    else:
                        channel = a.v_first + (part - a.key_heads) * a.value_dim
                        _convolved(a, rows, count, place, channel, a.value_dim)
                first_head = max(first_part - a.key_heads, 0)
                _gates(a, first_head, end_part - a.key_heads - first_head, count, place, gates, stride, is_delta)
            if end == start + n:
                now, target = covered(n, p, a.pending), written_page(a, seq)
                _addresses(a, chunk, now - a.taps + 1, a.taps - 1 + p + n - now, zeros, rows)
                gates = a.x + ((start + now - p) * a.stride + a.gates_first) * 4
                for part in range(first_part, end_part):
                    _keep(a, part, rows, history_row(a, target, now, now - a.taps + 1), p + n - now, gates, target)
                if share == 0:
                    int32_at(a.lengths, a.num_pages)[target] = now
        rows[0] = zero.shape[0]  # they live until here: numba frees an array after its last use by name

    return Kernel(prepare, FIELDS)
