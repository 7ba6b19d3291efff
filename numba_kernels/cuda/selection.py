"""Top-k and top-p without sorting: finds the last kept token in a row's order.

The order is that of one 64-bit number a token, its rank: the logit's bits, made to rise with it, above the token's id,
made to fall. So no two tokens are equal, and "the highest logits, the lowest ids among equals" is "the highest ranks".

A search goes down the rank by three digits of the logit and two of the id: the masses (or numbers) of the tokens that
agree so far are added up by their next 10 or 11 bits, and the digit in which the required mass is reached, from the
highest down, is kept. It ends early where all of the digit's tokens are kept, or it has one. Masses are integers,
multiples of 2^-44: a sum depends neither on the order in which threads add, nor on how many blocks share the row.

Shared memory adds 32-bit numbers natively, and 64-bit ones by a compare-and-swap loop. So a bin is two words: a thread
that overflows the low one adds one to the high one. A thread adds up tokens that follow each other in the same digit,
so that those of a row of equal logits do not meet in one bin.

Tokens known to be too low are not read again: once a search has a bound, a block lists its tokens above it, and
goes on with the list where they are few.

Each block has bins for its part of the row. For a digit each block reads the masses of 32 groups of 64 bins from all
blocks, and then one group's bins: 8 KiB instead of 128.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.convert import bits_from_f32, f32_from_bits
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.rounded import add, count_leading_zeros, exp, multiply, nearest_u64, subtract
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.intrinsics.warp import ballot, shuffle_index_b32, shuffle_up_b32, shuffle_xor_b32
from numba_kernels.cuda.row_blocks import MAX_BLOCKS, THREADS, row_blocks

float32, int32, uint32, uint64 = types.float32, types.int32, types.uint32, types.uint64

MAX_VOCAB = (1 << 20) - 1  # masses of all tokens together stay below 2^64, and an id is 20 bits long
NO_TOKEN = 0xFFFFFFFF
INFINITY = float("inf")
NAN = float("nan")
ID_BITS = 20
LOWEST = 0x007FFFFF << ID_BITS  # below the ranks of all tokens
LOWEST_FINITE = 0x00800000 << ID_BITS  # above those of -inf, below all others

_ALL_BITS = 0xFFFFFFFF
_ID_MASK = (1 << ID_BITS) - 1
_SHIFTS = 21, 10, 0  # of a logit's digits; an id has the last two
_NUM_BINS = 1 << 11
_HIGH = 4 * _NUM_BINS  # from the words of the low halves to those of the high ones
_NUM_GROUPS = 32
_GROUP_BINS = _NUM_BINS // _NUM_GROUPS
BINS_BYTES = 2 * _HIGH
assert _NUM_BINS == 4 * THREADS  # a thread has four bins
assert _GROUP_BINS == 64  # a half warp has a group, a lane two bins of one

MAX_CANDIDATES = 2048
TOO_MANY = 0xFFFFFFFF
"""Any number of candidates above `MAX_CANDIDATES`: there is no list."""

# Shared memory of a search: bins twice, a block's choice, candidates and twice their number, groups twice.
_CHOSEN_AT = 2 * BINS_BYTES
_COUNTS_AT = _CHOSEN_AT + 32
_CANDIDATES_AT = _COUNTS_AT + 16
_GROUPS_AT = _CANDIDATES_AT + 8 * MAX_CANDIDATES
SEARCH_BYTES = _GROUPS_AT + 2 * 8 * _NUM_GROUPS

_add_and_get = instruction("atom.shared.add.u32 $0, [$1], $2;", "r", "r r")
_add = instruction("red.shared.add.u32 [$0], $1;", "", "r r")
_multiply_high = instruction("mul.hi.u64 $0, $1, $2;", "l", "l l", is_pure=True)
_load_4 = instruction("ld.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "l")
_load_1 = instruction("ld.f32 $0, [$1];", "f", "l")


@device_function
def load_quad(row, quad, num_tokens):
    """Four logits of a row in device or shared memory (a generic address), -inf from `num_tokens` on."""
    token = uint32(quad * uint32(4))
    place = row + uint64(quad) * uint64(16)
    if uint32(token + uint32(3)) < num_tokens and uint32(row) & uint32(15) == uint32(0):
        a, b, c, d = _load_4(place)
    else:
        a, b, c, d = float32(-INFINITY), float32(-INFINITY), float32(-INFINITY), float32(-INFINITY)
        if token < num_tokens:
            a = _load_1(place)
        if uint32(token + uint32(1)) < num_tokens:
            b = _load_1(place + uint64(4))
        if uint32(token + uint32(2)) < num_tokens:
            c = _load_1(place + uint64(8))
        if uint32(token + uint32(3)) < num_tokens:
            d = _load_1(place + uint64(12))
    return a, b, c, d


@device_function
def rising(value):
    """A uint32 that rises with a float32 (0.0 equals -0.0)."""
    bits = bits_from_f32(add(value, float32(0.0)))
    return uint32(bits ^ (uint32(0xFFFFFFFF) if bits >> uint32(31) != uint32(0) else uint32(0x80000000)))


@device_function
def of_rising(number):
    """The float32 of which `rising` made the number."""
    return f32_from_bits(number ^ (uint32(0x80000000) if number >> uint32(31) != uint32(0) else uint32(0xFFFFFFFF)))


@device_function
def rank_of(logit, token):
    """A number that is higher for a higher logit, and for a lower id among equal ones."""
    return (uint64(rising(logit)) << uint64(ID_BITS)) | uint64(uint32(uint32(_ID_MASK) - token))


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
def join(low, high):
    """The uint64 of two words."""
    return (uint64(high) << uint64(32)) | uint64(low)


@device_function
def split(number):
    """The two words of a uint64, the low one first."""
    return uint32(number), uint32(number >> uint64(32))


@device_function
def xor_u64(value, distance):
    """`shuffle_xor_b32` of a uint64."""
    low, high = split(value)
    return join(shuffle_xor_b32(low, distance), shuffle_xor_b32(high, distance))


@device_function
def _of_lane(value, lane):
    low, high = split(value)
    return join(shuffle_index_b32(low, lane), shuffle_index_b32(high, lane))


@device_function
def _sum_to_lane(value):
    """Inclusive prefix sum of a uint64 over the lanes."""
    lane = uint32(cuda.threadIdx.x) & uint32(31)
    distance = uint32(1)
    while distance < uint32(32):
        low, high = split(value)
        low, high = shuffle_up_b32(low, distance), shuffle_up_b32(high, distance)
        if lane >= distance:
            value += join(low, high)
        distance = uint32(distance << uint32(1))
    return value


@device_function
def _first_lane(is_true):
    """The first lane for which it is true; 31 where there is none."""
    lanes = ballot(uint32(is_true))
    return count_leading_zeros(lanes & uint32(-int32(lanes))) ^ uint32(31) if lanes != uint32(0) else uint32(31)


@device_function
def _clear_bins(bins):
    place = uint32(bins + uint32(cuda.threadIdx.x) * uint32(16))
    zeros = uint32(0), uint32(0), uint32(0), uint32(0)
    memory.shared_store_4xb32(place, zeros)
    memory.shared_store_4xb32(uint32(place + uint32(_HIGH)), zeros)


@device_function
def clear_search(shared):
    """Prepares the memory of a search; a barrier follows."""
    _clear_bins(shared)
    if uint32(cuda.threadIdx.x) == uint32(0):
        memory.shared_store_2xb32(uint32(shared + uint32(_COUNTS_AT)), (uint32(0), uint32(0)))


@device_function
def add_mass(bins, digit, mass):
    """Adds to a digit's bin."""
    low, high = split(mass)
    place = uint32(bins + digit * uint32(4))
    if _add_and_get(place, low) > uint32(uint32(_ALL_BITS) - low):
        high = uint32(high + uint32(1))
    if high != uint32(0):
        _add(uint32(place + uint32(_HIGH)), high)


