"""One token for each row of logits: masks, penalties, temperature, min-p, top-k, top-p and the draw, in vLLM's order,
or the samplers of the row's chain in its own.

The draw is a race: token i finishes after E_i / w_i, where w_i is its weight and E_i an exponentially distributed
number from Philox with the request's seed as key and (token id / 4, choice, position, 0) as counter, word id % 4; the
first to finish wins. That is a draw from the weights' distribution, which needs no sum, no order of tokens and no
state. Since -log(1 - u) is at least u, a logarithm is taken only for the few tokens that could win.

Status 1: an id outside the vocabulary among bias or penalty ids.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray, njit

from numba_kernels import sampler_chain as chain
from numba_kernels.cpu.intrinsics.scalars import philox
from numba_kernels.cpu.rows import exponentials, largest_of
from numba_kernels.cpu.running.launch import Fields, Kernel, address, float32_at, int32_at, int64_at, uint32_at
from numba_kernels.cpu.sampler_chain import log_of_mass, mass_of, shape, surprise
from numba_kernels.cpu.selection import last_kept

FIELDS = Fields(
    "*logits *temperature *top_k *top_p *min_p *repetition_penalty *presence_penalty *frequency_penalty "
    "*seed *choice_index *position *prompt_ids *prompt_start *prompt_end *output_ids *output_start *output_end "
    "*bias_ids *bias_values *bias_start *bias_end *chain_words *chain_start *chain_end *allowed *token_ids *statuses "
    "*mus num_rows vocab mask_words"
)
BAD_ID = 1
GREEDY_BELOW = np.float32(chain.GREEDY_BELOW)
_BLOCK = 256  # tokens whose random words are made together
_MINUS_INFINITY = np.float32(-np.inf)
_LOWEST = np.finfo(np.float32).min
_NOTHING, _OUT_OF_RANGE = np.int64(-1), np.int64(-2)


@njit(nogil=True)
def _repeat(logit, penalty):
    return logit / penalty if logit > np.float32(0.0) else logit * penalty


@njit(nogil=True)
def _penalise(logits, prompt_ids, output_ids, repetition, presence, frequency):
    """Repetition over prompt and output, frequency and presence over the output; False for an id out of range."""
    vocab = logits.shape[0]
    counts = np.zeros(vocab, np.int32)  # -1 once a token has been dealt with
    for token in output_ids:
        if token < 0 or token >= vocab:
            return False
        counts[token] += 1
    for token in output_ids:
        count = counts[token]
        if count > 0:
            logit = _repeat(logits[token], repetition)
            logits[token] = logit - frequency * np.float32(count) - presence
            counts[token] = -1
    for token in prompt_ids:
        if token < 0 or token >= vocab:
            return False
        if counts[token] == 0:
            logits[token] = _repeat(logits[token], repetition)
            counts[token] = -1
    return True


@njit(nogil=True)
def _is_kept(logit, token, threshold, last_id):
    """Whether a token can be drawn: above the threshold, or at it with a number up to ``last_id``."""
    return logit > threshold or (logit == threshold and token <= last_id)


@njit(nogil=True)
def _race(logits, weights, threshold, last_id, seed, choice, position):
    """The token that finishes first among those kept."""
    vocab = logits.shape[0]
    key_low, key_high = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
    words = np.empty((4, _BLOCK // 4), np.uint32)
    best, winner = np.inf, np.int64(-1)
    for start in range(0, vocab, _BLOCK):
        stop = min(vocab, start + _BLOCK)
        kept = 0
        for token in range(start, stop):
            kept += 1 if logits[token] >= threshold else 0
        if kept == 0:
            continue
        for group in range(_BLOCK // 4):
            counter = np.uint32(start // 4 + group)
            words[0, group], words[1, group], words[2, group], words[3, group] = philox(
                counter, choice, position, np.uint32(0), key_low, key_high
            )
        for token in range(start, stop):
            logit = logits[token]
            if _is_kept(logit, token, threshold, last_id):
                offset = token - start
                uniform = (np.float64(words[offset & 3, offset >> 2]) + 0.5) * 2.0**-32
                weight = np.float64(weights[token])
                if uniform < best * weight:
                    finish = -math.log1p(-uniform)
                    if finish < best * weight:
                        best, winner = finish / weight, np.int64(token)
    return winner


@njit(nogil=True)
def _range_of(starts, ends, num_rows, row):
    """The beginning of a row's list, and its length."""
    start = np.int64(int32_at(starts, num_rows)[row])
    return start, np.int64(int32_at(ends, num_rows)[row]) - start


