"""The state of a simulated fleet: all engines in one array of records, all requests in another, for `fleet_steps`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NONE = -1
GAP_BINS = 400
LEAST_GAP_S = 1e-4
GAP_RATIO = 1.04
"""Bounds of the histogram of gaps between tokens: bin i begins at ``LEAST_GAP_S * GAP_RATIO**i``."""

REQUEST = np.dtype(
    [
        ("arrival", "f8"), ("num_prompt", "i8"), ("num_output", "i8"), ("first_hash", "i8"), ("num_hashes", "i8"),
        ("engine", "i8"),
        ("ready", "f8"),  # its content has come
        ("begun", "f8"),  # its first chunk
        ("first", "f8"), ("last", "f8"),  # of its tokens
        ("known", "i8"),  # tokens to be computed before the next one is drawn
        ("computed", "i8"), ("produced", "i8"), ("num_published", "i8"),
        ("num_pages", "i8"),  # that are not shared
        ("until", "i8"),  # its engine's number of decoding steps at its end
        ("next", "i8"),  # in its engine's queue
        ("num_hit", "i8"), ("num_computed", "i8"), ("num_moved", "i8"), ("num_preemptions", "i8"),
    ],
    align=True,
)  # fmt: skip
ENGINE = np.dtype(
    [
        ("clock", "f8"), ("busy", "f8"), ("link_free", "f8"),
        ("budget", "i8"),
        ("step_s", "f8"),  # most mean seconds of steps with decodes; 0.0: the budget alone
        ("saved_s", "f8"), ("most_saved_s", "f8"),  # seconds that steps may exceed it by
        ("capacity", "i8"), ("num_private", "i8"), ("num_present", "i8"), ("num_unused", "i8"),
        ("first_waiting", "i8"), ("num_waiting", "i8"), ("first_coming", "i8"), ("partial", "i8"),
        ("num_running", "i8"), ("num_decodes", "i8"), ("context", "i8"), ("num_decode_steps", "i8"),
        ("num_steps", "i8"), ("num_tokens", "i8"), ("decode_tokens", "i8"), ("num_fresh", "i8"),
        ("num_without", "i8"),  # steps in a row whose time had no room for waiting prompts
    ],
    align=True,
)  # fmt: skip


class FleetState(NamedTuple):
    """Arrays of E engines, R requests and H hashes.

    phases   [E, page] decodes by the place of their next token in its page, less their engine's steps. A new page
             counts in ``num_private`` at once, in ``num_pages`` when the request leaves
    heap     [E, rows, 2] decodes: the step of their end, their number
    fresh    [E, rows] requests whose first token the last step drew
    holds    one for each hash of each request: whether it holds that block on its engine
    refs     [E, H] holders of a block, -1 if it is not there
    older, newer  [E, H + 1] the order of blocks without a holder
    log      [n, 2] requests that drew their first token (0) or ended (1)
    changes  [n, 3] engine, hash, 1 if it is there now
    counts   used rows of log and changes, preemptions
    """

    engines: NDArray[Any]
    requests: NDArray[Any]
    hashes: NDArray[np.int32]
    phases: NDArray[np.int64]
    heap: NDArray[np.int64]
    fresh: NDArray[np.int64]
    holds: NDArray[np.uint8]
    refs: NDArray[np.int32]
    older: NDArray[np.int32]
    newer: NDArray[np.int32]
    log: NDArray[np.int64]
    changes: NDArray[np.int64]
    counts: NDArray[np.int64]
    gaps: NDArray[np.int64]
    coefficients: NDArray[np.float64]  # of LinearStepModel, and eager_s
    window: NDArray[np.float64]  # a window and the share of layers with it
    sizes: NDArray[np.int64]  # tokens of a page and of a hash, rows