@device_function
def _add_token(logit, token, largest, is_mass, within, bins, digit, mass):
    """Adds a token to the digit and mass that are still to be added to the bins, and returns these. ``within``: see
    `_sum_quads`."""
    low, span, rest, is_by_id, low_id, rest_id, shift = within
    key = rising(logit)
    is_within = uint32(key - low) <= span
    if is_by_id:
        key, rest = uint32(uint32(_ID_MASK) - token), rest_id
        is_within = is_within and uint32(key - low_id) <= rest_id
    if is_within:
        own = uint32(uint32(key & rest) >> shift)
        if own != digit:
            if mass != uint64(0):
                add_mass(bins, digit, mass)
            digit, mass = own, uint64(0)
        mass += mass_of(exp(subtract(logit, largest))) if is_mass else uint64(1)
    return digit, mass


@device_function
def _sum_quads(part, largest, is_mass, within, bins):
    """Adds to the block's bins, by digit, the masses of its tokens whose rising logits are from `low` to `low + span`.

    The digit is made of the bits of `rest` from bit `shift` on. By id it is the id's, subtracted from the highest one,
    of those tokens alone for which that is from `low_id` to `low_id + rest_id`.
    """
    row, first_quad, num_quads, num_tokens = part
    digit, mass = uint32(0), uint64(0)
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        logits = load_quad(row, quad, num_tokens)
        for e in range(4):
            offset = uint32(uint32(quad * uint32(4)) + uint32(e))
            if offset < num_tokens:
                token = uint32(uint32(first_quad * uint32(4)) + offset)
                digit, mass = _add_token(logits[e], token, largest, is_mass, within, bins, digit, mass)
        quad = uint32(quad + uint32(THREADS))
    if mass != uint64(0):
        add_mass(bins, digit, mass)


