"""The samplers of a chain (`numba_kernels.sampler_chain`) over a row's candidates.

Candidates are the tokens above -inf, in order of their ids: a sampler that drops some leaves fewer to the next. A
token's rank is a number that is higher for a higher logit (or a lower distance from the typical one), and for a lower
id among equals; a cut finds the lowest kept rank digit by digit.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from numba_kernels import sampler_chain as chain
from numba_kernels.cpu.intrinsics.scalars import philox
from numba_kernels.cpu.rows import exponentials
from numba_kernels.cpu.running.launch import address

_MASS_UNIT = np.float64(chain.MASS_UNIT)
_LANES = chain.LANES
_ID_BITS, _ID_MASK = np.uint64(20), np.int64((1 << 20) - 1)
_SHIFTS = np.array([41, 30, 20, 10, 0], np.uint64)  # of a rank's digits: three of the logit, two of the id
_WIDTHS = np.array([11, 11, 10, 10, 10], np.uint64)
_LN2, _SQRT2 = math.log(2.0), math.sqrt(2.0)
_LOG2_E = 1.0 / _LN2
_SHIFT32, _MASK32 = np.uint64(32), np.uint64(0xFFFFFFFF)
_BY_LOGIT = np.float32(-1.0)


@njit(nogil=True)
def natural_log(x):
    """ln x of a float64 from 1 on, by operations that every device rounds alike."""
    mantissa, exponent = math.frexp(x)
    mantissa, exponent = 2.0 * mantissa, exponent - 1
    if mantissa > _SQRT2:
        mantissa, exponent = 0.5 * mantissa, exponent + 1
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square, series, odd = z * z, 1.0 / 25.0, 23.0
    while odd > 0.0:
        series = series * square + 1.0 / odd
        odd -= 2.0
    return np.float64(exponent) * _LN2 + (2.0 * z) * series


@njit(nogil=True)
def mass_of(weight):
    """A weight of at most 1 as a multiple of 2^-44."""
    return np.uint64(np.rint(np.float64(weight) * _MASS_UNIT))


@njit(nogil=True)
def _share(total, part, is_strict):
    """The least mass, from 1 on, that is at least ``part`` (float32, below 1) of ``total``; strict: above it."""
    bits = np.float32(part).view(np.uint32)
    exponent = np.uint64(bits >> np.uint32(23))
    mantissa = np.uint64(bits & np.uint32(0x7FFFFF)) | (np.uint64(0x800000) if exponent > 0 else np.uint64(0))
    shift = np.uint64(150) - (exponent if exponent > 0 else np.uint64(1))
    low = (total & _MASK32) * mantissa
    high = (total >> _SHIFT32) * mantissa + (low >> _SHIFT32)  # the product is high * 2^32 + the rest
    low &= _MASK32
    if shift < _SHIFT32:
        share = (high << (_SHIFT32 - shift)) | (low >> shift)
        rest = low & ((np.uint64(1) << shift) - np.uint64(1))
    else:
        cut = shift - _SHIFT32
        share = high >> cut if cut < np.uint64(64) else np.uint64(0)
        lost = high & ((np.uint64(1) << cut) - np.uint64(1)) if cut < np.uint64(64) else high
        rest = low | lost
    if is_strict or rest != np.uint64(0):
        share += np.uint64(1)
    return max(share, np.uint64(1))


@njit(nogil=True)
def _rising(value):
    bits = np.float32(value + np.float32(0.0)).view(np.uint32)
    return bits ^ (np.uint32(0xFFFFFFFF) if bits >> np.uint32(31) != 0 else np.uint32(0x80000000))


@njit(nogil=True)
def _ranks(values, tokens, num, largest, center):
    """The ranks by logit; with a ``center`` from 0 on by how near a logit's distance from the largest is to it."""
    ranks = np.empty(num, np.uint64)
    for i in range(num):
        if center < np.float32(0.0):
            key = _rising(values[i])
        else:
            key = _rising(abs((largest - values[i]) - center)) ^ np.uint32(0xFFFFFFFF)
        ranks[i] = (np.uint64(key) << _ID_BITS) | np.uint64(_ID_MASK - np.int64(tokens[i]))
    return ranks


