"""Prepares what a recurrence reads, once for each token and head: convolution and SiLU; keys and queries, normalised
where the rule is the delta rule; decays and step sizes; and the inputs of the next chunk, in the page that is written.

    delta rule  q, k = x rsqrt(sum x^2 + 1e-6), q / sqrt(dk);  step = sigmoid(b)
                decay = e^(a softplus(alpha + dt_bias))
    mamba       q, k = C, B as they are;  step = clamp(softplus(dt + dt_bias));  decay = e^(step a)

Prepared rows ``[T + num_seqs * pending, channels]`` float32 hold a token's convolved channels: first those of the
batch's tokens, then of each sequence the pending tokens of the page that it reads. ``factors`` has for each row the
products k . q of the key heads, the decays of the value heads, and their step sizes. Sums over a head have eight parts,
of every eighth number, which are added in pairs: their order follows from the head's size alone.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.intrinsics.scalars import exp_f32
from numba_kernels.cpu.recurrent.convolution import (
    CHUNK_FIELDS,
    TOKENS,
    chunk_of,
    convolve,
    covered,
    filters,
    history_row,
    written_page,
)
from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at, int32_at

FIELDS = Fields(
    CHUNK_FIELDS + "*x *conv *bias *a *dt_bias *gates *prepared *factors stride x_first gates_first num_gates "
    "key_heads value_heads key_dim value_dim q_first k_first v_first",
    "least most",
)
_SOFTPLUS_LINEAR = 20.0


@njit(nogil=True)
def inner_product(x, y):
    """The sum of ``x[i] * y[i]``, in the order of this module."""
    size = x.shape[0]
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0.0)
    whole = size // 8 * 8
    for i in range(0, whole, 8):
        s0 += x[i] * y[i]
        s1 += x[i + 1] * y[i + 1]
        s2 += x[i + 2] * y[i + 2]
        s3 += x[i + 3] * y[i + 3]
        s4 += x[i + 4] * y[i + 4]
        s5 += x[i + 5] * y[i + 5]
        s6 += x[i + 6] * y[i + 6]
        s7 += x[i + 7] * y[i + 7]
    for i in range(whole, size):
        s0 += x[i] * y[i]
    return ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))


@njit(nogil=True)
def _softplus(x):
    return x if x > _SOFTPLUS_LINEAR else math.log1p(math.exp(x))


@njit(nogil=True)
def _rows(a, start, p, page, length, token, count, first, target):
    """``target [count, width]`` = the convolution's inputs of tokens from ``token`` on, of channels from ``first``."""
    width = target.shape[1]
    for i in range(count):
        at = token + i
        if at < p and p == 0:
            for c in range(width):
                target[i, c] = 0.0
            continue
        if at >= p:
            row = a.x + ((start + at - p) * a.stride + a.x_first) * 4
        else:
            row = history_row(a, page, length, at)
        given = float32_at(row + first * 4, width)
        for c in range(width):
            target[i, c] = given[c]


@njit(nogil=True)
def _silu(x):
    for i in range(x.shape[0]):
        x[i] = x[i] / (np.float32(1.0) + exp_f32(-x[i]))


@njit(nogil=True)
def _normalise(x, scale):
    factor = np.float32(scale / math.sqrt(inner_product(x, x) + np.float32(1e-6)))
    for i in range(x.shape[0]):
        x[i] *= factor


@njit(nogil=True)
def _convolved(a, chunk, token, count, place, first, inputs, weights):
    """Convolves channels of ``count`` tokens from ``token`` on into prepared rows from ``place`` on."""
    start, p, page, length = chunk
    taps, width = weights.shape
    _rows(a, start, p, page, length, token - taps + 1, taps - 1 + count, first, inputs)
    for i in range(count):
        out = float32_at(a.prepared + ((place + i) * a.channels + first) * 4, width)
        convolve(inputs[i : i + taps], weights, a.bias, first, out)
        _silu(out)


@njit(nogil=True)
def _keep_inputs(a, chunk, n, seq, first, inputs):
    """Writes channels of the inputs that the next chunk needs."""
    start, p, page, length = chunk
    width = inputs.shape[1]
    now = covered(n, p, a.pending)
    rows = a.taps - 1 + p + n - now
    _rows(a, start, p, page, length, now - a.taps + 1, rows, first, inputs)
    target = written_page(a, seq)
    for i in range(rows):
        kept = float32_at(history_row(a, target, now, now - a.taps + 1 + i) + first * 4, width)
        for c in range(width):
            kept[c] = inputs[i, c]


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
        size = (a.taps - 1 + max(TOKENS, pending), width)
        inputs, weights, q_weights = (
            np.empty(size, np.float32),
            np.empty((a.taps, width), np.float32),
            np.empty((a.taps, width), np.float32),
        )
        filters(a.conv, first, width, a.taps, weights)
        if is_key:
            filters(a.conv, q_first, width, a.taps, q_weights)
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
            replayed = p - length if p > 0 and begin == start else 0
            for run in range(2):  # pending tokens of the page, then the chunk's own
                count = replayed if run == 0 else end - begin
                token = length if run == 0 else p + begin - start
                place = a.num_tokens + seq * pending if run == 0 else begin
                if count == 0:
                    continue
                _convolved(a, chunk, token, count, place, first, inputs, weights)
                if is_key:
                    _convolved(a, chunk, token, count, place, q_first, inputs, q_weights)
                for i in range(count):
                    factors = float32_at(a.factors + (place + i) * of_row * 4, of_row)
                    row = a.prepared + (place + i) * a.channels * 4
                    if is_key:
                        k, q = float32_at(row + first * 4, width), float32_at(row + q_first * 4, width)
                        if is_delta:
                            _normalise(k, 1.0)
                            _normalise(q, 1.0 / math.sqrt(width))
                        factors[head] = inner_product(k, q)
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
            _keep_inputs(a, chunk, n, seq, first, inputs)
            if is_key:
                _keep_inputs(a, chunk, n, seq, q_first, inputs)
            now, target = covered(n, p, pending), written_page(a, seq)
            if part == 0:
                int32_at(a.lengths, a.num_pages)[target] = now
            if not is_key:
                for i in range(p + n - now):
                    kept = float32_at(a.gates + (target * pending + i) * a.num_gates * 4, a.num_gates)
                    given = float32_at(a.x + ((start + now - p + i) * a.stride + a.gates_first) * 4, a.num_gates)
                    kept[head] = given[head]
                    if is_delta:
                        kept[value_heads + head] = given[value_heads + head]

    return Kernel(prepare, FIELDS)
