"""Causal convolutions over the last few tokens, whose inputs lie in a batch's rows and in state pages; the gated short
convolution of LFM2, ``C * conv(B * x)``.

A chunk's page (`runtime.kv.forms.Recurrent`) of length L has the inputs of token a in row ``a - L + taps - 1``, from
token ``L - taps + 1`` on; those of the chunk's own tokens come from the batch. A sum begins with the bias and takes the
oldest input first.

Status 1: a chunk reads or writes a page outside the cache, or the same one. Status 2: a page's length does not fit the
chunk's first token.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.recurrent.tiles import convolve
from numba_kernels.cpu.running.launch import Fields, Kernel, address, float32_at, int32_at

BAD_PAGE, BAD_LENGTH = 1, 2
TOKENS = 32  # of a work item
WIDTH = 256  # channels of a work item of the short convolution

CHUNK_FIELDS = (
    "*query_start *seq_lens *table *lengths *inputs num_seqs num_tokens channels taps pending num_pages width "
)
"""The first fields of kernels that read state pages; ``width`` is that of the block table."""


@njit(nogil=True)
def chunk_of(a, seq):
    """(start, n, p, page to read, its length, status) of a sequence; n is 0 where nothing is to be done, page and
    length are 0 at a sequence's start."""
    starts = int32_at(a.query_start, a.num_seqs + 1)
    start, n = np.int64(starts[seq]), np.int64(starts[seq + 1] - starts[seq])
    total = np.int64(int32_at(a.seq_lens, a.num_seqs)[seq])
    if n == 0 or total == 0:
        return start, 0, 0, 0, 0, 0
    table, p = int32_at(a.table + seq * a.width * 4, a.width), total - n
    page, length = np.int64(0), np.int64(0)
    if table[0] < 0 or table[0] >= a.num_pages:
        return start, 0, 0, 0, 0, BAD_PAGE
    if p > 0:
        page = np.int64(table[1])
        if page < 0 or page >= a.num_pages or page == table[0]:
            return start, 0, 0, 0, 0, BAD_PAGE
        length = np.int64(int32_at(a.lengths, a.num_pages)[page])
    if length > p or p > length + a.pending:
        return start, 0, 0, 0, 0, BAD_LENGTH
    return start, n, p, page, length, 0


@njit(nogil=True)
def chunk_end(a, seq):
    """The end of a sequence's tokens, also of padding, whose outputs are zeros."""
    return np.int64(int32_at(a.query_start, a.num_seqs + 1)[seq + 1])


@njit(nogil=True)
def written_page(a, seq):
    """The page that a chunk writes."""
    return np.int64(int32_at(a.table + seq * a.width * 4, a.width)[0])


@njit(nogil=True)
def covered(n, p, pending):
    """How many tokens the state that a chunk leaves covers."""
    return p + 1 if 1 < n <= pending + 1 else p + n


@njit(nogil=True)
def history_row(a, page, length, token):
    """The address of the inputs of a token before the chunk's first one."""
    rows = a.taps - 1 + a.pending
    return a.inputs + (page * rows + token - length + a.taps - 1) * a.channels * 4


SHORT_FIELDS = Fields(CHUNK_FIELDS + "*x *conv *bias *out parts")


@njit(nogil=True)
def _products(a, start, p, page, length, token, count, first, target):
    """``target [count, width]`` = ``B * x`` of tokens from ``token`` on, of channels from ``first`` on."""
    width = target.shape[1]
    for i in range(count):
        at = token + i
        if at >= p:
            row = a.x + (start + at - p) * 3 * a.channels * 4
            b = float32_at(row + first * 4, width)
            x = float32_at(row + (2 * a.channels + first) * 4, width)
            for c in range(width):
                target[i, c] = b[c] * x[c]
        elif p > 0:
            kept = float32_at(history_row(a, page, length, at) + first * 4, width)
            for c in range(width):
                target[i, c] = kept[c]
        else:
            for c in range(width):
                target[i, c] = 0.0


@functools.cache
def short_conv_kernel() -> Kernel:
    """``out [T, h]`` from ``x [T, 3 h]``; a work item is WIDTH channels of TOKENS tokens, ``parts`` for each such."""

    def short_conv(arguments, work_item):
        a = carray(arguments, 1)[0]
        taps, channels, pending, num_tokens = a.taps, a.channels, a.pending, a.num_tokens
        part, block = work_item % a.parts, work_item // a.parts
        first = part * WIDTH
        width = min(WIDTH, channels - first)
        inputs = np.empty((taps - 1 + max(TOKENS, pending), width), np.float32)
        rows = np.empty(inputs.shape[0], np.int64)
        for i in range(rows.shape[0]):
            rows[i] = address(inputs) + (i * width - first) * 4
        block_first, block_end = block * TOKENS, min(num_tokens, (block + 1) * TOKENS)
        for seq in range(a.num_seqs):
            start, n, p, page, length, status = chunk_of(a, seq)
            if status != 0:
                a.status = status
                return
            begin, end = max(start, block_first), min(start + n, block_end)
            if n == 0:
                for i in range(max(start, block_first), min(chunk_end(a, seq), block_end)):
                    float32_at(a.out + (i * channels + first) * 4, width)[:] = 0.0
            if begin >= end:
                continue
            token = p + begin - start
            count = end - begin
            _products(a, start, p, page, length, token - taps + 1, taps - 1 + count, first, inputs)
            out = a.out + (begin * channels + first) * 4
            convolve(rows, count, first, width, taps, False, a.conv, a.bias, out, channels * 4)
            for i in range(count):
                result = float32_at(a.out + ((begin + i) * channels + first) * 4, width)
                c = float32_at(a.x + ((begin + i) * 3 * channels + channels + first) * 4, width)
                for j in range(width):
                    result[j] *= c[j]
            if end == start + n:
                target = written_page(a, seq)
                now = covered(n, p, pending)
                count = taps - 1 + p + n - now
                _products(a, start, p, page, length, now - taps + 1, count, first, inputs)
                for i in range(count):
                    kept = float32_at(history_row(a, target, now, now - taps + 1 + i) + first * 4, width)
                    for c in range(width):
                        kept[c] = inputs[i, c]
                if part == 0:
                    int32_at(a.lengths, a.num_pages)[target] = now
        inputs[0, 0] = rows[0]  # they live until here: numba frees an array after its last use by name

    return Kernel(short_conv, SHORT_FIELDS)
