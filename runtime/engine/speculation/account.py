"""What trying proposals may cost: an account in seconds, and one of what it costs to set a width up."""

from __future__ import annotations

ALLOWANCE = 0.0075
"""Of the time of steps without proposals that trying may cost: what it gains pays for more."""

SETUP_ALLOWANCE = 0.0025
"""The same for the first step of a shape, which notes down what later ones replay: for a small model it takes as long
as dozens of steps."""

FADING, LEAST_SHARE = 0.85, 0.25
"""What is left of the allowance after each step with proposals that lost time, and at least; all of it is back when one
gains. Where proposals never pay, trying them again and again does not either."""

MOST_STEPS = 2.0
"""Steps with the most proposals whose time may be lost when what did pay does so no more."""

GAINS = 2.0
"""So many times as much may be lost of what was gained: where proposals pay, a few bad ones do not end them."""

MOST_SETUP_STEPS = 100.0
"""Steps without proposals that a first step may have taken: the machine may have slept."""

CREDIT_STEPS = 2.0
"""Steps without proposals whose time may be lost at first, before the allowance has grown."""


class TrialAccount:
    """Each step without proposals pays in a share of its time, each with them what it was faster than the same tokens
    without, or takes out what it was slower. What the first step of a shape loses is paid for apart, when it is known:
    by half of what is gained as long as those before are not paid for.

    balance_s  what steps with proposals may be slower; None: no step is known
    setup_s    below zero while first steps of shapes are not paid for
    """

    def __init__(self) -> None:
        self.balance_s: float | None = None
        self.setup_s = 0.0
        self._limit_s = 0.0
        self._share = 1.0  # of the allowance
        self._fading = FADING

    def bound(self, plain_s: float, longest_s: float, num_steps: int = 1) -> None:
        """A step without proposals takes so long, one with the most of them so long; so many of these are tried at
        least."""
        self._limit_s = MOST_STEPS * longest_s * num_steps
        self._fading = FADING ** (1.0 / num_steps)
        if self.balance_s is None:
            self.balance_s = max(CREDIT_STEPS, float(num_steps)) * plain_s
        self._keep(self.balance_s)  # times were wrong, or others

    def allows(self, loss_s: float) -> bool:
        """Whether a step may lose so much."""
        return self.balance_s is not None and loss_s <= self.balance_s

    @property
    def is_full(self) -> bool:
        """Whether little of what trying may cost has been spent of late."""
        return self.balance_s is not None and self.balance_s >= 0.25 * self._limit_s

    @property
    def allows_setup(self) -> bool:
        """Whether a step may be the first of its shape: what that takes is known afterwards."""
        return self.setup_s >= 0.0

    def earn(self, plain_s: float, num_steps: int = 1) -> None:
        """Steps without proposals."""
        if self.balance_s is not None:
            seconds = plain_s * num_steps
            if self.balance_s < self._limit_s:
                self.balance_s = min(self.balance_s + ALLOWANCE * self._share * seconds, self._limit_s)
            self.setup_s = min(self.setup_s + SETUP_ALLOWANCE * seconds, self._limit_s)

    def settle(self, gained_s: float) -> None:
        """A step with proposals was faster by so much than its tokens without."""
        if self.balance_s is not None:
            self._share = 1.0 if gained_s > 0.0 else max(LEAST_SHARE, self._fading * self._share)
            if gained_s > 0.0 and self.setup_s < 0.0:
                self.setup_s = min(self.setup_s + 0.5 * gained_s, self._limit_s)
                gained_s *= 0.5
            self._keep(self.balance_s + gained_s)

    def _keep(self, balance_s: float) -> None:
        self.balance_s = min(max(balance_s, -self._limit_s), GAINS * self._limit_s)

    def set_up(self, excess_s: float, plain_s: float) -> None:
        """The first step of a shape took so much longer than its tokens without. No more than `MOST_SETUP_STEPS` is
        believed."""
        self.setup_s -= min(max(0.0, excess_s), MOST_SETUP_STEPS * plain_s)
