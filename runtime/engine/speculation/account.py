"""Bounds the cost of trying draft tokens: an account in seconds."""

from __future__ import annotations

ALLOWANCE = 0.008
"""Fraction of the time of plain steps that trials may cost; gains pay for more."""

CREDIT_S = 0.02
"""Initial credit, before the allowance has grown: some first steps of shapes and a few repeats, if steps are short."""

MOST_STEPS = 2.0
"""The same if steps are long, in steps of the first draft length to be tried; and the highest remembered debt, in steps
of the highest."""

GAINS = 2.0
"""Upper limit of the balance, as a multiple of that debt: if speculation pays, a few bad steps do not end it."""

MOST_SETUP_STEPS = 100.0
"""Upper limit of a first step's time, in plain steps: the machine may have slept."""

_SETUP_FADING = 0.5


class TrialAccount:
    """Each plain step pays in a fraction of its time; each step with drafts pays in the time it saved over plain steps
    for the same tokens, or takes out the loss. The first step of a shape records graphs for later ones; for a small
    model that takes as long as dozens of steps.

    balance_s  how much slower steps with drafts may be, or None while no step is known
    setup_s    the estimated loss of the first step of a shape
    """

    def __init__(self) -> None:
        self.balance_s: float | None = None
        self.setup_s = 0.0
        self._credit_s = self._debt_s = 0.0

    def bound(self, first_s: float, longest_s: float) -> None:
        """Set the time of a step of the first draft length to be tried, and of the highest."""
        self._credit_s = max(CREDIT_S, MOST_STEPS * first_s)
        self._debt_s = max(CREDIT_S, MOST_STEPS * longest_s)
        self._keep(self._credit_s if self.balance_s is None else self.balance_s)  # the times have changed

    def allows(self, loss_s: float, *, is_first: bool = False) -> bool:
        """Whether steps may lose so much, plus the setup if it is the first of its shape."""
        return self.balance_s is not None and loss_s + (self.setup_s if is_first else 0.0) <= self.balance_s

    def earn(self, plain_s: float, num_steps: int = 1) -> None:
        """Credit plain steps."""
        if self.balance_s is not None and self.balance_s < self._credit_s:
            self.balance_s = min(self.balance_s + ALLOWANCE * plain_s * num_steps, self._credit_s)

    def settle(self, gained_s: float) -> None:
        """Credit (or debit) a step with drafts that was faster by so much than plain steps for its tokens."""
        if self.balance_s is not None:
            self._keep(self.balance_s + gained_s)

    def set_up(self, excess_s: float, plain_s: float) -> None:
        """Record that the first step of a shape took so much longer than plain steps for its tokens."""
        excess_s = min(max(0.0, excess_s), MOST_SETUP_STEPS * plain_s)
        self.setup_s = excess_s if self.setup_s == 0.0 else self.setup_s + _SETUP_FADING * (excess_s - self.setup_s)
        self.settle(-excess_s)

    def _keep(self, balance_s: float) -> None:
        self.balance_s = min(max(balance_s, -self._debt_s), GAINS * self._debt_s)
