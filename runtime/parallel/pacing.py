"""Measures the steps of a fleet's engines for `AutoRoles`, and limits them as the roles want.

    engines ── steps ──▶ Pacer: fit of their times ──▶ AutoRoles: who does what, sizes of steps
       ◀── most tokens and seconds of a step ────────────┘

Engines of a fleet have the same model and device, so one fit serves all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from runtime.engine.messages import EngineInfo, StepView
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.engine.scheduling.step_limit import StepLimit
from runtime.engine.scheduling.step_model import LinearStepModel, StepFeatures, features_of, fit
from runtime.parallel.roles import AutoRoles

KEPT = 256
"""Steps of each kind, with and without prompts, to which the times are fitted."""

_FIT_EVERY = 128
_LEAST_DECODES, _LEAST_PROMPTS = 32, 16
"""Steps of each kind before the first fit."""


class Pacer:
    """See the module. Thread-safe.

    Args:
        lock: guards the roles.
    """

    def __init__(self, roles: AutoRoles, lock: threading.Lock) -> None:
        self.roles, self._lock = roles, lock
        self._own = threading.Lock()
        # Guarded by the own lock:
        self._prompts: deque[tuple[StepFeatures, float]] = deque(maxlen=KEPT)
        self._decodes: deque[tuple[StepFeatures, float]] = deque(maxlen=KEPT)
        self._num_new = 0
        self.steps: LinearStepModel | None = None
        """The fitted times; None until enough was measured."""

    def see(self, view: StepView) -> bool:
        """Take a step's time. True if the limits may have changed since the last time."""
        if not view.chunks or view.duration_s <= 0.0:
            return False
        features = features_of([(each.start, each.count) for each in view.chunks])
        are_decodes = all(each.start >= each.num_prompt_tokens for each in view.chunks)  # with drafts, too
        with self._own:
            (self._decodes if are_decodes else self._prompts).append((features, view.duration_s))
            self._num_new += 1
            is_enough = len(self._decodes) >= _LEAST_DECODES and len(self._prompts) >= _LEAST_PROMPTS
            if not is_enough or (self.steps is not None and self._num_new < _FIT_EVERY):
                return False
            self._num_new = 0
            features_seen, seconds = zip(*self._prompts, *self._decodes, strict=True)
            self.steps = fit(features_seen, seconds).model
            steps = self.steps
        with self._lock:
            self.roles.learn(lambda *each: steps.seconds(StepFeatures(*each)))
        return True

    def limit(self, clients: Sequence[ProcessEngineClient], info: EngineInfo) -> None:
        """Tell the engines the limits of their steps."""
        with self._lock:
            budgets, seconds, steps = list(self.roles.budgets), self.roles.limit_s, self.steps
        if steps is None:
            return
        for client, budget in zip(clients, budgets, strict=True):
            has_pictures = info.images is not None  # one that may not be cut must fit a step
            most = info.max_num_batched_tokens if has_pictures else max(budget, info.max_num_seqs)
            client.limit_steps(StepLimit(most, seconds, steps))
