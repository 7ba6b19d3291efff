"""One token for each row of logits, where some rows have a chain of samplers: as `numba_kernels.cuda.sampling`, with
the same token for a row without a chain.

A block has a row, which it keeps, changed, in device memory. The order of the arguments is that of `sampling`, with
chain_words i32 [any], chain_start and chain_end i32 [rows each] after bias_end, and mus f32 [rows] after status: the
next mu of mirostat.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator

from numba import cuda, types

from numba_kernels import sampler_chain as chain
from numba_kernels.cuda.intrinsics import float64 as wide
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.convert import bits_from_f32
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import maximum_nan
from numba_kernels.cuda.intrinsics.philox import philox
from numba_kernels.cuda.intrinsics.rounded import subtract
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.row_blocks import ENTRIES_BYTES, THREADS, exchange
from numba_kernels.cuda.sampler_chain import largest_of, log_of_mass, masses, shape, surprise
from numba_kernels.cuda.sampling import (
    BAD_ID,
    HAS_BAD_ID,
    HAS_LOGITS,
    IS_SPOILT,
    IS_SPOILT_BY_LISTS,
    NOTHING_TO_DRAW,
    OK,
    Plan,
    add_bias,
    could_win,
    load,
    no_later_than,
    penalise,
    pick,
    race,
    soonest_of_warp,
    store,
    store_4,
)
from numba_kernels.cuda.selection import (
    INFINITY,
    LOWEST_FINITE,
    MAX_VOCAB,
    NO_TOKEN,
    SEARCH_BYTES,
    load_quad,
    rising,
)
from numba_kernels.cuda.specialisation import Launch, Specialisation

float32, int32, uint32, uint64 = types.float32, types.int32, types.uint32, types.uint64

_SEARCH_AT = 3 * ENTRIES_BYTES  # in shared memory, after the entries of the exchanges
SHARED_BYTES = 16 + _SEARCH_AT + SEARCH_BYTES
_PLAIN_ORDER = chain.packed((chain.IS_TEMPERATURE, chain.IS_MIN_P, chain.IS_TOP_K, chain.IS_TOP_P))
_ALL_BITS = 0xFFFFFFFF
_exchanged = exchange(False)


@device_function
def _take(row, raw, mask, has_mask):
    """Copies a row's logits to its part, those that are not allowed as -inf. Flags."""
    part, num_quads, num_tokens = row
    read_largest = float32(-INFINITY)
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        a, b, c, d = load_quad(raw, quad, num_tokens)
        read_largest = maximum_nan(read_largest, maximum_nan(maximum_nan(a, b), maximum_nan(c, d)))
        if has_mask:
            allowed = memory.load_b32(mask + uint64(quad >> uint32(3)) * uint64(4)) >> ((quad & uint32(7)) << uint32(2))
            a = a if allowed & uint32(1) != uint32(0) else float32(-INFINITY)
            b = b if allowed & uint32(2) != uint32(0) else float32(-INFINITY)
            c = c if allowed & uint32(4) != uint32(0) else float32(-INFINITY)
            d = d if allowed & uint32(8) != uint32(0) else float32(-INFINITY)
        store_4(part + uint64(quad) * uint64(16), (a, b, c, d))
        quad = uint32(quad + uint32(THREADS))
    flags = uint32(0)
    if not read_largest < float32(INFINITY):
        flags = uint32(IS_SPOILT)
    elif read_largest > float32(-INFINITY):
        flags = uint32(HAS_LOGITS)
    return flags


@device_function
def _spoilt(row):
    """A flag for NaN or +inf."""
    part, num_quads, num_tokens = row
    largest = float32(-INFINITY)
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        a, b, c, d = load_quad(part, quad, num_tokens)
        largest = maximum_nan(largest, maximum_nan(maximum_nan(a, b), maximum_nan(c, d)))
        quad = uint32(quad + uint32(THREADS))
    return uint32(0) if largest < float32(INFINITY) else uint32(IS_SPOILT_BY_LISTS)


@device_function
def _lower(part, vocab, words, num_words):
    """Subtracts what a chain's words say from different tokens. Flags."""
    flags = uint32(0)
    count = uint32(uint32(num_words - uint32(chain.NUM_WORDS)) >> uint32(1))
    i = uint32(cuda.threadIdx.x)
    while i < count:
        place = words + uint64(uint32(i + uint32(chain.NUM_WORDS))) * uint64(4)
        token = memory.load_b32(place)
        if token >= vocab:
            flags = uint32(HAS_BAD_ID)
        else:
            at = part + uint64(token) * uint64(4)
            store(at, subtract(load(at), memory.load_f32(place + uint64(count) * uint64(4))))
        i = uint32(i + uint32(THREADS))
    return flags


