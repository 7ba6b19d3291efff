"""The prefix cache's index: a tree of blocks, found by digest and compared token by token.

A ``CachedBlock`` is the content of one block: its own tokens, after those of its parent. Every salt (a tenant's secret)
has a root of its own in each cache group, so nothing is shared across salts or groups. One index maps the digest of
(parent's digest, tokens) to the block; a hit counts only if the parent is the very object that was walked and the token
ids are equal. If two contents have one digest, the second is not recorded.

A content can lie on the device (``block_id``), in the host pool (``host_slot``), in both, or, while a continuation is
kept or may come (``num_pins``), in neither. The last block of a sequence is seldom full; it is kept with the tokens it
has.

Reference counts and the order of eviction belong to the block pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MOST_BRANCHES = 8
"""Latest branches with the same first token that are compared for a partial match: it bounds the time."""

_TOKEN_BYTES = 4


class SaltedPrefixes(NamedTuple):
    """The prefixes of a salt whose tokens are rotated as if they were ``rotary_offset`` positions further on, computed
    with the adapter whose content has this digest; empty for none."""

    salt: str | None
    rotary_offset: int = 0
    adapter: bytes = b""


Salt = str | SaltedPrefixes | None
"""Prefixes are shared within one. None is for no salt, rotated by position, without an adapter."""

Digest = Callable[[int, bytes], int]


def block_digest(parent: int, tokens: bytes) -> int:
    """A 64-bit digest of a block's tokens after its parent's, keyed by the process's secret (SipHash), so that a client
    cannot prepare two prompts that collide."""
    return hash((parent, tokens))


class CachedBlock:
    """The content of one block, a node of the tree.

    parent     the content before it; None for a root
    tokens     its token ids, int32; fewer than ``block_size`` in a sequence's last block; a root's name
    block_id   on the device, or None
    host_slot  in the host pool, or None
    copies     other blocks on the device with this content, each held by a sequence that computed it on its own
    children   its continuations, by their first token
    num_pins   sequences that may record its continuation without holding it (it is outside their window)
    times_reused, last_used  for the eviction policy: how often it was held again after all holders had left, and when
               the last one left
    is_spare   of a state: it is kept inside a prompt, where no other prompt is known to go on, and was not used yet
    twins      of models with states: the nodes of the same prefix in all cache groups, this one included
    stored_key, is_noted  for a store of prefixes: the key of the prefix, once it was made; it lies there, or will soon
    """

    __slots__ = (
        "block_id",
        "children",
        "copies",
        "digest",
        "host_slot",
        "is_noted",
        "is_spare",
        "last_used",
        "num_pins",
        "parent",
        "stored_key",
        "times_reused",
        "tokens",
        "twins",
    )

    def __init__(self, parent: CachedBlock | None, tokens: bytes, digest: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.digest = digest
        self.block_id: int | None = None
        self.host_slot: int | None = None
        self.copies: list[int] = []
        self.children: dict[bytes, dict[CachedBlock, None]] = {}
        self.num_pins = 0
        self.times_reused = 0
        self.last_used = 0
        self.is_spare = False
        self.stored_key = b""
        self.is_noted = False
        self.twins: list[CachedBlock] | tuple[()] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // _TOKEN_BYTES

    @property
    def lies_somewhere(self) -> bool:
        """Whether the content is on the device or the host."""
        return self.block_id is not None or self.host_slot is not None

    @property
    def is_lasting(self) -> bool:
        """Whether the content lies somewhere and is not spare."""
        return self.lies_somewhere and not self.is_spare

    def replay_tokens(self) -> int:
        """The tokens between the last content before this one that lies somewhere and its end: what it costs to compute
        a state again. Spare ones do not count, since they go first."""
        count, node = 0, self
        while node.parent is not None:
            count += node.num_tokens
            siblings = node.parent.children[node.tokens[:_TOKEN_BYTES]] if node.parent.children else ()
            known = [
                other.num_tokens
                for other in siblings
                if other is not node and other.is_lasting and node.tokens.startswith(other.tokens)
            ]
            if known:
                return count - max(known)
            node = node.parent
            if node.is_lasting:
                break
        return count


class PrefixCache:
    """The tree and its index. Not thread-safe: it belongs to the engine's loop."""

    def __init__(
        self, block_size: int, digest: Digest = block_digest, on_change: Callable[[CachedBlock], None] | None = None
    ) -> None:
        """``on_change`` is called with full blocks whose content may have gone (``prune``); the pool calls it for new
        ones."""
        self._block_bytes = block_size * _TOKEN_BYTES
        self.on_change = on_change
        self._digest = digest
        self._index: dict[int, CachedBlock] = {}
        self._roots: dict[bytes, CachedBlock] = {}
        self.lone: list[CachedBlock] = []  # with states: twins of nodes that were dropped, for the pool

    def __len__(self) -> int:
        return len(self._index)

    def root(self, salt: Salt, group: int) -> CachedBlock:
        """The node before all prompts of this salt in a cache group."""
        name = root_name(salt, group)
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = CachedBlock(None, name, self._digest(0, name))
        return root

    def walk(self, tokens: NDArray[np.int32], salt: Salt, group: int) -> list[CachedBlock]:
        """The nodes of the longest prefix of ``tokens [num_tokens]`` that consists of known full blocks, on the device
        or not."""
        nodes: list[CachedBlock] = []
        node = self._roots.get(root_name(salt, group))
        if node is None:
            return nodes
        data, width = np.ascontiguousarray(tokens, np.int32).tobytes(), self._block_bytes
        for end in range(width, len(data) + 1, width):
            child = self._lookup(node, data[end - width : end])
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def longest_partial(
        self, node: CachedBlock | None, tokens: NDArray[np.int32], salt: Salt, group: int, *, on_host: bool = False
    ) -> tuple[CachedBlock, int] | None:
        """The block that continues ``node`` (None for the salt's root) and shares most leading tokens with ``tokens``,
        and how many; of those on the device, and with ``on_host`` those on the host alone, too."""
        node = node or self._roots.get(root_name(salt, group))
        if node is None or not len(tokens):
            return None
        data = np.ascontiguousarray(tokens[: self._block_bytes // _TOKEN_BYTES], np.int32).tobytes()
        best, most = None, 0
        for child in _latest(node, data):
            is_there = child.block_id is not None or (on_host and child.host_slot is not None)
            if is_there and (count := _common_tokens(child.tokens, data)) > most:
                best, most = child, count
        return None if best is None else (best, most)

    def partials(
        self, path: list[CachedBlock], tokens: NDArray[np.int32], salt: Salt, group: int
    ) -> dict[int, CachedBlock]:
        """The partial blocks on the device or the host that continue a node of ``path`` (or the salt's root) and have
        no other tokens than ``tokens``, by the length of the prefix that each ends."""
        root = self._roots.get(root_name(salt, group))
        if root is None:
            return {}
        data, width = np.ascontiguousarray(tokens, np.int32).tobytes(), self._block_bytes
        found: dict[int, CachedBlock] = {}
        for page, node in enumerate([root, *path]):
            following = data[page * width : (page + 1) * width]
            for child in _latest(node, following):
                if child.lies_somewhere and len(child.tokens) < width and following.startswith(child.tokens):
                    found[page * width // _TOKEN_BYTES + child.num_tokens] = child
        return found

    def difference(
        self, node: CachedBlock | None, tokens: NDArray[np.int32], salt: Salt, group: int
    ) -> tuple[int, CachedBlock | None]:
        """How many of the ``tokens`` after ``node`` (None for the salt's root) some content has, wherever it lies, and
        which one: the node itself if no content has any. None if there is none."""
        node = node or self._roots.get(root_name(salt, group))
        if node is None:
            return 0, None
        data = np.ascontiguousarray(tokens[: self._block_bytes // _TOKEN_BYTES], np.int32).tobytes()
        found = [(_common_tokens(child.tokens, data), child) for child in _latest(node, data)] if data else []
        return max(found, key=lambda each: each[0], default=(0, node))

    def following(self, node: CachedBlock, skipped: int, count: int) -> list[int]:
        """At most ``count`` tokens of contents after the first ``skipped`` of ``node``, or, with 0, after it: the
        latest in each place."""
        data = node.tokens[skipped * _TOKEN_BYTES :] if skipped else b""
        while len(data) < count * _TOKEN_BYTES and node.children:
            siblings = next(reversed(node.children.values()))
            node = next(reversed(siblings))
            data += node.tokens
        return [int(token_id) for token_id in np.frombuffer(data[: count * _TOKEN_BYTES], np.int32)]

    def has(self, node: CachedBlock) -> bool:
        """Whether a node is still in the tree."""
        return self._index.get(node.digest) is node

    def next_digests(self, path: list[CachedBlock], tokens: NDArray[np.int32], salt: Salt, group: int) -> Iterator[int]:
        """The digests that the full pages of ``tokens`` after ``path`` would have."""
        data, width = np.ascontiguousarray(tokens, np.int32).tobytes(), self._block_bytes
        digest = path[-1].digest if path else self.root_digest(salt, group)
        for end in range((len(path) + 1) * width, len(data) + 1, width):
            digest = self._digest(digest, data[end - width : end])
            yield digest

    def root_digest(self, salt: Salt, group: int) -> int:
        """The digest of ``root``."""
        return self._digest(0, root_name(salt, group))

    def add(self, parent: CachedBlock, tokens: bytes) -> CachedBlock | None:
        """The node of these tokens after ``parent``, made if it is new; None if another content has its digest."""
        found = self.add_each([parent], tokens)
        return found[0] if found else None

    def add_each(self, parents: Sequence[CachedBlock], tokens: bytes) -> list[CachedBlock]:
        """``add`` after each of these parents, without those where another content has the digest."""
        index, make_digest, found, first = self._index, self._digest, list[CachedBlock](), tokens[:_TOKEN_BYTES]
        for parent in parents:
            digest = make_digest(parent.digest, tokens)
            node = index.get(digest)
            if node is None:
                node = index[digest] = CachedBlock(parent, tokens, digest)
                siblings = parent.children.get(first)
                if siblings is None:
                    parent.children[first] = {node: None}
                else:
                    siblings[node] = None
            elif node.parent is not parent or node.tokens != tokens:
                continue
            found.append(node)
        return found

    def continued_by(self, parent: CachedBlock, tokens: bytes) -> CachedBlock | None:
        """A block on the device after ``parent`` that begins with ``tokens``."""
        for child in _latest(parent, tokens):
            if child.block_id is not None and child.tokens.startswith(tokens):
                return child
        return None

    def ends_inside(self, node: CachedBlock, tokens: bytes) -> bool:
        """Whether a content after ``node`` lies somewhere that has only the first of ``tokens``."""
        siblings = node.children.get(tokens[:_TOKEN_BYTES], ())
        return any(child.lies_somewhere and tokens.startswith(child.tokens) for child in siblings)

    def beginnings_of(self, node: CachedBlock) -> list[CachedBlock]:
        """Partial blocks beside ``node`` that hold only its first tokens."""
        assert node.parent is not None
        if len(node.parent.children[node.tokens[:_TOKEN_BYTES]]) == 1:
            return []
        return [
            other
            for other in _latest(node.parent, node.tokens)
            if other is not node and node.tokens.startswith(other.tokens)
        ]

    def prune(self, node: CachedBlock) -> None:
        """Drop a node that is neither stored nor continued, and its ancestors that are then bare."""
        self.changed(node)
        while node.block_id is None and node.host_slot is None and not node.children and not node.num_pins:
            parent = node.parent
            if parent is None:
                self._roots.pop(node.tokens, None)
                return
            del self._index[node.digest]
            if node.twins:
                self.lone += node.twins
                node.twins = ()
            first = node.tokens[:_TOKEN_BYTES]
            siblings = parent.children[first]
            del siblings[node]
            if not siblings:
                del parent.children[first]
            node = parent

    def changed(self, node: CachedBlock) -> None:
        """Report that a content may have been cached or evicted."""
        if self.on_change is not None and node.parent is not None and len(node.tokens) == self._block_bytes:
            self.on_change(node)

    def group_of(self, node: CachedBlock) -> int:
        """The cache group whose tree the node is in. For tests: O(depth)."""
        while node.parent is not None:
            node = node.parent
        return int(node.tokens.split(b" ")[0])

    def check_invariants(self) -> None:
        """Assert that index and tree are the same set of nodes, none of them useless. For tests: O(nodes)."""
        seen = 0
        stack = list(self._roots.values())
        assert all(root.children for root in stack), "a root without children was kept"
        while stack:
            node = stack.pop()
            for first, siblings in node.children.items():
                assert siblings, "an empty branch was kept"
                for child in siblings:
                    assert child.parent is node, "a node hangs below another than its parent"
                    assert child.tokens[:_TOKEN_BYTES] == first, "a node stands under another first token"
                    assert self._index.get(child.digest) is child, "a node is not indexed"
                    is_full = len(child.tokens) == self._block_bytes
                    assert is_full or not child.children, "a partial block is continued"
                    is_kept = child.lies_somewhere or child.children or child.num_pins
                    assert is_kept, "a node is kept for nothing"
                    seen += 1
                    stack.append(child)
        assert seen == len(self._index), "the index knows nodes that the tree has not"

    def _lookup(self, parent: CachedBlock, tokens: bytes) -> CachedBlock | None:
        node = self._index.get(self._digest(parent.digest, tokens))
        return node if node is not None and node.parent is parent and node.tokens == tokens else None


def root_name(salt: Salt, group: int) -> bytes:
    name = b"%d" % group
    if isinstance(salt, SaltedPrefixes):
        if salt.rotary_offset:
            name += b" rotated %d" % salt.rotary_offset
        if salt.adapter:
            name += b" adapter %s" % salt.adapter.hex().encode()
        salt = salt.salt
    return name if salt is None else b"%s salt %s" % (name, salt.encode())


def _latest(node: CachedBlock, tokens: bytes) -> list[CachedBlock]:
    """The latest children of ``node`` that share the first of ``tokens``."""
    siblings = node.children.get(tokens[:_TOKEN_BYTES])
    return list(islice(reversed(siblings), _MOST_BRANCHES)) if siblings else []


def _common_tokens(left: bytes, right: bytes) -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length // _TOKEN_BYTES
    count = length // _TOKEN_BYTES
    return int(np.argmax(np.frombuffer(left, np.int32, count) != np.frombuffer(right, np.int32, count)))