@njit(nogil=True)
def _first_equal(logits, value):
    """The first place of a value known to be there: found block by block, since a loop that stops is not vectorised."""
    size = logits.shape[0]
    for start in range(0, size, _BLOCK):
        stop = min(size, start + _BLOCK)
        found = 0
        for token in range(start, stop):
            found |= 1 if logits[token] == value else 0
        if found != 0:
            for token in range(start, stop):
                if logits[token] == value:
                    return np.int64(token)
    return _NOTHING


@njit(nogil=True)
def _lower(logits, words, numbers):
    """Subtract what a chain's words say; False for an id out of range."""
    count = (words.shape[0] - chain.NUM_WORDS) // 2
    for i in range(chain.NUM_WORDS, chain.NUM_WORDS + count):
        if words[i] < 0 or words[i] >= logits.shape[0]:
            return False
        logits[words[i]] -= numbers[i + count]
    return True


@njit(nogil=True)
def _random_of(a, row):
    """A row's seed, choice and position."""
    num_rows = a.num_rows
    seed = np.uint64(int64_at(a.seed, num_rows)[row])
    choice = np.uint32(int32_at(a.choice_index, num_rows)[row])
    return seed, choice, np.uint32(int32_at(a.position, num_rows)[row])


@njit(nogil=True)
def _shape(a, row, logits, weights, words, numbers):
    """Apply a chain's samplers to a row; dropped tokens get -inf."""
    num_rows, num = a.num_rows, 0
    values, tokens = np.empty(a.vocab, np.float32), np.empty(a.vocab, np.int32)
    for token in range(a.vocab):
        if logits[token] > _MINUS_INFINITY:
            values[num], tokens[num] = logits[token], token
            num += 1
    values, tokens = values[:num], tokens[:num]
    exponentials(address(values), largest_of(address(values), num), num, address(weights))
    num = shape(
        values, tokens, weights, words, numbers, _random_of(a, row), float32_at(a.temperature, num_rows)[row],
        float32_at(a.min_p, num_rows)[row], np.int64(int32_at(a.top_k, num_rows)[row]),
        float32_at(a.top_p, num_rows)[row],
    )  # fmt: skip
    logits[:] = _MINUS_INFINITY
    for i in range(num - 1, -1, -1):  # a token's place is no lower than its index
        logits[tokens[i]], weights[tokens[i]] = values[i], weights[i]