@device_function
def _draw(row, largest, token, random, entries):
    """The token that finishes first among those above -inf."""
    part, num_quads, num_tokens = row
    seed, choice, position = random
    key_low, key_high = uint32(seed), uint32(seed >> uint64(32))
    thread = uint32(cuda.threadIdx.x)
    words = philox(token >> uint32(2), choice, position, uint32(0), key_low, key_high)
    first = no_later_than(pick(words, token & uint32(3))), float32(0.0), uint32(NO_TOKEN)
    first_of_warp = thread & uint32(0xFFFFFFE0)
    while first_of_warp < num_quads:
        quad = uint32(first_of_warp + (thread & uint32(31)))
        logits = load_quad(part, quad, num_tokens)
        bound = soonest_of_warp(first[0])
        words = philox(quad, choice, position, uint32(0), key_low, key_high)
        may_win = False
        for e in range(4):
            may_win |= could_win(logits[e], words[e], largest, bound)
        e = uint32(0)
        while may_win and e < uint32(4):
            own = uint32(uint32(quad * uint32(4)) + e)
            first = race(pick(logits, e), pick(words, e), own, largest, uint64(LOWEST_FINITE), bound, first)
            e = uint32(e + uint32(1))
        first_of_warp = uint32(first_of_warp + uint32(THREADS))
    _, _, best_token, _ = _exchanged(
        entries, bits_from_f32(first[0]) ^ uint32(_ALL_BITS), rising(first[1]) ^ uint32(_ALL_BITS),
        first[2] ^ uint32(NO_TOKEN), uint32(0),
    )  # fmt: skip
    return best_token ^ uint32(NO_TOKEN)


@device_function
def _next_mu(words, mu, distance, total):
    tau = memory.load_f32(words + uint64(4 * chain.MIROSTAT_TAU))
    eta = memory.load_f32(words + uint64(4 * chain.MIROSTAT_ETA))
    error = wide.subtract(surprise(distance, log_of_mass(total)), wide.f64_from_f32(tau))
    return wide.f32_from_f64(wide.subtract(wide.f64_from_f32(mu), wide.multiply(wide.f64_from_f32(eta), error)))


