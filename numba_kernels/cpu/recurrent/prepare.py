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
from numba_kernels.cpu.recurrent.tiles import convolve, inner_product
from numba_kernels.cpu.running.launch import Fields, Kernel, address, float32_at, int32_at

FIELDS = Fields(
    CHUNK_FIELDS + "*x *conv *bias *a *dt_bias *gates *prepared *factors stride x_first gates_first num_gates "
    "key_heads value_heads key_dim value_dim q_first k_first v_first",
    "least most",
)
_SOFTPLUS_LINEAR = 20.0


@njit(nogil=True)
def _softplus(x):
    return x if x > _SOFTPLUS_LINEAR else math.log1p(math.exp(x))


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
def _keep_inputs(rows, count, first, width, target, channels):
    """Writes channels of the inputs that the next chunk needs."""
    for i in range(count):
        given, kept = float32_at(rows[i] + first * 4, width), float32_at(target + (i * channels + first) * 4, width)
        for c in range(width):
            kept[c] = given[c]


@functools.cache
def prepare_kernel(is_delta: bool) -> Kernel:
    """A work item is a head of TOKENS tokens: a key head with its query, or a value head. Those of a sequence's first
    tokens also prepare what is pending in its page, those of its last ones keep inputs."""

    def prepare(arguments, work_item):
        a = carray(arguments, 1)[0]
        key_heads, value_heads, pending = a.key_heads, a.value_heads, a.pending
        parts = key_heads + value_heads
        part, block = work_item % parts, work_item // parts
        is_key = part < key_heads
        head = part if is_key else part - key_heads
        width = a.key_dim if is_key else a.value_dim
        first = a.k_first + head * width if is_key else a.v_first + head * width
        q_first = a.q_first + head * width
        taps, row_bytes = a.taps, a.channels * 4
        rows, zero = np.empty(taps - 1 + max(TOKENS, pending), np.int64), np.zeros(0, np.float32)
        of_row = key_heads + 2 * value_heads
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
            replayed = p - length if p > 0 and begin == start else 0
            for run in range(2):  # pending tokens of the page, then the chunk's own
                count = replayed if run == 0 else end - begin
                token = length if run == 0 else p + begin - start
                place = a.num_tokens + seq * pending if run == 0 else begin
                if count == 0:
                    continue
                _addresses(a, chunk, token - taps + 1, taps - 1 + count, zeros, rows)
                out = a.prepared + place * row_bytes
                convolve(rows, count, first, width, taps, True, a.conv, a.bias, out + first * 4, row_bytes)
                if is_key:
                    convolve(rows, count, q_first, width, taps, True, a.conv, a.bias, out + q_first * 4, row_bytes)
                for i in range(count):
                    factors = float32_at(a.factors + (place + i) * of_row * 4, of_row)
                    if is_key:
                        k, q = out + i * row_bytes + first * 4, out + i * row_bytes + q_first * 4
                        if is_delta:
                            _normalise(k, width, 1.0)
                            _normalise(q, width, 1.0 / math.sqrt(width))
                        factors[head] = inner_product(k, q, width)
                        continue
                    if run == 0:
                        given = float32_at(a.gates + (page * pending + i) * a.num_gates * 4, a.num_gates)
                    else:
                        given = float32_at(a.x + ((begin + i) * a.stride + a.gates_first) * 4, a.num_gates)
                    bias, decay = float32_at(a.dt_bias, value_heads)[head], float32_at(a.a, value_heads)[head]
                    if is_delta:
                        step = 1.0 / (1.0 + math.exp(-np.float64(given[head])))
                        power = decay * _softplus(np.float64(given[value_heads + head]) + bias)
                    else:
                        step = min(max(_softplus(np.float64(given[head]) + bias), a.least), a.most)
                        power = decay * step
                    factors[key_heads + head] = np.float32(math.exp(power))
                    factors[key_heads + value_heads + head] = np.float32(step)
            if end < start + n:
                continue
            now, target = covered(n, p, pending), written_page(a, seq)
            count = taps - 1 + p + n - now
            _addresses(a, chunk, now - taps + 1, count, zeros, rows)
            kept_at = history_row(a, target, now, now - taps + 1)
            _keep_inputs(rows, count, first, width, kept_at, a.channels)
            if is_key:
                _keep_inputs(rows, count, q_first, width, kept_at, a.channels)
            if part == 0:
                int32_at(a.lengths, a.num_pages)[target] = now
            if not is_key:
                for i in range(p + n - now):
                    kept = float32_at(a.gates + (target * pending + i) * a.num_gates * 4, a.num_gates)
                    given = float32_at(a.x + ((start + now - p + i) * a.stride + a.gates_first) * 4, a.num_gates)
                    kept[head] = given[head]
                    if is_delta:
                        kept[value_heads + head] = given[value_heads + head]
        rows[0] = zero.shape[0]  # they live until here: numba frees an array after its last use by name

    return Kernel(prepare, FIELDS)