@device_function
def _sum_candidates(shared, count, largest, is_mass, within, bins):
    """The same of the tokens of the list."""
    digit, mass = uint32(0), uint64(0)
    i = uint32(cuda.threadIdx.x)
    while i < count:
        logit, token = candidate_at(shared, i)
        digit, mass = _add_token(logit, token, largest, is_mass, within, bins, digit, mass)
        i = uint32(i + uint32(THREADS))
    if mass != uint64(0):
        add_mass(bins, digit, mass)


@device_function
def candidate_at(shared, index):
    """The logit and the token of a candidate."""
    bits, token = memory.shared_load_2xb32(uint32(uint32(shared + uint32(_CANDIDATES_AT)) + index * uint32(8)))
    return f32_from_bits(bits), token


@device_function
def gather_candidates(part, lowest, shared, turn):
    """Lists the block's tokens whose logits are at least that of the rank `lowest` (above -inf), in any order. How many
    there are, in every thread; the list holds them all where they are at most `MAX_CANDIDATES`.

    ``part``: generic address, the row's number of its first quad, how many quads, how many tokens. ``turn`` is 0 and 1
    by turns, with barriers between.
    """
    row, first_quad, num_quads, num_tokens = part
    counts = uint32(shared + uint32(_COUNTS_AT))
    bound = of_rising(uint32(lowest >> uint64(ID_BITS)))
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        logits = load_quad(row, quad, num_tokens)
        count = uint32(0)
        for e in range(4):
            count = uint32(count + uint32(logits[e] >= bound))
        if count > uint32(0):
            index = _add_and_get(uint32(counts + turn * uint32(4)), count)
            for e in range(4):
                if logits[e] >= bound:
                    if index < uint32(MAX_CANDIDATES):
                        token = uint32(uint32(uint32(first_quad + quad) * uint32(4)) + uint32(e))
                        memory.shared_store_2xb32(
                            uint32(uint32(shared + uint32(_CANDIDATES_AT)) + index * uint32(8)),
                            (bits_from_f32(logits[e]), token),
                        )
                    index = uint32(index + uint32(1))
        quad = uint32(quad + uint32(THREADS))
    sync_block()
    if uint32(cuda.threadIdx.x) == uint32(0):
        memory.shared_store_b32(uint32(counts + (turn ^ uint32(1)) * uint32(4)), uint32(0))
    return memory.shared_load_b32(uint32(counts + turn * uint32(4)))


