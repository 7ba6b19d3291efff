"""The samplers of a chain (`numba_kernels.sampler_chain`) over a row of logits in device memory, which one block has.

A thread changes only its own quads of tokens: quad, quad + THREADS and so on. A dropped token gets -inf. A row is
(generic address, number of quads, number of tokens); ``shared`` is the memory of a search, ``entries`` of exchanges.
"""

from __future__ import annotations

import math

from numba import cuda, types

from numba_kernels import sampler_chain as chain
from numba_kernels.cuda.intrinsics import float64 as wide
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.convert import bits_from_f32, f32_from_bits
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import absolute
from numba_kernels.cuda.intrinsics.philox import philox
from numba_kernels.cuda.intrinsics.rounded import divide, exp, multiply, subtract
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.intrinsics.warp import maximum_f32
from numba_kernels.cuda.row_blocks import THREADS, WARPS, exchange
from numba_kernels.cuda.sampling import store_4
from numba_kernels.cuda.selection import (
    BINS_BYTES,
    ID_BITS,
    INFINITY,
    NO_TOKEN,
    add_mass,
    clear_search,
    digit_chooser,
    join,
    load_quad,
    mass_of,
    of_rising,
    rank_of,
    rising,
    split,
    xor_u64,
)

float32, float64, int32, uint32, uint64 = types.float32, types.float64, types.int32, types.uint32, types.uint64

_ALL_BITS = 0xFFFFFFFF
_ID_MASK = (1 << ID_BITS) - 1
_HIGHEST = (1 << 64) - 1  # above all ranks
BY_LOGIT = -1.0  # a center
_LOG2_E = 1.0 / math.log(2.0)
assert THREADS == chain.LANES

_choose = digit_chooser(False)
_exchanged = exchange(False)


@device_function
def block_sum(value, shared):
    """The sum of all threads' uint64, in each."""
    thread = uint32(cuda.threadIdx.x)
    distance = uint32(16)
    while distance > uint32(0):
        value += xor_u64(value, distance)
        distance >>= uint32(1)
    sync_block()  # the memory may still be read
    if thread & uint32(31) == uint32(0):
        memory.shared_store_2xb32(uint32(shared + uint32(thread >> uint32(5)) * uint32(8)), split(value))
    sync_block()
    total = uint64(0)
    for warp in range(WARPS):
        low, high = memory.shared_load_2xb32(uint32(shared + uint32(warp * 8)))
        total += join(low, high)
    return total


