"""Groups of layers that share a block table.

A group holds layers of one kind (`runtime.kv.kinds`) and one form of page (`runtime.kv.forms`). A block is one page for
every layer of one group. Groups of one form have equally many layers (some get padding), so that a block of any of them
takes the same bytes and they share a pool, as in vLLM's hybrid KV cache manager. Each form of page has a pool.

A sequence has a list of blocks a group, indexed by page: page i holds the tokens from ``i * block_size`` on. Pages that
later queries do not need are given up; their entries become ``NO_BLOCK``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        layers: of the model, ascending. ``layers[i]`` lies in the i-th storage of the group's pool.
        num_padding: storages without a layer of this group.
        pool: whose blocks the group takes.
    """

    kind: AnyKind
    layers: tuple[int, ...]
    num_padding: int
    pool: int = 0


def cut_layers(layer_kinds: Sequence[AnyKind | None], forms: Sequence[object] = ()) -> tuple[CacheGroup, ...]:
    """The groups of layers of these kinds (None for one without pages), those that keep all tokens first.

    Layers whose pages have equal ``forms`` (empty: all of them) share a pool, and have groups of one size: the one with
    the fewest bytes for a sequence of four windows, where each further group counts as 2 % more for the scheduler's
    time. The layers of one kind are dealt out in turn, so that the i-th layers of all groups have about the same depth
    in the model.
    """
    of_forms: dict[object, dict[AnyKind, list[int]]] = {}
    for layer, kind in enumerate(layer_kinds):
        if kind is not None:
            of_forms.setdefault(forms[layer] if forms else None, {}).setdefault(kind, []).append(layer)
    groups = [
        CacheGroup(kind, chosen, size - len(chosen), pool)
        for pool, kinds in enumerate(of_forms.values())
        for size in (_size_of_groups(kinds),)
        for kind, layers in kinds.items()
        for count in (-(-len(layers) // size),)
        for chosen in (tuple(layers[index::count]) for index in range(count))
    ]
    groups.sort(key=lambda group: (not group.kind.is_whole, window_of(group.kind) or 0))
    numbers: dict[int, int] = {}  # of pools, by their first group
    return tuple(replace(group, pool=numbers.setdefault(group.pool, len(numbers))) for group in groups)


def _size_of_groups(kinds: dict[AnyKind, list[int]]) -> int:
    def cost(size: int) -> float:
        counts = {kind: -(-len(layers) // size) for kind, layers in kinds.items()}
        weights = (count * size * (_LENGTH_IN_WINDOWS if kind.is_whole else 1) for kind, count in counts.items())
        return sum(weights) * (1 + _SHARE_A_GROUP * sum(counts.values()))

    return min(range(max(map(len, kinds.values())), 0, -1), key=cost)  # the largest on a tie


def of_layers(groups: tuple[CacheGroup, ...], layers: range) -> tuple[CacheGroup, ...]:
    """The same groups with these layers alone, those of a pipeline's stage: block tables are the whole model's."""
    own = [tuple(layer for layer in group.layers if layer in layers) for group in groups]
    sizes: dict[int, int] = {}  # of each pool's groups
    for group, chosen in zip(groups, own, strict=True):
        sizes[group.pool] = max(sizes.get(group.pool, 0), len(chosen))
    return tuple(
        replace(group, layers=chosen, num_padding=sizes[group.pool] - len(chosen))
        for group, chosen in zip(groups, own, strict=True)
    )
