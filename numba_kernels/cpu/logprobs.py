"""Log-probabilities of raw logits: of a chosen token, with its rank, and of the best few of each row.

    log p_i = x_i - max - log sum_j e^(x_j - max)

The best are held in a short sorted list, highest first, ties by the lower id: one comparison for nearly every token.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray

from numba_kernels.cpu.rows import exponentials, largest_of
from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at, int32_at

FIELDS = Fields("*logits *chosen *chosen_logprob *chosen_rank *top_ids *top_logprobs num_rows vocab top_n")


@functools.cache
def logprobs_kernel() -> Kernel:
    """A work item is one row. A row with NaN or +inf, or with -inf alone, gives NaN throughout."""

    def logprobs(arguments, work_item):
        a = carray(arguments, 1)[0]
        row, vocab, top_n = work_item, a.vocab, a.top_n
        logits = float32_at(a.logits + row * vocab * 4, vocab)
        chosen = int32_at(a.chosen, a.num_rows)[row]
        top_ids = int32_at(a.top_ids + row * top_n * 4, top_n)
        top_logprobs = float32_at(a.top_logprobs + row * top_n * 4, top_n)
        largest = largest_of(a.logits + row * vocab * 4, vocab)
        if largest == np.float32(-np.inf):
            largest = np.float32(np.nan)
        log_sum = np.float64(largest) + math.log(exponentials(a.logits + row * vocab * 4, largest, vocab, 0))
        higher = 0
        for token in range(vocab):
            higher += 1 if logits[token] > logits[chosen] else 0
        float32_at(a.chosen_logprob, a.num_rows)[row] = np.float32(np.float64(logits[chosen]) - log_sum)
        int32_at(a.chosen_rank, a.num_rows)[row] = higher + 1

        count = 0
        for token in range(vocab):
            logit = logits[token]
            if top_n == 0 or (count == top_n and not logit > top_logprobs[top_n - 1]):
                continue
            place = count if count < top_n else top_n - 1
            while place > 0 and logit > top_logprobs[place - 1]:
                top_logprobs[place] = top_logprobs[place - 1]
                top_ids[place] = top_ids[place - 1]
                place -= 1
            top_logprobs[place] = logit
            top_ids[place] = token
            count = min(top_n, count + 1)
        for i in range(top_n):
            top_logprobs[i] = np.float32(np.float64(top_logprobs[i]) - log_sum)

    return Kernel(logprobs, FIELDS)
