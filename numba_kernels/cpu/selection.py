"""Top-k and top-p without sorting: finds the last kept token in a row's order.

The order is by logit, the highest first, and by token id among equals. Tokens fall into buckets by their distance from
the largest logit; only the bucket in which the k-th token, or the mass p, is reached is put in order, by a heap.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_NUM_BUCKETS = 4096
_BUCKETS_PER_UNIT = np.float32(64.0)  # a bucket spans 1/64 of a logit; the last one takes all from 64 on


@njit(nogil=True)
def _bucket(largest, logit):
    distance = (largest - logit) * _BUCKETS_PER_UNIT
    return np.int64(distance) if distance < np.float32(_NUM_BUCKETS - 1) else np.int64(_NUM_BUCKETS - 1)


@njit(nogil=True)
def _comes_before(logits, ids, i, j):
    return logits[i] > logits[j] or (logits[i] == logits[j] and ids[i] < ids[j])


@njit(nogil=True)
def _sift_down(logits, ids, size, parent):
    while True:
        child = 2 * parent + 1
        if child >= size:
            return
        if child + 1 < size and _comes_before(logits, ids, child + 1, child):
            child += 1
        if not _comes_before(logits, ids, child, parent):
            return
        logits[parent], logits[child] = logits[child], logits[parent]
        ids[parent], ids[child] = ids[child], ids[parent]
        parent = child


@njit(nogil=True)
def _heap_of_bucket(logits, largest, bucket, lowest, size):
    """A heap, the first in order on top, of the (at most ``size``) tokens of a bucket from ``lowest`` on."""
    heap = np.empty(size, np.float32)
    ids = np.empty(size, np.int64)
    count = 0
    for token in range(logits.shape[0]):
        logit = logits[token]
        if logit >= lowest and logit > -np.inf and _bucket(largest, logit) == bucket:
            heap[count] = logit
            ids[count] = token
            count += 1
    for parent in range(count // 2 - 1, -1, -1):
        _sift_down(heap, ids, count, parent)
    return heap, ids, count


@njit(nogil=True)
def _pop(heap, ids, count):
    """Removes the top of the heap: it is left after the heap's new end."""
    last = count - 1
    heap[0], heap[last] = heap[last], heap[0]
    ids[0], ids[last] = ids[last], ids[0]
    _sift_down(heap, ids, last, 0)
    return last


@njit(nogil=True)
def last_kept(logits, weights, largest, top_k, top_p):
    """(logit, id) of the last token kept: a token stays if its logit is higher, or equal and its id not higher.

    ``weights`` are e^(logit - largest). Top-k keeps all that tie with the k-th; top-p then keeps the smallest set, in
    order, whose share of the rest reaches ``top_p``, and at least one token.
    """
    vocab = logits.shape[0]
    counts = np.zeros(_NUM_BUCKETS, np.int64)
    masses = np.zeros(_NUM_BUCKETS, np.float64)
    num_tokens = 0
    for token in range(vocab):
        if logits[token] > -np.inf:
            bucket = _bucket(largest, logits[token])
            counts[bucket] += 1
            masses[bucket] += weights[token]
            num_tokens += 1

    threshold, last_id = np.float32(-np.inf), np.int64(-1)  # all but -inf
    last_bucket = np.int64(_NUM_BUCKETS - 1)
    if 0 < top_k < num_tokens:
        last_bucket = np.int64(0)
        above = np.int64(0)
        while above + counts[last_bucket] < top_k:
            above += counts[last_bucket]
            last_bucket += 1
        heap, ids, count = _heap_of_bucket(logits, largest, last_bucket, threshold, counts[last_bucket])
        for _ in range(top_k - above):
            count = _pop(heap, ids, count)
        threshold, last_id = heap[count], np.int64(vocab)
        masses[last_bucket] = 0.0
        for token in range(vocab):
            if logits[token] >= threshold and _bucket(largest, logits[token]) == last_bucket:
                masses[last_bucket] += weights[token]

    if top_p < 1.0:
        target = 0.0
        for bucket in range(last_bucket + 1):
            target += masses[bucket]
        target *= top_p
        bucket, mass = np.int64(0), 0.0
        while bucket < last_bucket and mass + masses[bucket] < target:
            mass += masses[bucket]
            bucket += 1
        heap, ids, count = _heap_of_bucket(logits, largest, bucket, threshold, counts[bucket])
        while count > 0:
            count = _pop(heap, ids, count)
            threshold, last_id = heap[count], ids[count]
            mass += weights[last_id]
            if mass >= target:
                break
    return threshold, last_id
