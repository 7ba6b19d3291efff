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
        roles.plans_at_once = False
        self._own = threading.Lock()
        # Guarded by the own lock:
        self._prompts: deque[tuple[StepFeatures, float]] = deque(maxlen=KEPT)
        self._decodes: deque[tuple[StepFeatures, float]] = deque(maxlen=KEPT)
        self._num_new = 0
        self._is_renewing = False
        self.steps: LinearStepModel | None = None
        """The fitted times; None until enough was measured."""

    def see(self, view: StepView) -> bool:
        """Take a step's time. True if the caller must have `renew` called, by a thread that may take some time."""
        if not view.chunks or view.duration_s <= 0.0:
            return False
        features = features_of([(each.start, each.count) for each in view.chunks])
        are_decodes = all(each.start >= each.num_prompt_tokens for each in view.chunks)  # with drafts, too
        with self._own:
            (self._decodes if are_decodes else self._prompts).append((features, view.duration_s))
            self._num_new += 1
            if self._is_renewing or not (self._has_enough() or (self.steps is not None and self.roles.is_due)):
                return False
            self._is_renewing = True
            return True

    def renew(self, clients: Sequence[ProcessEngineClient], info: EngineInfo) -> None:
        """Fit the times, choose the roles, and tell the engines the limits of their steps."""
        try:
            with self._own:
                steps, seen = self.steps, None
                if self._has_enough():
                    self._num_new, seen = 0, (*self._prompts, *self._decodes)
            if seen is not None:
                features, seconds = zip(*seen, strict=True)
                steps = self.steps = fit(features, seconds).model
            assert steps is not None
            self.roles.learn(lambda *each: steps.seconds(StepFeatures(*each)), self._lock)
            self._limit(clients, info, steps)
        finally:
            with self._own:
                self._is_renewing = False

    def _has_enough(self) -> bool:
        """Whether enough steps are new for another fit."""
        is_enough = len(self._decodes) >= _LEAST_DECODES and len(self._prompts) >= _LEAST_PROMPTS
        return is_enough and (self.steps is None or self._num_new >= _FIT_EVERY)

    def _limit(self, clients: Sequence[ProcessEngineClient], info: EngineInfo, steps: LinearStepModel) -> None:
        with self._lock:
            budgets, seconds, saved_s = list(self.roles.budgets), self.roles.limit_s, self.roles.most_saved_s
        for client, budget in zip(clients, budgets, strict=True):
            has_pictures = info.images is not None  # one that may not be cut must fit a step
            most = info.max_num_batched_tokens if has_pictures else max(budget, info.max_num_seqs)
            client.limit_steps(StepLimit(most, seconds, steps, saved_s))