@functools.cache
def _kernel() -> Specialisation:
    load_f32, load_b32, load_b64 = memory.load_f32, memory.load_b32, memory.load_b64

    def chain_sampling(
        logits, temperatures, top_ks, top_ps, min_ps, repetitions, presences, frequencies, seeds, choices, positions,
        prompt_ids, prompt_start, prompt_end, output_ids, output_start, output_end, bias_ids, bias_values, bias_start,
        bias_end, chain_words, chain_start, chain_end, allowed, work, all_counts, token_ids, statuses, mus, id_flag,
        flag_copy, vocab, mask_words,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        thread = uint32(cuda.threadIdx.x)
        shared = uint32(uint32(memory.shared_address(cuda.shared.array(0, uint32)) + uint32(15)) & uint32(0xFFFFFFF0))
        search_memory = uint32(shared + uint32(_SEARCH_AT))
        row = uint32(cuda.blockIdx.x)
        of_row = uint64(row) * uint64(4)
        temperature = load_f32(temperatures + of_row)
        penalties = load_f32(repetitions + of_row), load_f32(presences + of_row), load_f32(frequencies + of_row)
        is_penalised = penalties[0] != float32(1.0) or penalties[1] != float32(0.0) or penalties[2] != float32(0.0)
        first_word = load_b32(chain_start + of_row)
        num_words = uint32(load_b32(chain_end + of_row) - first_word)
        words, order, mu, is_mirostat = uint64(0), uint32(_PLAIN_ORDER), float32(0.0), False
        if num_words > uint32(0):
            words = chain_words + uint64(first_word) * uint64(4)
            order = load_b32(words + uint64(4 * chain.ORDER))
            mu = load_f32(words + uint64(4 * chain.MU))
            is_mirostat = load_b32(words + uint64(4 * chain.MIROSTAT)) != uint32(0)

        num_quads = uint32(uint32(vocab + uint32(3)) >> uint32(2))
        part = work + uint64(row) * uint64(num_quads) * uint64(16)
        whole = part, num_quads, uint32(num_quads * uint32(4))  # -inf from the vocabulary's end on
        raw_row = part, num_quads, vocab
        raw = logits + uint64(row) * uint64(vocab) * uint64(4)
        mask = allowed + uint64(row) * uint64(mask_words) * uint64(4)
        flags = _take(raw_row, raw, mask, allowed != uint64(0))
        first_bias = load_b32(bias_start + of_row)
        num_bias = uint32(load_b32(bias_end + of_row) - first_bias)
        sync_block()
        place = uint64(first_bias) * uint64(4)
        flags |= add_bias(part, uint32(0), vocab, vocab, bias_ids + place, bias_values + place, num_bias)
        if is_penalised:
            prompt, output = load_b32(prompt_start + of_row), load_b32(output_start + of_row)
            counts = all_counts + uint64(row) * uint64(vocab) * uint64(4)
            flags |= penalise(
                (part, uint32(0), vocab, vocab, counts),
                (prompt_ids + uint64(prompt) * uint64(4), uint32(load_b32(prompt_end + of_row) - prompt)),
                (output_ids + uint64(output) * uint64(4), uint32(load_b32(output_end + of_row) - output)), penalties,
            )  # fmt: skip
        sync_block()
        if num_words > uint32(chain.NUM_WORDS):
            flags |= _lower(part, vocab, words, num_words)
        sync_block()
        flags |= _spoilt(whole)
        largest, token = largest_of(whole, shared)
        _, _, _, flags = _exchanged(
            uint32(shared + uint32(ENTRIES_BYTES)), uint32(0), uint32(0), uint32(0), flags
        )  # fmt: skip
        status = int32(OK)
        if flags & uint32(IS_SPOILT) != uint32(0) or flags & uint32(HAS_LOGITS) == uint32(0):
            status = int32(NOTHING_TO_DRAW)
        elif flags & uint32(HAS_BAD_ID) != uint32(0):
            status = int32(BAD_ID)
        elif flags & uint32(IS_SPOILT_BY_LISTS) != uint32(0) or largest == float32(-INFINITY):
            status = int32(NOTHING_TO_DRAW)

        if status == int32(OK) and not temperature < float32(chain.GREEDY_BELOW):
            random = load_b64(seeds + of_row * uint64(2)), load_b32(choices + of_row), load_b32(positions + of_row)
            min_p = load_f32(min_ps + of_row)
            filters = temperature, min_p, load_b32(top_ks + of_row), load_f32(top_ps + of_row)
            memory_of = search_memory, shared
            largest, token = shape(whole, words, order, largest, token, random, filters, memory_of)
            total = uint64(0)
            if is_mirostat:
                total, _ = masses(whole, largest, search_memory)
            token = _draw(whole, largest, token, random, uint32(shared + uint32(2 * ENTRIES_BYTES)))
            if is_mirostat:
                mu = _next_mu(words, mu, subtract(largest, load(part + uint64(token) * uint64(4))), total)

        if thread == uint32(0):
            memory.store_b32(token_ids + of_row, token if status == int32(OK) else uint32(NO_TOKEN))
            memory.store_b32(statuses + of_row, uint32(status))
            memory.store_f32(mus + of_row, mu)
            if row == uint32(0):
                memory.store_b32(flag_copy, load_b32(id_flag))

    return Specialisation(
        name="chain_sampling",
        kernel=cuda.jit(chain_sampling),
        argument_types=(uint64,) * (len(inspect.signature(chain_sampling).parameters) - 2) + (uint32,) * 2,
        max_threads=THREADS,
        min_capability=80,
        uses_float64=True,  # standard deviations, entropies and surprises, as on the CPU
    )


def plan(num_rows: int, vocab: int) -> Plan | None:
    """The plan for ``logits [num_rows, vocab]``; None where there are no rows.

    Raises ValueError for a vocabulary of no token, or of more than `MAX_VOCAB`.
    """
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"chain_sampling: vocab is {vocab}, must be 1 to {MAX_VOCAB}")
    if num_rows == 0:
        return None
    return Plan(Launch(_kernel(), (num_rows, 1, 1), (THREADS, 1, 1), SHARED_BYTES), num_rows * -(-vocab // 4) * 16)


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    yield _kernel()