@device_function
def _sum_of_lanes(value, shared):
    """The sum of all threads' float64 by halves, in each."""
    thread = uint32(cuda.threadIdx.x)
    place = uint32(shared + thread * uint32(8))
    sync_block()
    memory.shared_store_2xb32(place, split(wide.bits_from_f64(value)))
    size = uint32(THREADS // 2)
    while size > uint32(0):
        sync_block()
        if thread < size:
            low, high = memory.shared_load_2xb32(uint32(place + size * uint32(8)))
            value = wide.add(value, wide.f64_from_bits(join(low, high)))
            memory.shared_store_2xb32(place, split(wide.bits_from_f64(value)))
        size >>= uint32(1)
    sync_block()
    low, high = memory.shared_load_2xb32(shared)
    return wide.f64_from_bits(join(low, high))


@device_function
def masses(row, largest, shared):
    """The mass of the row's tokens, and that of each times its distance from the largest."""
    part, num_quads, num_tokens = row
    total, moment = uint64(0), uint64(0)
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        logits = load_quad(part, quad, num_tokens)
        for e in range(4):
            if logits[e] > float32(-INFINITY):
                weight = exp(subtract(logits[e], largest))
                total += mass_of(weight)
                moment += mass_of(multiply(weight, subtract(largest, logits[e])))
        quad = uint32(quad + uint32(THREADS))
    total = block_sum(total, shared)
    return total, block_sum(moment, shared)


@device_function
def count_tokens(row, shared):
    """How many tokens are above -inf."""
    part, num_quads, num_tokens = row
    total = uint64(0)
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        logits = load_quad(part, quad, num_tokens)
        for e in range(4):
            total += uint64(1) if logits[e] > float32(-INFINITY) else uint64(0)
        quad = uint32(quad + uint32(THREADS))
    return block_sum(total, shared)


@device_function
def log_of_mass(total):
    """The natural logarithm of a sum of weights."""
    return wide.natural_log(wide.multiply(wide.f64_from_u64(total), float64(1.0 / chain.MASS_UNIT)))


@device_function
def surprise(distance, log_total):
    """Bits of a token whose logit lies so far below the largest."""
    return wide.multiply(wide.add(wide.f64_from_f32(distance), log_total), float64(_LOG2_E))


@device_function
def _share(total, part, is_strict):
    """The least mass, from 1 on, that is at least `part` (float32, below 1) of `total`; strict: above it."""
    bits = bits_from_f32(part)
    exponent = uint64(bits >> uint32(23))
    mantissa = uint64(bits & uint32(0x7FFFFF)) | (uint64(0x800000) if exponent > uint64(0) else uint64(0))
    shift = uint64(150) - (exponent if exponent > uint64(0) else uint64(1))
    low = (total & uint64(_ALL_BITS)) * mantissa
    high = (total >> uint64(32)) * mantissa + (low >> uint64(32))
    low &= uint64(_ALL_BITS)
    if shift < uint64(32):
        share = (high << (uint64(32) - shift)) | (low >> shift)
        rest = low & ((uint64(1) << shift) - uint64(1))
    else:
        cut = shift - uint64(32)
        share = high >> cut if cut < uint64(64) else uint64(0)
        rest = low | (high & ((uint64(1) << cut) - uint64(1)) if cut < uint64(64) else high)
    if is_strict or rest != uint64(0):
        share += uint64(1)
    return share if share > uint64(0) else uint64(1)


@device_function
def _rank(logit, token, largest, center):
    """By logit; with a center from 0 on by how near the logit's distance from the largest is to it."""
    key = rising(logit)
    if center >= float32(0.0):
        key = rising(absolute(subtract(subtract(largest, logit), center))) ^ uint32(_ALL_BITS)
    return (uint64(key) << uint64(ID_BITS)) | uint64(uint32(uint32(_ID_MASK) - token))


@device_function
def _drop_outside(row, largest, center, lowest, highest):
    """Drop the tokens of lower or higher ranks."""
    part, num_quads, num_tokens = row
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        a, b, c, d = load_quad(part, quad, num_tokens)
        token = uint32(quad * uint32(4))
        rank = _rank(a, token, largest, center)
        a = a if lowest <= rank and rank <= highest else float32(-INFINITY)
        rank = _rank(b, uint32(token + uint32(1)), largest, center)
        b = b if lowest <= rank and rank <= highest else float32(-INFINITY)
        rank = _rank(c, uint32(token + uint32(2)), largest, center)
        c = c if lowest <= rank and rank <= highest else float32(-INFINITY)
        rank = _rank(d, uint32(token + uint32(3)), largest, center)
        d = d if lowest <= rank and rank <= highest else float32(-INFINITY)
        store_4(part + uint64(quad) * uint64(16), (a, b, c, d))
        quad = uint32(quad + uint32(THREADS))


@device_function
def _drop_far(row, largest, most, log_total):
    """Drop the tokens whose surprise is above `most` bits; with a `log_total` below 0, whose distance is above it."""
    part, num_quads, num_tokens = row
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        a, b, c, d = load_quad(part, quad, num_tokens)
        a = a if _measure(subtract(largest, a), log_total) <= most else float32(-INFINITY)
        b = b if _measure(subtract(largest, b), log_total) <= most else float32(-INFINITY)
        c = c if _measure(subtract(largest, c), log_total) <= most else float32(-INFINITY)
        d = d if _measure(subtract(largest, d), log_total) <= most else float32(-INFINITY)
        store_4(part + uint64(quad) * uint64(16), (a, b, c, d))
        quad = uint32(quad + uint32(THREADS))


@device_function
def _measure(distance, log_total):
    return wide.f64_from_f32(distance) if log_total < float64(0.0) else surprise(distance, log_total)


@device_function
def _add_to_digit(logits, quad, largest, center, is_mass, place, bins, pending):
    """Add a quad's tokens to the bins of their digits; `pending` is a digit, and a mass that is still to be added."""
    shift, width, lowest = place
    digit, mass = pending
    last = uint32(uint32(uint32(1) << width) - uint32(1))
    above = uint64(shift) + uint64(width)
    for e in range(4):
        logit = logits[e]
        rank = _rank(logit, uint32(uint32(quad * uint32(4)) + uint32(e)), largest, center)
        if logit > float32(-INFINITY) and rank >> above == lowest >> above:
            own = uint32(rank >> uint64(shift)) & last
            if own != digit:
                if mass != uint64(0):
                    add_mass(bins, digit, mass)
                digit, mass = own, uint64(0)
            mass += mass_of(exp(subtract(logit, largest))) if is_mass else uint64(1)
    return digit, mass


@device_function
def _cut(row, largest, center, wanted, is_mass, keeps_ties, shared):
    """The lowest of the highest ranks that have the mass (or number) `wanted`; 0 if all have less."""
    part, num_quads, num_tokens = row
    lowest, turn, shift, width = uint64(0), uint32(0), uint32(41), uint32(11)
    sync_block()
    clear_search(shared)
    sync_block()
    is_going_on, is_short = True, False
    while is_going_on:
        bins = uint32(shared + turn * uint32(BINS_BYTES))
        pending = uint32(0), uint64(0)
        quad = uint32(cuda.threadIdx.x)
        while quad < num_quads:
            logits = load_quad(part, quad, num_tokens)
            pending = _add_to_digit(logits, quad, largest, center, is_mass, (shift, width, lowest), bins, pending)
            quad = uint32(quad + uint32(THREADS))
        if pending[1] != uint64(0):
            add_mass(bins, pending[0], pending[1])
        is_short, digit, wanted, mass = _choose(wanted, float32(1.0), shared, turn)
        turn ^= uint32(1)
        if not is_short:
            lowest |= uint64(digit) << uint64(shift)
        is_going_on = not is_short and wanted != mass and shift > (uint32(20) if keeps_ties else uint32(0))
        width = uint32(11) if shift == uint32(41) else uint32(10)
        shift = uint32(shift - width) if is_going_on else shift
    return uint64(0) if is_short else lowest


@device_function
def largest_of(row, entries):
    """The largest logit, and the first token that has it."""
    part, num_quads, num_tokens = row
    largest, best_quad = float32(-INFINITY), uint32(NO_TOKEN)
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        a, b, c, d = load_quad(part, quad, num_tokens)
        largest_of_quad = maximum_f32(maximum_f32(a, b), maximum_f32(c, d))
        if largest_of_quad > largest:
            largest, best_quad = largest_of_quad, quad
        quad = uint32(quad + uint32(THREADS))
    token = uint32(NO_TOKEN)
    if best_quad != uint32(NO_TOKEN):
        a, b, c, _ = load_quad(part, best_quad, num_tokens)
        e = uint32(0) if a == largest else uint32(1) if b == largest else uint32(2) if c == largest else uint32(3)
        token = uint32(uint32(best_quad * uint32(4)) + e)
    sync_block()  # the entries may still be read
    best, best_token, _, _ = _exchanged(entries, rising(largest), token ^ uint32(NO_TOKEN), uint32(0), uint32(0))
    return of_rising(best), best_token ^ uint32(NO_TOKEN)


@device_function
def _sigmas(row, largest, num_sigmas, shared):
    """So many standard deviations of the row's logits."""
    part, num_quads, num_tokens = row
    num = wide.f64_from_u64(count_tokens(row, shared))
    mean, passes = float64(0.0), uint32(0)
    while passes < uint32(2):
        total = float64(0.0)
        quad = uint32(cuda.threadIdx.x)
        while quad < num_quads:
            logits = load_quad(part, quad, num_tokens)
            for e in range(4):
                if logits[e] > float32(-INFINITY):
                    distance = wide.f64_from_f32(subtract(largest, logits[e]))
                    if passes == uint32(1):
                        distance = wide.subtract(distance, mean)
                        distance = wide.multiply(distance, distance)
                    total = wide.add(total, distance)
            quad = uint32(quad + uint32(THREADS))
        mean = wide.divide(_sum_of_lanes(total, shared), num)
        passes = uint32(passes + uint32(1))
    return wide.multiply(wide.f64_from_f32(num_sigmas), wide.square_root(mean))


@device_function
def _power(share, exponent):
    """A number from 0 to 1 to the power of a float32."""
    is_positive = share > float64(0.0)
    log = -wide.natural_log(wide.divide(float64(1.0), share if is_positive else float64(1.0)))
    power = wide.f64_from_f32(exp(wide.f32_from_f64(wide.multiply(wide.f64_from_f32(exponent), log))))
    is_one = exponent == float32(0.0) or share >= float64(1.0)
    return float64(1.0) if is_one else power if is_positive else float64(0.0)


@device_function
def _dynamic_temperature(num, mean, log_total, temperature, spread, exponent):
    """By the entropy's share of its maximum, ln of the number of candidates."""
    entropy = wide.add(log_total, mean)
    share = wide.divide(entropy, wide.natural_log(wide.f64_from_u64(num)))
    share = _power(share if share < float64(1.0) else float64(1.0), exponent)
    low = wide.subtract(wide.f64_from_f32(temperature), wide.f64_from_f32(spread))
    low = low if low > float64(0.0) else float64(0.0)
    high = wide.add(wide.f64_from_f32(temperature), wide.f64_from_f32(spread))
    return wide.f32_from_f64(wide.add(low, wide.multiply(wide.subtract(high, low), share)))


@device_function
def _scale(row, temperature):
    part, num_quads, num_tokens = row
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        a, b, c, d = load_quad(part, quad, num_tokens)
        a, b, c, d = (
            divide(a, temperature), divide(b, temperature), divide(c, temperature), divide(d, temperature)
        )  # fmt: skip
        store_4(part + uint64(quad) * uint64(16), (a, b, c, d))
        quad = uint32(quad + uint32(THREADS))


@device_function
def _min_p(row, largest, min_p):
    part, num_quads, num_tokens = row
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        a, b, c, d = load_quad(part, quad, num_tokens)
        a = a if exp(subtract(a, largest)) >= min_p else float32(-INFINITY)
        b = b if exp(subtract(b, largest)) >= min_p else float32(-INFINITY)
        c = c if exp(subtract(c, largest)) >= min_p else float32(-INFINITY)
        d = d if exp(subtract(d, largest)) >= min_p else float32(-INFINITY)
        store_4(part + uint64(quad) * uint64(16), (a, b, c, d))
        quad = uint32(quad + uint32(THREADS))


@device_function
def _acts(probability, seed, choice, position):
    """Whether XTC acts at this position."""
    words = philox(
        uint32(0), choice, position, uint32(chain.XTC_STREAM), uint32(seed), uint32(seed >> uint64(32))
    )  # fmt: skip
    uniform = wide.multiply(wide.add(wide.f64_from_u64(uint64(words[0])), float64(0.5)), float64(2.0**-32))
    return uniform <= wide.f64_from_f32(probability)


@device_function
def _last_above(row, largest, least, entries):
    """The lowest rank of a mass of at least `least` (float64); the highest number without one."""
    part, num_quads, num_tokens = row
    lowest = uint64(_HIGHEST)
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        logits = load_quad(part, quad, num_tokens)
        for e in range(4):
            if logits[e] > float32(-INFINITY):
                mass = wide.f64_from_u64(mass_of(exp(subtract(logits[e], largest))))
                rank = rank_of(logits[e], uint32(uint32(quad * uint32(4)) + uint32(e)))
                if mass >= least and rank < lowest:
                    lowest = rank
        quad = uint32(quad + uint32(THREADS))
    low, high = split(lowest)
    sync_block()
    high, low, _, _ = _exchanged(entries, high ^ uint32(_ALL_BITS), low ^ uint32(_ALL_BITS), uint32(0), uint32(0))
    return join(low ^ uint32(_ALL_BITS), high ^ uint32(_ALL_BITS))


@device_function
def _number(words, place):
    return f32_from_bits(memory.load_b32(words + uint64(place * 4)))


@device_function
def _share_of_stage(stage, words, filters):
    """The share of the mass that a stage keeps, or 1."""
    share = float32(1.0)
    if stage == uint32(chain.IS_TOP_P):
        share = filters[3]
    elif stage == uint32(chain.IS_TYPICAL):
        share = _number(words, chain.TYPICAL_P)
    return share


@device_function
def shape(row, words, order, largest, token, random, filters, memory):
    """Apply a chain's samplers to a row. Returns the largest logit that is left, and its first token.

    words    address of the chain's; not read if ``order`` names none that only chains have
    random   seed, choice, position
    filters  temperature, min_p, top_k, top_p
    memory   of a search, of exchanges
    """
    (temperature, min_p, top_k, _), (shared, entries) = filters, memory
    while order != uint32(0):
        stage = order & uint32(15)
        order >>= uint32(4)
        lowest, highest, center, wanted = uint64(0), uint64(_HIGHEST), float32(BY_LOGIT), uint64(0)
        share, spread = _share_of_stage(stage, words, filters), float32(0.0)
        is_xtc, is_mirostat = stage == uint32(chain.IS_XTC), stage == uint32(chain.IS_MIROSTAT)
        if is_xtc:
            is_xtc = _number(words, chain.XTC_THRESHOLD) <= float32(0.5)
            is_xtc = is_xtc and _acts(_number(words, chain.XTC_PROBABILITY), random[0], random[1], random[2])
        if stage == uint32(chain.IS_TEMPERATURE) and words != uint64(0):
            spread = _number(words, chain.DYNATEMP_RANGE)
        total, mean, log_total = uint64(0), float64(0.0), float64(0.0)
        if share < float32(1.0) or is_xtc or is_mirostat or spread > float32(0.0):
            total, moment = masses(row, largest, shared)
            mean = wide.divide(wide.f64_from_u64(moment), wide.f64_from_u64(total))
            log_total = log_of_mass(total)

        if stage == uint32(chain.IS_TEMPERATURE):
            is_scaled = True
            own = temperature
            if spread > float32(0.0):
                num, exponent = count_tokens(row, shared), _number(words, chain.DYNATEMP_EXPONENT)
                is_scaled = num > uint64(1)
                if is_scaled:
                    own = _dynamic_temperature(num, mean, log_total, temperature, spread, exponent)
            if is_scaled and own < float32(chain.GREEDY_BELOW):
                lowest = highest = rank_of(largest, token)
            elif is_scaled:
                _scale(row, own)
                largest = divide(largest, own)
        elif stage == uint32(chain.IS_TOP_N_SIGMA):
            num_sigmas = _number(words, chain.TOP_N_SIGMA)
            if num_sigmas > float32(0.0):
                _drop_far(row, largest, _sigmas(row, largest, num_sigmas, shared), float64(-1.0))
        elif stage == uint32(chain.IS_MIN_P):
            if min_p > float32(0.0):
                _min_p(row, largest, min_p)
        elif stage == uint32(chain.IS_TOP_K):
            if int32(top_k) > int32(0) and top_k < row[2]:
                wanted = uint64(top_k)
        elif is_xtc:
            least = wide.multiply(
                wide.f64_from_f32(_number(words, chain.XTC_THRESHOLD)), wide.f64_from_u64(total)
            )  # fmt: skip
            highest = _last_above(row, largest, least, entries)
        elif is_mirostat:
            mu = wide.f64_from_f32(_number(words, chain.MU))
            if surprise(float32(0.0), log_total) > mu:
                lowest = highest = rank_of(largest, token)
            else:
                _drop_far(row, largest, mu, log_total)
        elif share < float32(1.0):
            is_typical = stage == uint32(chain.IS_TYPICAL)
            wanted = _share(total, share, is_typical)
            center = wide.f32_from_f64(mean) if is_typical else center

        if wanted > uint64(0):
            is_count = stage == uint32(chain.IS_TOP_K)
            lowest = _cut(row, largest, center, wanted, not is_count, is_count, shared)
        if lowest > uint64(0) or highest < uint64(_HIGHEST):
            _drop_outside(row, largest, center, lowest, highest)
            largest, token = largest_of(row, entries)
    return largest, token
