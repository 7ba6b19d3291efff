"""The facts that two engines must share for pages of one to be those of the other to the bit."""

from __future__ import annotations

from typing import NamedTuple

from runtime.errors import XservError


class TransferError(XservError):
    """Pages did not come: the peer is gone, refuses, or sent something else."""


class RefusedError(TransferError):
    """The peer does not want to give them: a client that named it has named the wrong one."""


class MismatchError(RefusedError):
    """The peer's pages would have other bits, or another form."""


class Identity(NamedTuple):
    """All that two engines must agree on.

    facts       by name, for messages
    fingerprint see `runtime.engine.fingerprint`
    page_bytes  by pool: bytes of each plane's page
    """

    facts: dict[str, str]
    fingerprint: str
    page_bytes: list[list[int]]

    def check(self, other: Identity) -> None:
        """Raises `MismatchError` with both sides' words."""
        names = dict.fromkeys((*self.facts, *other.facts))
        differing = [name for name in names if self.facts.get(name) != other.facts.get(name)]
        words = [f"{name} is {self.facts.get(name)} here and {other.facts.get(name)} there" for name in differing]
        if not words and self.page_bytes != other.page_bytes:
            words = [f"pages have {self.page_bytes} bytes here and {other.page_bytes} there"]
        if not words and self.fingerprint != other.fingerprint:
            ours, theirs = self.fingerprint[:12], other.fingerprint[:12]
            words = [f"the files of the model or the program differ: their digest is {ours} here and {theirs} there"]
        if words:
            raise MismatchError(f"the engines' pages are not alike: {'; '.join(words)}")