@functools.cache
def digit_chooser(is_cluster: bool) -> Any:
    """A device function ``(wanted, share, shared, turn) -> (is short, digit, left, mass)``: the digit in which the mass
    `wanted`, counted from the highest digit down, is reached, the mass required of it, and its own mass.

    ``share``, if below 1, is the share of all masses that replaces `wanted`. ``turn`` selects the bins; the others are
    cleared. If `wanted` exceeds the total it is short, and the rest is undefined.
    """
    _, size, meet, _, _, read_2 = row_blocks(is_cluster)
    num_blocks = MAX_BLOCKS if is_cluster else 1

    @device_function
    def choose(wanted, share, shared, turn):
        thread = uint32(cuda.threadIdx.x)
        lane = thread & uint32(31)
        bins = uint32(shared + turn * uint32(BINS_BYTES))
        groups = uint32(uint32(shared + uint32(_GROUPS_AT)) + turn * uint32(8 * _NUM_GROUPS))
        chosen_at = uint32(shared + uint32(_CHOSEN_AT))
        sync_block()
        low = memory.shared_load_4xb32(uint32(bins + thread * uint32(16)))
        high = memory.shared_load_4xb32(uint32(uint32(bins + uint32(_HIGH)) + thread * uint32(16)))
        mass = join(low[0], high[0]) + join(low[1], high[1]) + join(low[2], high[2]) + join(low[3], high[3])
        distance = uint32(8)
        while distance > uint32(0):
            mass += xor_u64(mass, distance)
            distance >>= uint32(1)
        if lane & uint32(15) == uint32(0):
            memory.shared_store_2xb32(uint32(groups + uint32(thread >> uint32(4)) * uint32(8)), split(mass))
        meet()
        _clear_bins(uint32(shared + (turn ^ uint32(1)) * uint32(BINS_BYTES)))
        if thread < uint32(32):
            last = uint32(size() - uint32(1))
            # A group a lane, the highest first.
            place = uint32(groups + uint32(uint32(31) - lane) * uint32(8))
            mass = uint64(0)
            for other in range(num_blocks):
                words = read_2(place, minimum_u32(uint32(other), last))
                mass += join(words[0], words[1]) if uint32(other) <= last else uint64(0)
            up_to = _sum_to_lane(mass)
            total = _of_lane(up_to, uint32(31))
            if share < float32(1.0):
                wanted = share_of(total, share)
            chosen = _first_lane(wanted <= up_to)
            left = wanted - _of_lane(up_to - mass, chosen)
            group = uint32(uint32(31) - chosen)
            # Two of its bins a lane, the highest first.
            at = uint32(uint32(group * uint32(_GROUP_BINS)) + uint32(uint32(31) - lane) * uint32(2))
            place = uint32(bins + at * uint32(4))
            lower, upper = uint64(0), uint64(0)
            for other in range(num_blocks):
                block = minimum_u32(uint32(other), last)
                low, high = read_2(place, block), read_2(uint32(place + uint32(_HIGH)), block)
                lower += join(low[0], high[0]) if uint32(other) <= last else uint64(0)
                upper += join(low[1], high[1]) if uint32(other) <= last else uint64(0)
            up_to = _sum_to_lane(lower + upper)
            chosen = _first_lane(left <= up_to)
            if lane == chosen:
                left -= up_to - lower - upper
                digit, mass = uint32(at + uint32(1)), upper
                if left > upper:
                    digit, mass = at, lower
                    left -= upper
                memory.shared_store_4xb32(chosen_at, (uint32(wanted > total), digit, *split(left)))
                memory.shared_store_2xb32(uint32(chosen_at + uint32(16)), split(mass))
        sync_block()
        is_short, digit, left_low, left_high = memory.shared_load_4xb32(chosen_at)
        mass_low, mass_high = memory.shared_load_2xb32(uint32(chosen_at + uint32(16)))
        return is_short != uint32(0), digit, join(left_low, left_high), join(mass_low, mass_high)

    return choose