@functools.cache
def _weigher(has_chains):
    """A function ``(a, row)``: a row's logits as they are drawn from, the weight of each, and the (logit, id) of the
    last that is kept. Before these the token, where no draw is needed: then there are no weights; or _NOTHING, or
    _OUT_OF_RANGE for an id outside the vocabulary."""

    @njit(nogil=True)
    def weigh(a, row):
        vocab, num_rows = a.vocab, a.num_rows
        raw = a.logits + row * vocab * 4
        largest = largest_of(raw, vocab)
        logits = float32_at(raw, vocab)
        weights = np.empty(0, np.float32)
        threshold, last_id = _MINUS_INFINITY, np.int64(-1)  # a token of -inf is never kept
        if np.isnan(largest) or largest == _MINUS_INFINITY:
            return _NOTHING, logits, weights, threshold, last_id

        temperature = float32_at(a.temperature, num_rows)[row]
        repetition = float32_at(a.repetition_penalty, num_rows)[row]
        presence = float32_at(a.presence_penalty, num_rows)[row]
        frequency = float32_at(a.frequency_penalty, num_rows)[row]
        first_bias, num_bias = _range_of(a.bias_start, a.bias_end, num_rows, row)
        penalised = repetition != 1.0 or presence != 0.0 or frequency != 0.0
        num_words = np.int64(0)
        if has_chains:
            first_word, num_words = _range_of(a.chain_start, a.chain_end, num_rows, row)
            words = int32_at(a.chain_words + first_word * 4, num_words)
            numbers = float32_at(a.chain_words + first_word * 4, num_words)
        lowers = num_words > chain.NUM_WORDS
        if temperature < GREEDY_BELOW and num_bias == 0 and a.allowed == 0 and not penalised and not lowers:
            return _first_equal(logits, largest), logits, weights, threshold, last_id

        logits = logits.copy()
        if a.allowed != 0:
            mask = uint32_at(a.allowed + row * a.mask_words * 4, a.mask_words)
            for token in range(vocab):
                if (mask[token >> 5] >> np.uint32(token & 31)) & np.uint32(1) == 0:
                    logits[token] = _MINUS_INFINITY
        bias_ids = int32_at(a.bias_ids + first_bias * 4, num_bias)
        bias_values = float32_at(a.bias_values + first_bias * 4, num_bias)
        for i in range(num_bias):
            if bias_ids[i] < 0 or bias_ids[i] >= vocab:
                return _OUT_OF_RANGE, logits, weights, threshold, last_id
            logits[bias_ids[i]] += bias_values[i]
        if penalised:
            first, count = _range_of(a.prompt_start, a.prompt_end, num_rows, row)
            prompt_ids = int32_at(a.prompt_ids + first * 4, count)
            first, count = _range_of(a.output_start, a.output_end, num_rows, row)
            output_ids = int32_at(a.output_ids + first * 4, count)
            if not _penalise(logits, prompt_ids, output_ids, repetition, presence, frequency):
                return _OUT_OF_RANGE, logits, weights, threshold, last_id
        if has_chains and lowers and not _lower(logits, words, numbers):
            return _OUT_OF_RANGE, logits, weights, threshold, last_id
        if temperature >= GREEDY_BELOW and num_words == 0:
            for token in range(vocab):
                logits[token] = logits[token] / temperature
        largest = largest_of(address(logits), vocab)
        if np.isnan(largest) or largest == _MINUS_INFINITY:
            return _NOTHING, logits, weights, threshold, last_id
        if temperature < GREEDY_BELOW:
            return _first_equal(logits, largest), logits, weights, threshold, last_id

        weights = np.empty(vocab, np.float32)
        if has_chains and num_words > 0:
            _shape(a, row, logits, weights, words, numbers)
            return _NOTHING, logits, weights, _LOWEST, np.int64(vocab)
        exponentials(address(logits), largest, vocab, address(weights))
        min_p = float32_at(a.min_p, num_rows)[row]
        if min_p > 0.0:
            for token in range(vocab):
                if weights[token] < min_p:
                    logits[token] = _MINUS_INFINITY
        top_k = np.int64(int32_at(a.top_k, num_rows)[row])
        top_p = np.float64(float32_at(a.top_p, num_rows)[row])
        if 0 < top_k < vocab or top_p < 1.0:
            threshold, last_id = last_kept(logits, weights, largest, top_k, top_p)
        return _NOTHING, logits, weights, threshold, last_id

    return weigh


@functools.cache
def _drawer(has_chains):
    """A function ``(a, row)``: the token of a row, _NOTHING, or _OUT_OF_RANGE for an id outside the vocabulary; and
    mirostat's next mu."""
    weigh = _weigher(has_chains)

    @njit(nogil=True)
    def draw(a, row):
        token, logits, weights, threshold, last_id = weigh(a, row)
        if weights.shape[0] == 0:
            return token, _kept_mu(a, row) if has_chains else np.float32(0.0)
        seed, choice, position = _random_of(a, row)
        token = _race(logits, weights, threshold, last_id, seed, choice, position)
        return token, _next_mu(a, row, token, logits, weights) if has_chains else np.float32(0.0)

    return draw


@njit(nogil=True)
def _kept_mu(a, row):
    first, count = _range_of(a.chain_start, a.chain_end, a.num_rows, row)
    return float32_at(a.chain_words + first * 4, count)[chain.MU] if count > 0 else np.float32(0.0)