@njit(nogil=True)
def _cut(values, tokens, weights, num, largest, center, wanted, is_mass, keeps_ties):
    """Keep the highest ranks that have the mass (or number) ``wanted``; all if they have less."""
    ranks = _ranks(values, tokens, num, largest, center)
    bins = np.empty(1 << 11, np.uint64)
    lowest = np.uint64(0)
    for place in range(3 if keeps_ties else 5):
        shift, width = _SHIFTS[place], _WIDTHS[place]
        last = (np.uint64(1) << width) - np.uint64(1)
        bins[:] = 0
        for i in range(num):
            if (ranks[i] >> (shift + width)) == (lowest >> (shift + width)):
                bins[np.int64((ranks[i] >> shift) & last)] += mass_of(weights[i]) if is_mass else np.uint64(1)
        digit = np.int64(last)
        while digit >= 0 and bins[digit] < wanted:
            wanted -= bins[digit]
            digit -= 1
        if digit < 0:  # the total is less, which only the first digit can find
            return num
        lowest |= np.uint64(digit) << shift
        if bins[digit] == wanted:
            break
    kept = 0
    for i in range(num):
        if ranks[i] >= lowest:
            values[kept], tokens[kept], weights[kept] = values[i], tokens[i], weights[i]
            kept += 1
    return kept


@njit(nogil=True)
def total_mass(weights, num):
    """The sum of the first weights."""
    total = np.uint64(0)
    for i in range(num):
        total += mass_of(weights[i])
    return total


@njit(nogil=True)
def _mean_distance(values, weights, num, largest):
    """The expected distance of a logit from the largest, and the total mass."""
    total, moment = np.uint64(0), np.uint64(0)
    for i in range(num):
        total += mass_of(weights[i])
        moment += mass_of(weights[i] * (largest - values[i]))
    return np.float64(moment) / np.float64(total), total


@njit(nogil=True)
def _sum_of_lanes(lanes):
    size = _LANES // 2
    while size > 0:
        for i in range(size):
            lanes[i] += lanes[i + size]
        size //= 2
    return lanes[0]


@njit(nogil=True)
def _top_n_sigma(values, tokens, weights, num, largest, num_sigmas):
    if num <= 1:
        return num
    lanes = np.zeros(_LANES)
    for i in range(num):
        lanes[(tokens[i] >> 2) & (_LANES - 1)] += np.float64(largest - values[i])
    mean = _sum_of_lanes(lanes) / np.float64(num)
    lanes[:] = 0.0
    for i in range(num):
        difference = np.float64(largest - values[i]) - mean
        lanes[(tokens[i] >> 2) & (_LANES - 1)] += difference * difference
    most = np.float64(num_sigmas) * math.sqrt(_sum_of_lanes(lanes) / np.float64(num))
    kept = 0
    for i in range(num):
        if np.float64(largest - values[i]) <= most:
            values[kept], tokens[kept], weights[kept] = values[i], tokens[i], weights[i]
            kept += 1
    return kept


@njit(nogil=True)
def _power(share, exponent):
    """A number from 0 to 1 to the power of a float32."""
    if exponent == np.float32(0.0) or share >= 1.0:
        return 1.0
    if share <= 0.0:
        return 0.0
    x, result = np.empty(1, np.float32), np.empty(1, np.float32)
    x[0] = np.float32(np.float64(exponent) * -natural_log(1.0 / share))
    exponentials(address(x), np.float32(0.0), 1, address(result))
    return np.float64(result[0])


@njit(nogil=True)
def _dynamic_temperature(values, weights, num, largest, temperature, spread, exponent):
    """By the entropy's share of its maximum, ln of the number of candidates."""
    mean, total = _mean_distance(values, weights, num, largest)
    entropy = log_of_mass(total) + mean
    share = _power(min(entropy / natural_log(np.float64(num)), 1.0), exponent)
    low = max(0.0, np.float64(temperature) - np.float64(spread))
    high = np.float64(temperature) + np.float64(spread)
    return np.float32(low + (high - low) * share)


@njit(nogil=True)
def _xtc(values, tokens, weights, num, threshold):
    """Drop the tokens from the threshold on, but keep the least probable of them."""
    least = np.float64(threshold) * np.float64(total_mass(weights, num))
    last = -1
    for i in range(num):
        if np.float64(mass_of(weights[i])) >= least and (last < 0 or values[i] <= values[last]):
            last = i
    if last < 0:
        return num
    value, token = values[last], tokens[last]
    kept = 0
    for i in range(num):
        if values[i] < value or (values[i] == value and tokens[i] >= token):
            values[kept], tokens[kept] = values[i], tokens[i]
            kept += 1
    return kept


@njit(nogil=True)
def _keep_first(values, tokens, weights, num, largest):
    """Keep the first of the largest."""
    for i in range(num):
        if values[i] == largest:
            values[0], tokens[0], weights[0] = values[i], tokens[i], weights[i]
            return 1
    return num


