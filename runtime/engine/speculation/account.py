"""What trying proposals may cost: an account in seconds."""

from __future__ import annotations

ALLOWANCE = 0.008
"""Of the time of steps without proposals that trying may cost: what it gains pays for more."""

CREDIT_S = 0.02
"""What may be lost at first, before the allowance has grown: a few first steps of shapes and some of their kind, where
steps are short."""

MOST_STEPS = 2.0
"""The same where steps are long, in steps with as many proposals as are tried first. And the debt that is remembered,
in steps with the most."""

GAINS = 2.0
"""So many times as much as that debt may be lost of what was gained: where proposals pay, a few bad ones do not end
them."""

MOST_SETUP_STEPS = 100.0
"""Steps without proposals that a first step is believed to have taken: the machine may have slept."""

_SETUP_FADING = 0.5


class TrialAccount:
    """Each step without proposals pays in a share of its time, each with them what it was faster than the same tokens
    without, or takes out what it was slower. The first step of a shape notes down what later ones replay; for a small
    model that takes as long as dozens of steps.

    balance_s  what steps with proposals may be slower; None: no step is known
    setup_s    what the first step of a shape is thought to lose
    """

    def __init__(self) -> None:
        self.balance_s: float | None = None
        self.setup_s = 0.0
        self._credit_s = self._debt_s = 0.0

    def bound(self, first_s: float, longest_s: float) -> None:
        """A step with as many proposals as are tried first takes so long, and one with the most."""
        self._credit_s = max(CREDIT_S, MOST_STEPS * first_s)
        self._debt_s = max(CREDIT_S, MOST_STEPS * longest_s)
        self._keep(self._credit_s if self.balance_s is None else self.balance_s)  # times were wrong, or others

    def allows(self, loss_s: float, *, is_first: bool = False) -> bool:
        """Whether steps may lose so much, and what the first of a shape takes."""
        return self.balance_s is not None and loss_s + (self.setup_s if is_first else 0.0) <= self.balance_s

    def earn(self, plain_s: float, num_steps: int = 1) -> None:
        """Steps without proposals."""
        if self.balance_s is not None and self.balance_s < self._credit_s:
            self.balance_s = min(self.balance_s + ALLOWANCE * plain_s * num_steps, self._credit_s)

    def settle(self, gained_s: float) -> None:
        """A step with proposals was faster by so much than its tokens without."""
        if self.balance_s is not None:
            self._keep(self.balance_s + gained_s)

    def set_up(self, excess_s: float, plain_s: float) -> None:
        """The first step of a shape took so much longer than its tokens without."""
        excess_s = min(max(0.0, excess_s), MOST_SETUP_STEPS * plain_s)
        self.setup_s = excess_s if self.setup_s == 0.0 else self.setup_s + _SETUP_FADING * (excess_s - self.setup_s)
        self.settle(-excess_s)

    def _keep(self, balance_s: float) -> None:
        self.balance_s = min(max(balance_s, -self._debt_s), GAINS * self._debt_s)
