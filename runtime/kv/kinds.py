"""Kinds of cache: which pages of a sequence a layer still needs, and which prefixes can be cached.

Layers of one kind share block tables (`runtime.kv.groups`). The scheduler, the block pool, the prefix tree and the
router use only this interface. A new kind is a class here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec


class CacheKind(msgspec.Struct, frozen=True):
    """The part of a sequence that a layer keeps, in pages of ``block_size`` tokens; here all of it.

    Attributes:
        is_whole: a sequence holds the pages of all its tokens from its start to its end. With other kinds it gets the
            pages of each chunk, and gives up those that are no longer needed.
        follows_tokens: page i holds the tokens from ``i * block_size`` on.
    """

    is_whole: ClassVar[bool] = True
    follows_tokens: ClassVar[bool] = True

    def table_pages(self, num_tokens: int, block_size: int) -> int:
        """The length of a running sequence's block table, if so many of its tokens have pages."""
        return -(-num_tokens // block_size)

    def stored_pages(self, num_tokens: int, block_size: int) -> int:
        """How many entries of the table hold the content of the first ``num_tokens`` tokens."""
        return -(-num_tokens // block_size)

    def first_page(self, num_tokens: int, block_size: int) -> int:
        """The first page that the token after ``num_tokens``, or any later one, needs."""
        return 0

    def gives_up_at(self, page: int, block_size: int) -> int:
        """The fewest tokens after which the page is not needed; ``sys.maxsize`` if it is always needed."""
        return sys.maxsize

    def most_pages(self, num_tokens: int, block_size: int, chunk: int | None) -> int:
        """The most pages that a sequence of so many tokens needs at once, with at most ``chunk`` of them computed in a
        step, or all in one for None."""
        return -(-num_tokens // block_size)

    def reserved_tokens(self, remaining: int) -> int:
        """How many of a prompt's ``remaining`` tokens need further pages before any is given up."""
        return 0

    def findable_pages(self, path: Sequence[bool], most: int, block_size: int) -> int:
        """The longest prefix, of at most ``most`` pages, that can be continued from the stored pages: ``path`` has for
        each page whether it is stored."""
        return next((page for page, is_stored in enumerate(path[:most]) if not is_stored), min(most, len(path)))


class Full(CacheKind, frozen=True, tag="full"):
    """Full attention: a query sees all tokens before it."""


class Window(CacheKind, frozen=True, tag="window"):
    """Sliding-window attention: a query sees the last ``tokens``, its own included."""

    tokens: int
    is_whole: ClassVar[bool] = False

    def first_page(self, num_tokens: int, block_size: int) -> int:
        return 0 if num_tokens < self.tokens else (num_tokens - self.tokens + 1) // block_size

    def gives_up_at(self, page: int, block_size: int) -> int:
        return (page + 1) * block_size + self.tokens - 1

    def most_pages(self, num_tokens: int, block_size: int, chunk: int | None) -> int:
        pages = -(-num_tokens // block_size)
        if chunk is None:
            return pages
        return min(pages, (self.tokens + chunk - 1 + block_size - 2) // block_size + 1)  # first and last in part

    def reserved_tokens(self, remaining: int) -> int:
        return min(remaining, self.tokens)

    def findable_pages(self, path: Sequence[bool], most: int, block_size: int) -> int:
        best, count = 0, 0  # consecutive stored pages
        for pages, is_stored in enumerate(path[:most], 1):
            count = count + 1 if is_stored else 0
            if count >= pages - self.first_page(pages * block_size, block_size):
                best = pages
        return best


class State(CacheKind, frozen=True, tag="state"):
    """A recurrent state: one page, whatever the number of tokens.

    A sequence has two, since a step that is planned ahead may count for nothing: each chunk reads entry 1 of the block
    table, the state before its first token (unused for a sequence's first chunk), and writes the state after its last
    one to entry 0. A stored prefix can be continued only where a state was kept: at the scheduler's
    checkpoints, where a chunk of a prompt crosses a multiple of 8,192
    tokens, and after the last token of a sequence that ended or was preempted.
    """

    is_whole: ClassVar[bool] = False
    follows_tokens: ClassVar[bool] = False

    def table_pages(self, num_tokens: int, block_size: int) -> int:
        return 2

    def stored_pages(self, num_tokens: int, block_size: int) -> int:
        return min(num_tokens, 1)

    def most_pages(self, num_tokens: int, block_size: int, chunk: int | None) -> int:
        return 2

    def findable_pages(self, path: Sequence[bool], most: int, block_size: int) -> int:
        """All, for a router: most states lie inside a page, and an engine keeps no page without a state after it. The
        engine's own block pool looks for the states."""
        return min(most, len(path))


AnyKind = Full | Window | State
"""Every kind, by its name in messages between processes."""

FULL = Full()


def kind_of_window(window: int | None) -> AnyKind:
    """The kind of layers with this attention window in tokens, or None for full attention."""
    return FULL if window is None else Window(window)


def window_of(kind: CacheKind) -> int | None:
    """The inverse, for configurations and reports."""
    return kind.tokens if isinstance(kind, Window) else None


def has_states(kinds: Iterable[CacheKind]) -> bool:
    """Whether some layers hold a state instead of keys and values."""
    return not all(kind.follows_tokens for kind in kinds)


def blocks_of_sequence(num_tokens: int, kinds: Sequence[CacheKind], block_size: int, *, chunk: int | None = 1) -> int:
    """Most blocks that a sequence of so many tokens needs at once, over all cache groups, with at most ``chunk`` of its
    tokens computed in a step (all in one for None)."""
    return sum(kind.most_pages(num_tokens, block_size, chunk) for kind in kinds)


def findable_pages(paths: Sequence[Sequence[bool]], kinds: Sequence[CacheKind], block_size: int) -> int:
    """The longest prefix, in pages, that all cache groups have. ``paths``: by group and page, whether its content is
    stored."""
    most = min(map(len, paths))
    while True:
        found = most
        for path, kind in zip(paths, kinds):
            found = kind.findable_pages(path, found, block_size)
        if found == most:
            return most
        most = found
