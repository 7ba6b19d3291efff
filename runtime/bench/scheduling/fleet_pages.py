"""The KV pages of a simulated fleet's engines, compiled.

Pages of prompts are cached by the trace's hashes, least recently used first out; those of answers and of requests
without hashes are not.

In all functions ``s`` is the `FleetState`; ``e``, ``r`` and ``h`` are the numbers of an engine, a request and a hash.
"""

from __future__ import annotations

from numba_kernels.cache import njit_borrowing
from runtime.bench.scheduling.fleet_state import NONE


@njit_borrowing
def _unlink(s, e, h):  # type: ignore[no-untyped-def]
    older, newer = s.older[e, h], s.newer[e, h]
    s.newer[e, older] = newer
    s.older[e, newer] = older


@njit_borrowing
def _put_newest(s, e, h):  # type: ignore[no-untyped-def]
    end = s.refs.shape[1]
    newest = s.older[e, end]
    s.newer[e, newest], s.older[e, h] = h, newest
    s.newer[e, h], s.older[e, end] = end, h


@njit_borrowing
def _note_change(s, e, h, is_there):  # type: ignore[no-untyped-def]
    number = s.counts[1]
    s.changes[number, 0], s.changes[number, 1], s.changes[number, 2] = e, h, is_there
    s.counts[1] = number + 1


@njit_borrowing
def _free_pages(s, e):  # type: ignore[no-untyped-def]
    engine = s.engines[e]
    return engine.capacity - engine.num_private - engine.num_present * (s.sizes[1] // s.sizes[0])


@njit_borrowing
def make_room(s, e, needed):  # type: ignore[no-untyped-def]
    """Evict unused blocks until so many pages are free; False if there are too few."""
    per_hash = s.sizes[1] // s.sizes[0]
    engine = s.engines[e]
    if _free_pages(s, e) + engine.num_unused * per_hash < needed:
        return False
    end = s.refs.shape[1]
    while _free_pages(s, e) < needed:
        h = s.newer[e, end]
        _unlink(s, e, h)
        s.refs[e, h] = NONE
        engine.num_unused -= 1
        engine.num_present -= 1
        _note_change(s, e, h, 0)
    return True


@njit_borrowing
def _hold(s, e, r, place):  # type: ignore[no-untyped-def]
    """A request takes a block that is there."""
    request = s.requests[r]
    h = s.hashes[request.first_hash + place]
    if s.refs[e, h] == 0:
        _unlink(s, e, h)
        s.engines[e].num_unused -= 1
    s.refs[e, h] += 1
    s.holds[request.first_hash + place] = 1


@njit_borrowing
def release(s, e, r):  # type: ignore[no-untyped-def]
    """A request gives up all its pages, the last first."""
    request, engine = s.requests[r], s.engines[e]
    engine.num_private -= request.num_pages
    request.num_pages = 0
    for place in range(request.num_hashes - 1, -1, -1):
        if s.holds[request.first_hash + place]:
            s.holds[request.first_hash + place] = 0
            h = s.hashes[request.first_hash + place]
            s.refs[e, h] -= 1
            if s.refs[e, h] == 0:
                _put_newest(s, e, h)
                engine.num_unused += 1
    request.num_published = 0


@njit_borrowing
def publish(s, e, r):  # type: ignore[no-untyped-def]
    """Full blocks of a prompt can be found from now on, unless another request has the same ones."""
    request, engine = s.requests[r], s.engines[e]
    size = s.sizes[1]
    end = min(request.computed, request.num_prompt) // size
    for place in range(request.num_published, min(end, request.num_hashes)):
        index = request.first_hash + place
        if s.holds[index]:
            continue
        h = s.hashes[index]
        if s.refs[e, h] == NONE:
            s.refs[e, h] = 1
            s.holds[index] = 1
            engine.num_present += 1
            engine.num_private -= size // s.sizes[0]
            request.num_pages -= size // s.sizes[0]
            _note_change(s, e, h, 1)
    request.num_published = max(request.num_published, end)


@njit_borrowing
def found_blocks(s, e, r, most_tokens):  # type: ignore[no-untyped-def]
    """Blocks of a prompt's first tokens that an engine has."""
    request = s.requests[r]
    most = min(request.num_hashes, most_tokens // s.sizes[1], request.num_prompt // s.sizes[1])
    count = 0
    while count < most and s.refs[e, s.hashes[request.first_hash + count]] != NONE:
        count += 1
    return count


@njit_borrowing
def place_pages(s, e, r, num_reserved):  # type: ignore[no-untyped-def]
    """Give a request pages of all its known tokens, as far as they are not there; False if there are too few."""
    request, engine = s.requests[r], s.engines[e]
    page, size = s.sizes[0], s.sizes[1]
    num_found = found_blocks(s, e, r, request.known - 1)
    for place in range(num_found):
        _hold(s, e, r, place)
    needed = -(-(request.known - num_found * size) // page)
    if not make_room(s, e, needed + num_reserved):
        release(s, e, r)
        return False
    request.num_pages = needed
    engine.num_private += needed
    request.num_published = num_found
    return True
