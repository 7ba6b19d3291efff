"""Groups of layers that share a block table.

A group holds layers of one kind (`runtime.kv.kinds`). A block is one page for every layer of one group. The groups of a
model have equally many layers (some get padding), so that a block of any group takes the same bytes and all groups draw
on one pool, as in vLLM's hybrid KV cache manager.

A sequence has a list of blocks a group, indexed by page: page i holds the tokens from ``i * block_size`` on. Pages that
later queries do not need are given up; their entries become ``NO_BLOCK``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.kv.kinds import AnyKind, window_of

NO_BLOCK = 0
"""Entry of a page that was given up: an existing block, so that tables can be copied; kernels ignore what they read
there."""

_LENGTH_IN_WINDOWS = 4
_SHARE_A_GROUP = 0.02


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table.

    Attributes:
        kind: of all layers.
        layers: of the model, ascending. ``layers[i]`` lies in the i-th storage of the cache.
        num_padding: storages without a layer of this group.
    """

    kind: AnyKind
    layers: tuple[int, ...]
    num_padding: int


def cut_layers(layer_kinds: Sequence[AnyKind]) -> tuple[CacheGroup, ...]:
    """The groups of layers of these kinds, those that keep all tokens first.

    Their size is the one with the fewest bytes for a sequence of four windows, where each further group counts as 2 %
    more for the scheduler's time. The layers of one kind are dealt out in turn, so that the i-th layers of all groups
    have about the same depth in the model.
    """
    kinds: dict[AnyKind, list[int]] = {}
    for layer, kind in enumerate(layer_kinds):
        kinds.setdefault(kind, []).append(layer)

    def cost(size: int) -> float:
        counts = {kind: -(-len(layers) // size) for kind, layers in kinds.items()}
        weights = (count * size * (_LENGTH_IN_WINDOWS if kind.is_whole else 1) for kind, count in counts.items())
        return sum(weights) * (1 + _SHARE_A_GROUP * sum(counts.values()))

    size = min(range(max(map(len, kinds.values())), 0, -1), key=cost)  # the largest on a tie
    groups = []
    for kind in sorted(kinds, key=lambda kind: (not kind.is_whole, window_of(kind) or 0)):
        layers = kinds[kind]
        count = -(-len(layers) // size)
        for index in range(count):
            chosen = tuple(layers[index::count])
            groups.append(CacheGroup(kind, chosen, size - len(chosen)))
    return tuple(groups)


def of_layers(groups: tuple[CacheGroup, ...], layers: range) -> tuple[CacheGroup, ...]:
    """The same groups with these layers alone, those of a pipeline's stage: block tables are the whole model's."""
    own = [tuple(layer for layer in group.layers if layer in layers) for group in groups]
    size = max(map(len, own))
    return tuple(CacheGroup(group.kind, chosen, size - len(chosen)) for group, chosen in zip(groups, own, strict=True))