@functools.cache
def searcher(is_cluster: bool) -> Any:
    """A device function ``(part, largest, lowest, wanted, share, (is_mass, keeps_ties, are_few), (num_candidates,
    turn), shared) -> (lowest, num_candidates, turn)``: the rank from which on the tokens of a rank from `lowest` on
    have the mass `wanted`, or are as many. All threads of all blocks of the row call it.

    part            as in `gather_candidates`
    largest         logit of the row, which has weight 1
    lowest          a rank whose id is 0
    share           if below 1: the share of all that replaces `wanted`
    is_mass         or tokens count alike
    keeps_ties      tokens as good as the last one stay
    are_few         perhaps only few tokens are above -inf
    num_candidates  of the list, or `TOO_MANY`
    shared          address of `SEARCH_BYTES`, after `clear_search`
    turn            0 at first
    """
    choose = digit_chooser(is_cluster)
    first_shift, middle_shift, _ = _SHIFTS

    @device_function
    def search(part, largest, lowest, wanted, share, kind, progress, shared):
        (is_mass, keeps_ties, are_few), (num_candidates, turn) = kind, progress
        lowest_key = uint32(lowest >> uint64(ID_BITS))
        key, rest = uint32(0), uint32(_ALL_BITS)  # the bits that are known, and which are not
        id_key, id_rest = uint32(0), uint32(_ID_MASK)
        shift, is_by_id, is_going_on = uint32(first_shift), False, True
        while is_going_on:
            low = key if key > lowest_key else lowest_key
            if num_candidates > uint32(MAX_CANDIDATES) and (are_few or low > uint32(LOWEST_FINITE >> ID_BITS)):
                num_candidates = gather_candidates(part, uint64(low) << uint64(ID_BITS), shared, turn)
            within = low, uint32((key | rest) - low), rest, is_by_id, id_key, id_rest, shift
            bins = uint32(shared + turn * uint32(BINS_BYTES))
            if num_candidates > uint32(MAX_CANDIDATES):
                _sum_quads(part, largest, is_mass, within, bins)
            else:
                _sum_candidates(shared, num_candidates, largest, is_mass, within, bins)
            is_short, digit, wanted, mass = choose(wanted, share, shared, turn)
            turn ^= uint32(1)
            share = float32(1.0)
            is_going_on = not is_short and wanted != mass
            unknown = uint32(uint32(uint32(1) << shift) - uint32(1))
            if is_short:
                key = uint32(0)
            elif is_by_id:
                id_key, id_rest = uint32(id_key | (digit << shift)), unknown
            else:
                key, rest = uint32(key | (digit << shift)), unknown
            if shift == uint32(0) and is_going_on:  # all its tokens have one logit
                is_one = is_mass and mass == mass_of(exp(subtract(of_rising(key), largest)))
                is_going_on = not (is_by_id or keeps_ties or is_one)
                is_by_id = True
                shift = uint32(middle_shift)
            else:
                shift = uint32(middle_shift) if shift == uint32(first_shift) else uint32(0)
        if key >= lowest_key:
            lowest = (uint64(key) << uint64(ID_BITS)) | uint64(id_key)
        return lowest, num_candidates, turn

    return search
