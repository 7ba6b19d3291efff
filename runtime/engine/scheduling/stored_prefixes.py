"""Prefixes that are kept in a `PageStore` beside the device: pages and states are written there once their sequence has
ended, and read back when a prompt begins with them.

A page's key is a hash of the store's root, its salt, and all tokens up to its end, with pictures by their digests; the
tokens are stored beside it and compared. What is read lies in blocks of the pool, as if a sequence with that prefix had
just ended, so that the rest of the engine need not know of the store.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine.scheduling.block_events import with_pictures
from runtime.engine.scheduling.block_pool import BlockPool, Chain, by_page
from runtime.engine.scheduling.prefix_cache import CachedBlock, Salt, root_name
from runtime.engine.scheduling.sequence import Sequence as Choice
from runtime.kv.groups import NO_BLOCK
from runtime.kv.kinds import findable_pages
from runtime.kv.page_store import Fill, PageLostError, PageName, PageRun, PageStore

logger = logging.getLogger("xserv.engine")

_STEP_BYTES = 4 << 20
"""Bytes that are copied after a step, for the writer; about a millisecond."""

_FILE_BYTES = 32 << 20
"""Bytes of pages in one file, about."""


class BlockBytes(Protocol):
    """Reads and writes blocks from the host: `runtime.kv.page_bytes.PageBytes`."""

    page_bytes: list[list[int]]
    is_ordered: bool

    def copy_out(self, pool: int, block_ids: Sequence[int]) -> list[NDArray[np.uint8]]: ...

    def fill(self, pool: int, block_id: int, num_blocks: int, read: Fill) -> None: ...


class _Wanted(NamedTuple):
    """The longest prefix that tree and store have together.

    num_known   the tokens that the pool has
    blocks      by group and page from ``first_pages`` on: the block, or the key of a stored page
    states      by group of states: the same of the state
    """

    num_tokens: int
    num_known: int
    first_pages: list[int]
    blocks: list[list[int | bytes]]
    states: dict[int, int | bytes]


class StoredPrefixes:
    """A block pool's part in a `PageStore`. Belongs to the engine's loop.

    num_restored  tokens of prefixes that were read back
    num_written   pages that were handed to the store
    """

    def __init__(
        self,
        pool: BlockPool,
        pages: BlockBytes,
        store: PageStore,
        fingerprint: str,
        picture_of: Callable[[int], bytes | None] | None = None,
    ) -> None:
        self._fingerprint = fingerprint.encode()
        self.num_restored = self.num_written = 0
        self._pool, self._pages, self._store = pool, pages, store
        self._picture_of = picture_of
        self._waiting: deque[tuple[int, CachedBlock]] = deque()  # group and content: to be written

    @property
    def is_ordered(self) -> bool:
        """Whether prefixes may be read back while a step runs."""
        return self._pages.is_ordered

    def note(self, sequence: Choice) -> None:
        """A sequence's pages are recorded, and about to be released: those that are new are written soon."""
        states = self._pool.states
        for group, last in enumerate(sequence.chain.nodes):
            found: list[CachedBlock] = []
            node: CachedBlock | None = last
            while node is not None and node.parent is not None and (states or not node.is_noted):
                found.append(node)
                node = node.parent
            if states:
                inside = [
                    child
                    for each in (*found, node)
                    if each is not None
                    for siblings in each.children.values()
                    for child in siblings
                    if child.num_tokens < self._pool.block_size
                ]
                found = [*inside, *found]
            for each in reversed(found):
                if each.block_id is not None and not each.is_noted and not each.is_spare:
                    each.is_noted = True
                    self._waiting.append((group, each))
        if len(self._waiting) > 2 * self._pool.num_blocks:  # the disk is full, or slower than the work
            self._drop_evicted()

    def _drop_evicted(self) -> None:
        """Forget noted contents that have no block any more."""
        for _, node in self._waiting:
            node.is_noted = node.block_id is not None
        self._waiting = deque(each for each in self._waiting if each[1].is_noted)

    def write_some(self, *, is_idle: bool = False) -> None:
        """Copy noted pages for the writer: few after a step, all of them when there is no work."""
        while self._waiting and self._store.has_room:
            self._write_batch(_FILE_BYTES if is_idle else _STEP_BYTES)
            if not is_idle:
                return

    @property
    def num_waiting(self) -> int:
        """Contents that are noted and not handed to the store."""
        return len(self._waiting)

    def close(self) -> None:
        """Write as much of what is noted as the store takes at once, and wait for it."""
        self.write_some(is_idle=True)
        self._store.close()

    def _write_batch(self, most_bytes: int) -> None:
        """Hand the next pages of one pool to the store."""
        pool, names, block_ids, num_bytes = self._pool, list[PageName](), list[int](), 0
        number = pool.pools[self._waiting[0][0]]
        while self._waiting and pool.pools[self._waiting[0][0]] == number and num_bytes < most_bytes:
            group, node = self._waiting.popleft()
            if node.block_id is None:  # evicted since
                node.is_noted = False
                continue
            name = self._name_of(node, group)
            if name is not None and self._store.find(name.key) is None:
                names.append(name)
                block_ids.append(node.block_id)
                num_bytes += sum(self._pages.page_bytes[number])
        if names:
            self._store.write(number, names, self._pages.copy_out(number, block_ids))
            self.num_written += len(names)

    def restore(self, sequence: Choice, num_running: int) -> None:
        """Read the pages of a waiting sequence's prefix that the store has and the pool has not into free blocks, if
        there are enough of them and one more for each of ``num_running`` sequences."""
        pool, salt = self._pool, sequence.chain.salt
        tokens = np.ascontiguousarray(sequence.prefix_keys(0, sequence.num_tokens - 1), np.int32)
        self._store.refresh()
        wanted = self._find(tokens, salt)
        if wanted is None:
            return
        shared = [each for each in self._all(wanted) if isinstance(each, int)]
        pool.share(shared)
        needed = pool.by_pool(
            sum(isinstance(each, bytes) for each in ids) + isinstance(wanted.states.get(group), bytes)
            for group, ids in enumerate(wanted.blocks)
        )
        if not pool.has_room(needed, num_running):
            pool.release(shared)
            return
        fresh = [iter(pool.allocate(count, number, offloads=False)) for number, count in enumerate(needed)]
        taken: dict[bytes, int] = {}
        for group, ids in enumerate(wanted.blocks):
            of_group = [*ids, *([wanted.states[group]] if group in wanted.states else [])]
            taken.update((key, next(fresh[pool.pools[group]])) for key in of_group if isinstance(key, bytes))
        try:
            self._read(taken)
        except PageLostError as error:
            logger.info("a stored prefix is computed again: %s", error)
            pool.release(taken.values())
            pool.release(shared)
            return
        self._record(wanted, taken, sequence)

    def _all(self, wanted: _Wanted) -> Iterator[int | bytes]:
        """The wanted blocks in a sequence's order."""
        yield from (each for each in by_page(wanted.blocks, [0] * len(wanted.blocks)))
        yield from wanted.states.values()

    def _record(self, wanted: _Wanted, taken: dict[bytes, int], sequence: Choice) -> None:
        """Record the blocks as those of a sequence that has just ended, and release them."""
        pool = self._pool

        def block_of(each: int | bytes) -> int:
            return taken[each] if isinstance(each, bytes) else each

        blocks = [[*[NO_BLOCK] * first, *map(block_of, ids)] for first, ids in zip(wanted.first_pages, wanted.blocks)]
        for group, state in wanted.states.items():
            blocks[group] = [block_of(state)]
        chain = Chain(sequence.chain.salt)
        is_inside = bool(wanted.num_tokens % pool.block_size)
        pool.record(chain, blocks, wanted.first_pages, wanted.num_tokens, sequence, is_final=is_inside)
        for node in chain.nodes:
            each: CachedBlock | None = node
            while each is not None and each.parent is not None and not each.is_noted:
                each.is_noted = each.block_id is not None
                each = each.parent
        pool.release([block_of(each) for each in self._all(wanted)])
        pool.forget(chain)
        self.num_restored += wanted.num_tokens - wanted.num_known

    def _read(self, taken: dict[bytes, int]) -> None:
        """Fill blocks with the pages of these keys. Raises PageLostError."""
        keys, place = list(taken), 0
        for run in self._store.runs(keys):
            end = place + run.num_pages
            while place < end:  # pieces whose blocks are adjacent, too
                first, count = taken[keys[place]], 1
                while place + count < end and taken[keys[place + count]] == first + count:
                    count += 1
                piece = PageRun(run.file, run.row + run.num_pages - (end - place), count)
                number = self._pool.pool_number(first)
                self._store.read(piece, lambda read: self._pages.fill(number, first, count, read))  # noqa: B023
                place += count

    def _find(self, tokens: NDArray[np.int32], salt: Salt) -> _Wanted | None:
        """The longest prefix of ``tokens`` that tree and store have; None if the tree has as much."""
        pool, size = self._pool, self._pool.block_size
        known = pool.find(tokens, salt).num_tokens
        if known > len(tokens) - size and not pool.states:
            return None
        paths = pool.paths(tokens, salt)
        names = list(self._names(tokens, salt))
        followers = [group for group in range(len(pool.kinds)) if group not in pool.states]

        def place_of(group: int, page: int) -> int | bytes | None:
            path = paths[group]
            if page < len(path) and (block_id := path[page].block_id) is not None:
                return block_id
            return self._stored(names[page], group)

        places: list[list[int | bytes | None]] = [[] for _ in pool.kinds]
        for group in followers:
            for page in range(len(names)):
                place = place_of(group, page)
                if place is None and pool.kinds[group].is_whole:
                    break
                places[group].append(place)
        stored = [[each is not None for each in places[group]] for group in followers]
        kinds = [pool.kinds[group] for group in followers]
        most = findable_pages(stored, kinds, size) if followers else len(names)
        ends: list[tuple[int, dict[int, int | bytes], list[int | bytes | None]]] = []
        if not pool.states:
            ends.append((most * size, {}, []))
        for end, states in self._states(tokens, salt, names, paths, most) if pool.states else ():
            rest = [self._rest(tokens, names, salt, end, group) for group in followers] if end % size else []
            if all(each is not None for each in rest):
                ends.append((end, states, rest))
        for end, states, rest in sorted(ends, key=lambda each: -each[0]):
            num_pages = end // size
            if end <= known:
                return None
            if followers and findable_pages([each[:num_pages] for each in stored], kinds, size) < num_pages:
                continue
            first_pages = [kind.first_page(num_pages * size, size) for kind in pool.kinds]
            chosen: list[list[int | bytes]] = [[] for _ in pool.kinds]
            for number, group in enumerate(followers):
                of_group = [*places[group][first_pages[group] : num_pages], *rest[number : number + 1]]
                chosen[group] = [each for each in of_group if each is not None]
            return _Wanted(end, known, first_pages, chosen, states)
        return None

    def _states(
        self, tokens: NDArray[np.int32], salt: Salt, names: list[PageName], paths: list[list[CachedBlock]], most: int
    ) -> Iterator[tuple[int, dict[int, int | bytes]]]:
        """The lengths after which tree or store have a state in each group of states, and where; up to the page after
        ``most``."""
        pool, size = self._pool, self._pool.block_size
        data, root = tokens.tobytes(), self._root_key(salt)
        for page in range(min(most, len(names)) + 1):
            before = names[page - 1].key if page else root
            found: dict[int, dict[int, int | bytes]] = {}  # by length and group
            for group in pool.states:
                if page and (key := self._stored(names[page - 1], group)) is not None:
                    found.setdefault(page * size, {})[group] = key
                if page and page <= len(paths[group]) and (block_id := paths[group][page - 1].block_id) is not None:
                    found.setdefault(page * size, {})[group] = block_id
                following = self._identity(data[page * size * 4 : (page + 1) * size * 4])
                for name in self._store.inside(_of_group(before, group)):
                    end = page * size + len(name.tokens) // 4
                    is_inside = end < (page + 1) * size and end <= len(tokens)
                    if is_inside and following is not None and following.startswith(name.tokens):
                        found.setdefault(end, {})[group] = name.key
            for end, states in found.items():
                if len(states) == len(pool.states):
                    yield end, states

    def _rest(
        self, tokens: NDArray[np.int32], names: list[PageName], salt: Salt, end: int, group: int
    ) -> int | bytes | None:
        """The stored page of a group that begins with the tokens before ``end`` after the last full page."""
        page, size = end // self._pool.block_size, self._pool.block_size
        before = names[page - 1].key if page else self._root_key(salt)
        following = self._identity(tokens[page * size : end].tobytes())
        for name in self._store.inside(_of_group(before, group)):
            if following is not None and name.tokens.startswith(following):
                return name.key
        return None

    def _stored(self, name: PageName, group: int) -> bytes | None:
        """The key of a full page, or of the state after it, if the store has it with the same tokens."""
        key = _of_group(name.key, group)
        found = self._store.find(key)
        return key if found is not None and found.tokens == name.tokens else None

    # Names

    def _root_key(self, salt: Salt) -> bytes:
        return hashlib.sha256(self._fingerprint + root_name(salt, 0)).digest()

    def _identity(self, tokens: bytes) -> bytes | None:
        """A page's tokens, and the digests of its pictures; None if one of these is not known any more."""
        if self._picture_of is None:
            return tokens
        keys = np.frombuffer(tokens, np.int32)
        if keys.min(initial=0) >= 0:
            return tokens
        digests = {key: self._picture_of(key) for key in keys[keys < 0].tolist()}
        if any(each is None for each in digests.values()):
            return None
        return with_pictures(tokens, lambda key: digests[key] or b"")

    def _names(self, tokens: NDArray[np.int32], salt: Salt) -> Iterator[PageName]:
        """The name of each full page, without a group."""
        width, before = self._pool.block_size * 4, self._root_key(salt)
        data = tokens.tobytes()
        for start in range(0, len(data) - width + 1, width):
            identity = self._identity(data[start : start + width])
            if identity is None:
                return
            key = _key(before, identity)
            yield PageName(key, before, identity)
            before = key

    def _name_of(self, node: CachedBlock, group: int) -> PageName | None:
        """The name of a content in the tree of a group; its key without a group is kept at the node."""
        unnamed = [node]
        while (parent := unnamed[-1].parent) is not None and not parent.stored_key:
            unnamed.append(parent)
        if parent is None:
            root = unnamed.pop()
            root.stored_key = hashlib.sha256(self._fingerprint + _name_without_group(root.tokens)).digest()
            parent = root
        for each in reversed(unnamed):
            assert each.parent is not None
            identity = self._identity(each.tokens)
            if identity is None:
                return None
            each.stored_key = _key(each.parent.stored_key, identity)
        assert node.parent is not None
        assert identity is not None, "that of the node, which came last"
        return PageName(_of_group(node.stored_key, group), _of_group(node.parent.stored_key, group), identity)


def _key(before: bytes, identity: bytes) -> bytes:
    return hashlib.sha256(before + identity).digest()


def _of_group(key: bytes, group: int) -> bytes:
    return key + bytes([group])


def _name_without_group(name: bytes) -> bytes:
    """A root's name as that of the first group's root."""
    return b"0" + name.lstrip(b"0123456789")