@njit(nogil=True)
def _scale(values, tokens, weights, num, largest, temperature, spread, exponent):
    """Returns how many stay, and the largest."""
    if spread > np.float32(0.0):
        if num <= 1:
            return num, largest
        temperature = _dynamic_temperature(values, weights, num, largest, temperature, spread, exponent)
    if temperature < np.float32(chain.GREEDY_BELOW):
        return _keep_first(values, tokens, weights, num, largest), largest
    for i in range(num):
        values[i] = values[i] / temperature
    largest = largest / temperature
    exponentials(address(values), largest, num, address(weights))
    return num, largest


@njit(nogil=True)
def log_of_mass(total):
    """The natural logarithm of a sum of weights."""
    return natural_log(np.float64(total) / _MASS_UNIT)


@njit(nogil=True)
def surprise(distance, log_total):
    """Bits of a token whose logit lies so far below the largest."""
    return (np.float64(distance) + log_total) * _LOG2_E


@njit(nogil=True)
def _mirostat(values, tokens, weights, num, largest, mu):
    """Keep the tokens that surprise by no more than ``mu`` bits, or the first."""
    total = log_of_mass(total_mass(weights, num))
    kept = 0
    if surprise(np.float32(0.0), total) > np.float64(mu):
        return _keep_first(values, tokens, weights, num, largest)
    for i in range(num):
        if surprise(largest - values[i], total) <= np.float64(mu):
            values[kept], tokens[kept], weights[kept] = values[i], tokens[i], weights[i]
            kept += 1
    return kept


@njit(nogil=True)
def _largest(values, num):
    largest = values[0]
    for i in range(1, num):
        largest = max(largest, values[i])
    return largest


@njit(nogil=True)
def _acts(probability, seed, choice, position):
    """Whether XTC acts at this position."""
    key_low, key_high = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
    word, _, _, _ = philox(np.uint32(0), choice, position, np.uint32(chain.XTC_STREAM), key_low, key_high)
    return (np.float64(word) + 0.5) * 2.0**-32 <= np.float64(probability)


@njit(nogil=True)
def shape(values, tokens, weights, words, numbers, random, temperature, min_p, top_k, top_p):
    """Apply a chain's samplers to candidates ``[n]``: logits, ids and e^(logit - largest). The kept ones come first, in
    the same order; returns how many.

    words, numbers  of the chain, as int32 and as float32
    random          seed, choice, position
    """
    num = values.shape[0]
    largest = _largest(values, num)
    order = np.uint32(words[chain.ORDER])
    while order != np.uint32(0):
        stage = np.int64(order & np.uint32(15))
        order = order >> np.uint32(4)
        if stage == chain.IS_TEMPERATURE:
            spread, exponent = numbers[chain.DYNATEMP_RANGE], numbers[chain.DYNATEMP_EXPONENT]
            num, largest = _scale(values, tokens, weights, num, largest, temperature, spread, exponent)
        elif stage == chain.IS_TOP_N_SIGMA and numbers[chain.TOP_N_SIGMA] > np.float32(0.0):
            num = _top_n_sigma(values, tokens, weights, num, largest, numbers[chain.TOP_N_SIGMA])
        elif stage == chain.IS_MIN_P and min_p > np.float32(0.0):
            kept = 0
            for i in range(num):
                if weights[i] >= min_p:
                    values[kept], tokens[kept], weights[kept] = values[i], tokens[i], weights[i]
                    kept += 1
            num = kept
        elif stage == chain.IS_TOP_K and 0 < top_k < num:
            num = _cut(values, tokens, weights, num, largest, _BY_LOGIT, np.uint64(top_k), False, True)
        elif stage == chain.IS_TOP_P and top_p < np.float32(1.0):
            wanted = _share(total_mass(weights, num), top_p, False)
            num = _cut(values, tokens, weights, num, largest, _BY_LOGIT, wanted, True, False)
        elif stage == chain.IS_TYPICAL and numbers[chain.TYPICAL_P] < np.float32(1.0):
            mean, total = _mean_distance(values, weights, num, largest)
            wanted = _share(total, numbers[chain.TYPICAL_P], True)
            num = _cut(values, tokens, weights, num, largest, np.float32(mean), wanted, True, False)
            largest = _largest(values, num)
            exponentials(address(values), largest, num, address(weights))
        elif stage == chain.IS_XTC:
            probability, threshold = numbers[chain.XTC_PROBABILITY], numbers[chain.XTC_THRESHOLD]
            may_act = probability > np.float32(0.0) and threshold <= np.float32(0.5) and num > 1
            if may_act and _acts(probability, random[0], random[1], random[2]):
                num = _xtc(values, tokens, weights, num, threshold)
                largest = _largest(values, num)
                exponentials(address(values), largest, num, address(weights))
        elif stage == chain.IS_MIROSTAT:
            num = _mirostat(values, tokens, weights, num, largest, numbers[chain.MU])
    return num
