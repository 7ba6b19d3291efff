"""Top-k and top-p without sorting: where in a row's order the kept tokens end. A block works on one row.

The order is that of one 64-bit number a token, its rank: the logit's bits, made to rise with it, above the token's id,
made to fall. So no two tokens are equal, and "the highest logits, the lowest ids among equals" is "the highest ranks".

A search goes down the rank 11 bits at a time: the masses (or numbers) of the tokens that agree so far are added up by
their next 11 bits, and the digit in which the wanted mass is reached, from the highest down, is kept. Masses are
integers, multiples of 2^-44: a sum does not depend on the order in which threads add.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.convert import bits_from_f32
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.rounded import add, exp, multiply, nearest_u64, subtract
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.intrinsics.warp import shuffle_xor_b32, shuffle_xor_f32

float32, uint32, uint64 = types.float32, types.uint32, types.uint64

THREADS = 512
MAX_VOCAB = (1 << 20) - 1  # masses of all tokens together stay below 2^64
NO_TOKEN = 0xFFFFFFFF
INFINITY = float("inf")
NAN = float("nan")
ID_BITS = 23
DIGIT_BITS = 11
FIRST_SHIFT = 44  # of the first of five digits
LOGIT_SHIFT = 22  # of the third: it ends behind the logit's last bit
NUM_BINS = 1 << DIGIT_BITS
_BINS_A_THREAD = NUM_BINS // THREADS
WARPS = THREADS // 32

_shuffle_up = instruction("shfl.sync.up.b32 $0, $1, $2, 0, 0xffffffff;", "r", "r r")
_add_shared = instruction("red.shared.add.u64 [$0], $1;", "", "r l")
_multiply_high = instruction("mul.hi.u64 $0, $1, $2;", "l", "l l", is_pure=True)


@functools.cache
def quad_loader(is_aligned: bool) -> Any:
    """A device function ``(row address, quad, vocab) -> 4 float32``, -inf beyond the vocabulary."""
    if is_aligned:
        load = memory.load_4xf32

        def aligned(row, quad, vocab):
            return load(row + uint64(quad) * uint64(16))

        return device_function(aligned)
    load_one = memory.load_f32

    @device_function
    def load_quad(row, quad, vocab):
        token = quad * uint32(4)
        place = row + uint64(token) * uint64(4)
        a, b, c, d = float32(-INFINITY), float32(-INFINITY), float32(-INFINITY), float32(-INFINITY)
        if token < vocab:
            a = load_one(place)
        if token + uint32(1) < vocab:
            b = load_one(place + uint64(4))
        if token + uint32(2) < vocab:
            c = load_one(place + uint64(8))
        if token + uint32(3) < vocab:
            d = load_one(place + uint64(12))
        return a, b, c, d

    return load_quad


@device_function
def rank_of(logit, token):
    """A number that is higher for a higher logit, and for a lower id among equal ones (0.0 equals -0.0)."""
    bits = bits_from_f32(add(logit, float32(0.0)))
    rising = bits ^ (uint32(0xFFFFFFFF) if bits >> uint32(31) != uint32(0) else uint32(0x80000000))
    return (uint64(rising) << uint64(ID_BITS)) | uint64(uint32((1 << ID_BITS) - 1) - token)


@device_function
def mass_of(weight):
    """A weight of at most 1 as a multiple of 2^-44."""
    return nearest_u64(multiply(weight, float32(2.0**44)))


@device_function
def share_of(total, part):
    """The least mass that is at least `part` (float32, from 0 to below 1) of `total`, and at least 1."""
    bits = bits_from_f32(part)
    exponent = bits >> uint32(23)
    mantissa = uint64(bits & uint32(0x7FFFFF)) | (uint64(0x800000) if exponent > uint32(0) else uint64(0))
    shift = uint32(150) - (exponent if exponent > uint32(0) else uint32(1))  # part = mantissa / 2^shift, shift >= 24
    low, high = total * mantissa, _multiply_high(total, mantissa)
    if shift < uint32(64):
        share = (high << uint64(uint32(64) - shift)) | (low >> uint64(shift))
        if low << uint64(uint32(64) - shift) != uint64(0):
            share += uint64(1)
    else:
        share = uint64(1) + (high >> uint64(shift - uint32(64)) if shift < uint32(128) else uint64(0))
    return share if share > uint64(0) else uint64(1)


@device_function
def first_largest(value, token, values, tokens):
    """The largest value of the block's threads, and the lowest token that has it, in each of them.

    ``values``, ``tokens``: shared memory for one of each warp.
    """
    lane, warp = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) >> uint32(5)
    level = uint32(0)
    while level < uint32(2):  # within warps, then over the warps' results
        distance = uint32(16)
        while distance > uint32(0):
            other, other_token = shuffle_xor_f32(value, distance), shuffle_xor_b32(token, distance)
            if other > value or (other == value and other_token < token):
                value, token = other, other_token
            distance >>= uint32(1)
        if level == uint32(0):
            sync_block()  # the memory may still be read
            if lane == uint32(0):
                values[warp] = value
                tokens[warp] = token
            sync_block()
            value, token = values[lane % uint32(WARPS)], tokens[lane % uint32(WARPS)]
        level += uint32(1)
    return value, token


@device_function
def _scan(value, totals):
    """The sum of a uint64 over this thread and those before it, and over all."""
    lane, warp = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) >> uint32(5)
    distance = uint32(1)
    while distance < uint32(32):
        low = _shuffle_up(uint32(value), distance)
        high = _shuffle_up(uint32(value >> uint64(32)), distance)
        if lane >= distance:
            value += (uint64(high) << uint64(32)) | uint64(low)
        distance <<= uint32(1)
    if lane == uint32(31):
        totals[warp] = value
    sync_block()
    total = uint64(0)
    i = uint32(0)
    while i < uint32(WARPS):
        if i == warp:
            value += total
        total += totals[i]
        i += uint32(1)
    return value, total


@device_function
def block_sum(value, totals):
    """The sum of a uint64 over all threads, in each of them."""
    sync_block()  # the memory may still be read
    value, total = _scan(value, totals)
    return total


@functools.cache
def digit_search(is_aligned: bool) -> Any:
    """A device function that adds up one digit's masses.

    ``(row, vocab, largest, lowest, prefix, shift, is_mass, bins, totals) -> (mass in front, total)``: of the tokens of
    a rank from `lowest` on whose digits above `shift` are `prefix`. Each thread has a few digits, the first the highest
    ones; in front are those of the threads before it.
    """
    load = quad_loader(is_aligned)

    @device_function
    def sum_digits(row, vocab, largest, lowest, prefix, shift, is_mass, bins, totals):
        thread = uint32(cuda.threadIdx.x)
        for i in range(_BINS_A_THREAD):
            bins[thread + uint32(i * THREADS)] = uint64(0)
        sync_block()
        first_bin = memory.shared_address(bins)
        quad = thread
        while quad * uint32(4) < vocab:
            logits = load(row, quad, vocab)
            for e in range(4):
                token = quad * uint32(4) + uint32(e)
                rank = rank_of(logits[e], token)
                if token < vocab and rank >= lowest and rank >> uint64(shift + uint32(DIGIT_BITS)) == prefix:
                    mass = uint64(1)
                    if is_mass:
                        mass = mass_of(exp(subtract(logits[e], largest)))
                    digit = uint32(rank >> uint64(shift)) & uint32(NUM_BINS - 1)
                    if mass != uint64(0):
                        _add_shared(first_bin + digit * uint32(8), mass)
            quad += uint32(THREADS)
        sync_block()
        mass = uint64(0)
        for i in range(_BINS_A_THREAD):
            mass += bins[_digit(thread, i)]
        up_to, total = _scan(mass, totals)
        return up_to - mass, total

    return sum_digits


@device_function
def _digit(thread, index):
    """A thread's digits, from the highest down."""
    return uint32(NUM_BINS - 1) - uint32(_BINS_A_THREAD) * thread - uint32(index)


@device_function
def choose_digit(front, wanted, bins, found):
    """The digit in which the mass `wanted`, counted from the highest down, is reached, and the mass in front of it.

    ``found``: two uint64 of shared memory.
    """
    thread = uint32(cuda.threadIdx.x)
    for i in range(_BINS_A_THREAD):
        mass = bins[_digit(thread, i)]
        if front < wanted and wanted <= front + mass:
            found[0] = uint64(_digit(thread, i))
            found[1] = front
        front += mass
    sync_block()
    return found[0], found[1]