@njit(nogil=True)
def _next_mu(a, row, token, logits, weights):
    """Mirostat's mu after a token."""
    mu = _kept_mu(a, row)
    first, count = _range_of(a.chain_start, a.chain_end, a.num_rows, row)
    if count == 0 or token < 0 or int32_at(a.chain_words + first * 4, count)[chain.MIROSTAT] == 0:
        return mu
    numbers = float32_at(a.chain_words + first * 4, count)
    total, largest = np.uint64(0), _MINUS_INFINITY
    for i in range(a.vocab):
        if logits[i] > _MINUS_INFINITY:
            total += mass_of(weights[i])
            largest = max(largest, logits[i])
    error = surprise(largest - logits[token], log_of_mass(total)) - np.float64(numbers[chain.MIROSTAT_TAU])
    return np.float32(np.float64(mu) - np.float64(numbers[chain.MIROSTAT_ETA]) * error)


@functools.cache
def sampling_kernel(has_chains: bool = False) -> Kernel:
    """Draws ``token_ids [num_rows]``; a work item is one row. A row with NaN, +inf or no token to draw gives -1, and 1
    in ``statuses`` (0 = no such array), which else is 0. Rows have chains only with ``has_chains``: then ``mus`` gets
    mirostat's next mu of each."""
    draw = _drawer(has_chains)

    def sampling(arguments, work_item):
        a = carray(arguments, 1)[0]
        token, mu = draw(a, work_item)
        if has_chains:
            float32_at(a.mus, a.num_rows)[work_item] = mu
        if token == _OUT_OF_RANGE:
            a.status = BAD_ID
            token = _NOTHING
        int32_at(a.token_ids, a.num_rows)[work_item] = token
        if a.statuses != 0:
            int32_at(a.statuses, a.num_rows)[work_item] = 1 if token < 0 else 0

    return Kernel(sampling, FIELDS)


@functools.cache
def processed_kernel(has_chains: bool = False) -> Kernel:
    """The logits of `sampling_kernel`'s draws, after all that shapes them: ``token_ids`` is an address of float32
    ``[num_rows, vocab]``. Tokens that cannot be drawn have -inf; a greedy row's are those that it takes the largest of.
    A work item is one row."""
    weigh = _weigher(has_chains)

    def processed(arguments, work_item):
        a = carray(arguments, 1)[0]
        vocab = a.vocab
        out = float32_at(a.token_ids + work_item * vocab * 4, vocab)
        token, logits, weights, threshold, last_id = weigh(a, work_item)
        if token == _OUT_OF_RANGE:
            a.status = BAD_ID
        is_greedy = weights.shape[0] == 0
        for i in range(vocab):
            if is_greedy or _is_kept(logits[i], i, threshold, last_id):
                out[i] = logits[i]
            else:
                out[i] = _MINUS_INFINITY

    return Kernel(processed, FIELDS)


@functools.cache
def distributions_kernel(has_chains: bool = False) -> Kernel:
    """The distributions of `sampling_kernel`'s draws: ``token_ids`` is an address of float32 ``[num_rows, vocab]``,
    each token's probability. A work item is one row; one without a token to draw is all zeros. ``statuses`` and ``mus``
    are not read."""
    weigh = _weigher(has_chains)

    def distributions(arguments, work_item):
        a = carray(arguments, 1)[0]
        vocab = a.vocab
        out = float32_at(a.token_ids + work_item * vocab * 4, vocab)
        token, logits, weights, threshold, last_id = weigh(a, work_item)
        if token == _OUT_OF_RANGE:
            a.status = BAD_ID
        if weights.shape[0] == 0:
            out[:] = np.float32(0.0)
            if token >= 0:
                out[token] = np.float32(1.0)
            return
        total = 0.0
        for i in range(vocab):
            if _is_kept(logits[i], i, threshold, last_id):
                total += np.float64(weights[i])
        for i in range(vocab):
            if _is_kept(logits[i], i, threshold, last_id):
                out[i] = np.float32(np.float64(weights[i]) / total)
            else:
                out[i] = np.float32(0.0)

    return Kernel(distributions, FIELDS)
