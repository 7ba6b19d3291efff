"""Groups of layers that share a block table, and the pages that a window leaves behind.

A group holds layers of one kind: all of its layers see every token, or all see the same window of the last ones. A
block is one page for every layer of one group. The groups of a model have equally many layers (some get padding), so
that a block of any group takes the same bytes and all groups draw on one pool. This is how vLLM's hybrid manager cuts
them.

A sequence has a list of blocks a group, indexed by page: page i holds the tokens from ``i * block_size`` on. Pages that
lie behind the window of all queries to come are given up; their entries become ``NO_BLOCK``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

NO_BLOCK = 0
"""Entry of a page that was given up: a block that exists, so that tables can be copied; no kernel uses what it reads
there."""

_LENGTH_IN_WINDOWS = 4
_SHARE_A_GROUP = 0.02


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table.

    Attributes:
        window: tokens that a query sees, its own included; None: all.
        layers: of the model, ascending. Layer ``layers[i]`` lies in the i-th storage of the cache.
        num_padding: storages that hold no layer of this group.
    """

    window: int | None
    layers: tuple[int, ...]
    num_padding: int


def cut_layers(layer_windows: tuple[int | None, ...]) -> tuple[CacheGroup, ...]:
    """The groups of layers with these windows, those that see all tokens first.

    Their size is the one with the fewest bytes for a sequence of four windows, where each further group counts as 2 %
    more, since it costs the scheduler time. The layers of one kind are dealt out in turn, so that all groups come to
    their i-th layers at about the same depth of the model.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        kinds.setdefault(window, []).append(layer)

    def cost(size: int) -> float:
        counts = {window: -(-len(layers) // size) for window, layers in kinds.items()}
        weights = (count * size * (_LENGTH_IN_WINDOWS if window is None else 1) for window, count in counts.items())
        return sum(weights) * (1 + _SHARE_A_GROUP * sum(counts.values()))

    size = min(range(max(map(len, kinds.values())), 0, -1), key=cost)  # of equals the largest
    groups = []
    for window in sorted(kinds, key=lambda window: (window is not None, window or 0)):
        layers = kinds[window]
        count = -(-len(layers) // size)
        for index in range(count):
            chosen = tuple(layers[index::count])
            groups.append(CacheGroup(window, chosen, size - len(chosen)))
    return tuple(groups)


def of_layers(groups: tuple[CacheGroup, ...], layers: range) -> tuple[CacheGroup, ...]:
    """The same groups with these layers alone, those of a pipeline's stage: block tables are the whole model's."""
    own = [tuple(layer for layer in group.layers if layer in layers) for group in groups]
    size = max(map(len, own))
    return tuple(
        CacheGroup(group.window, chosen, size - len(chosen)) for group, chosen in zip(groups, own, strict=True)
    )


def first_page(num_tokens: int, window: int | None, block_size: int) -> int:
    """The first page that the token after ``num_tokens``, or any later one, can see."""
    return 0 if window is None or num_tokens < window else (num_tokens - window + 1) // block_size


def num_tokens_past(page: int, window: int | None, block_size: int) -> int:
    """The fewest tokens behind which nothing can see the page; ``sys.maxsize`` without a window."""
    return sys.maxsize if window is None else (page + 1) * block_size + window - 1


def blocks_of_sequence(
    num_tokens: int, windows: tuple[int | None, ...], block_size: int, *, chunk: int | None = 1
) -> int:
    """Most blocks that a sequence of so many tokens needs at once, over all groups, where at most ``chunk`` of its
    tokens are computed in a step (None: all in one)."""
    pages = -(-num_tokens // block_size)
    total = 0
    for window in windows:
        if window is None or chunk is None:
            total += pages
        else:  # the first of them and the last may be seen in part
            total += min(pages, (window + chunk - 1 + block_size - 2) // block_size + 1)
    return total
