"""Prefixes that are kept in a `PageStore` beside the device: pages and states are written there once their sequence has
ended, and read back when a prompt begins with them.

A page's key is a hash of the store's root, its salt, and all tokens up to its end, with pictures by their digests; the
tokens are stored beside it and compared. Pages that are read lie in blocks of the pool, as if a sequence with that
prefix had just ended, so that the rest of the engine need not know of the store.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.collector import NO_COLLECTION
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

_READ_BYTES = 32 << 20
"""Bytes that are read back before a step in which others run, some ten milliseconds, and one page at least."""

_WARM_S = 0.01
"""How long an idle engine reads prefixes back before it looks for requests again."""

_CLOSE_S = 10.0
"""How long a shutdown writes what is left: less than an engine's process is given to end."""


class BlockBytes(Protocol):
    """Reads and writes blocks from the host: `runtime.kv.page_bytes.PageBytes`."""

    page_bytes: list[list[int]]
    is_ordered: bool

    def copy_out(
        self, pool: int, block_ids: Sequence[int], first: int = 0, end: int | None = None
    ) -> list[NDArray[np.uint8]]: ...

    def fill(self, pool: int, block_id: int, num_blocks: int, read: Fill) -> None: ...


class _Prompt(Protocol):
    """The tokens whose prefix is read back: a waiting sequence, or a stored prompt."""

    chain: Chain

    @property
    def num_tokens(self) -> int: ...

    def prefix_keys(self, start: int, end: int) -> NDArray[np.int32]: ...


class _StoredPrompt:
    """The tokens of a stored prefix, without a salt, as those of a sequence with one token more."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self.chain, self._tokens = Chain(), tokens

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) + 1

    def prefix_keys(self, start: int, end: int) -> NDArray[np.int32]:
        return self._tokens[start:end]


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


class _Asked(NamedTuple):
    """A prompt's tokens but the last, and the names of their full pages, without a group."""

    sequence: _Prompt
    salt: Salt
    tokens: NDArray[np.int32]
    names: list[PageName]


@dataclass
class _Restoring:
    """A prefix that is being read back: blocks for its stored pages by their keys, those that it shares with the pool,
    what is still to be read, and the names of its full pages."""

    sequence: _Prompt
    wanted: _Wanted
    taken: dict[bytes, int]
    shared: list[int]
    runs: deque[PageRun]
    names: list[PageName]
    num_read: int = 0  # pages of ``taken``

    @property
    def held_blocks(self) -> list[int]:
        return [*self.taken.values(), *self.shared]


class StoredPrefixes:
    """A block pool's part in a `PageStore`. Belongs to the engine's loop.

    num_restored  tokens of prefixes that were read back
    num_written   pages that were handed to the store
    longest_warm  tokens of the longest prefix that was read back without being asked for
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
        self.num_restored = self.num_written = self.longest_warm = 0
        self._pool, self.pages, self._store = pool, pages, store
        self._picture_of = picture_of
        self._waiting: deque[tuple[int, CachedBlock]] = deque()  # group and content: to be written
        self._asked: _Asked | None = None  # the latest, so that each try does not hash it again
        self._restoring: _Restoring | None = None
        self._latest: deque[PageName] | None = None  # ends of prefixes that are to be read back while idle

    @property
    def store(self) -> PageStore:
        """The place of the pages."""
        return self._store

    @property
    def is_ordered(self) -> bool:
        """Whether prefixes may be read back while a step runs."""
        return self.pages.is_ordered

    def note(self, sequence: Choice) -> None:
        """A sequence's pages are recorded, and about to be released: those that are new are written soon."""
        if not self._store.keeps:
            return
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

    def settle(self) -> None:
        """Hand over what is noted and fits, and forget the rest: the pages are about to go. No sequence waits for its
        prefix."""
        if self._is_warming:
            self.drop()
        assert self._restoring is None, "a sequence waits for its prefix"
        self.write_some(is_idle=True)
        for _, node in self._waiting:
            node.is_noted = False
        self._waiting.clear()
        self._asked = self._latest = None

    def use(self, open_store: Callable[[str], PageStore], fingerprint: str) -> None:
        """From now on pages have this fingerprint, and its store. The pool's prefixes were dropped."""
        assert not self._waiting, "pages of other weights are left"
        self._store.close(_CLOSE_S)
        self._store, self._fingerprint = open_store(fingerprint), fingerprint.encode()

    @property
    def num_waiting(self) -> int:
        """Contents that are noted and not handed to the store."""
        return len(self._waiting)

    def close(self) -> None:
        """Write what is noted, for some seconds at most."""
        self.drop()
        until_s = time.monotonic() + _CLOSE_S
        while self._waiting and time.monotonic() < until_s:
            if self._store.has_room:
                self._write_batch(_FILE_BYTES)
            else:
                time.sleep(0.01)
        self._drop_evicted()
        num_left = self._store.close(max(0.0, until_s - time.monotonic()))
        num_left += sum(sum(self.pages.page_bytes[self._pool.pools[group]]) for group, _ in self._waiting)
        if num_left:
            logger.warning("%.0f MB of prefixes were not stored in the %g s of a shutdown", num_left / 1e6, _CLOSE_S)

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
            if name is not None and self._store.find([name.key]) == [None]:
                names.append(name)
                block_ids.append(node.block_id)
                num_bytes += sum(self.pages.page_bytes[number])
        if names:
            self._store.write(number, names, self.pages.copy_out(number, block_ids))
            self.num_written += len(names)

    def restore(self, sequence: Choice, num_running: int, *, may_begin: bool) -> bool:
        """Read the pages of a waiting sequence's prefix that the store has and the pool has not into free blocks, if
        there are enough of them and one more for each of ``num_running`` sequences. If any of these runs, a part is
        read for each call. False while there is more: the sequence has to wait. ``may_begin``: whether free blocks may
        be written."""
        with NO_COLLECTION:  # thousands of objects are made, and all stay
            return self._restore(sequence, num_running, may_begin=may_begin)

    def _restore(self, sequence: Choice, num_running: int, *, may_begin: bool) -> bool:
        if self._restoring is not None and self._restoring.sequence is not sequence:
            self.drop()
        if self._restoring is None and self._store.is_empty:
            return True
        if self._restoring is None and may_begin:
            self._restoring = self._begin(sequence, num_running=num_running)
        return self._restoring is None or self._go_on(self._restoring, _READ_BYTES if num_running else math.inf)

    def _go_on(self, work: _Restoring, most_bytes: float) -> bool:
        """Read the next pages. Whether all were read, or given up."""
        try:
            self._read(work, most_bytes)
        except PageLostError as error:
            logger.info("a stored prefix is computed again: %s", error)
            self.drop()
            return True
        if work.runs:
            return False
        if self._is_warming:
            self.longest_warm = max(self.longest_warm, work.wanted.num_tokens)
        self._restoring = None
        self._record(work)
        return True

    @property
    def wants_to_warm(self) -> bool:
        """Whether `warm` has something to do, as far as is known."""
        if self._restoring is not None:
            return self._is_warming
        return not self._store.is_empty and (self._latest is None or len(self._latest) > 0)

    @property
    def _is_warming(self) -> bool:
        """Whether a prefix is being read back that no sequence waits for."""
        return self._restoring is not None and isinstance(self._restoring.sequence, _StoredPrompt)

    def warm(self) -> None:
        """After a start: read back some of the prefixes that were used last, those without a salt, into blocks that
        were never used, half of each pool at most. Takes some ten milliseconds. To be called while the engine has no
        work, so that a chat's next turn meets its prefix as if the engine had not been restarted."""
        until_s = time.monotonic() + _WARM_S
        if self._latest is None:
            self._store.refresh()
            self._latest = self._ends()
        while self.wants_to_warm and not self._pool.offloads and time.monotonic() < until_s:
            if self._restoring is None:
                prompt = self._prompt_before(self._latest.popleft())
                if prompt is not None:
                    self._restoring = self._begin(prompt, most_blocks=self._pool.empty_counts)
            if self._restoring is not None:
                with NO_COLLECTION:
                    self._go_on(self._restoring, _READ_BYTES)

    def stop_warming(self) -> None:
        """Read nothing back any more but what a sequence waits for."""
        if self._is_warming:
            self.drop()
        self._latest = deque()

    def _ends(self) -> deque[PageName]:
        """States, and pages that no other continues, of those that were used last: no more than the pool holds."""
        names, kinds = self._store.latest(self._pool.num_blocks), self._pool.kinds
        continued = {name.parent for name in names if kinds[name.key[-1]].follows_tokens}
        return deque(each for each in names if each.key not in continued or not kinds[each.key[-1]].follows_tokens)

    def _prompt_before(self, name: PageName) -> _StoredPrompt | None:
        """The prefix that ends with this page or state. None if a page before it is not stored, or has pictures, or it
        has a salt."""
        kinds, width = self._pool.kinds, self._pool.block_size * 4
        group = max(range(len(kinds)), key=lambda each: (kinds[each].follows_tokens, kinds[each].is_whole))
        pages, key, root = [name.tokens], without_group(name.parent), self.root_key(None)
        while key != root:
            before = self._store.find([of_group(key, group)])[0]
            if before is None:
                return None
            pages.append(before.tokens)
            key = without_group(before.parent)
        if any(len(tokens) != width for tokens in pages[1:]) or len(pages[0]) > width:
            return None
        return _StoredPrompt(np.frombuffer(b"".join(reversed(pages)), np.int32))

    def drop(self, sequence: Choice | None = None) -> bool:
        """Give up reading back the prefix of this sequence, or of any. False if there is none."""
        if self._restoring is None or sequence not in (None, self._restoring.sequence):
            return False
        self._pool.release(self._restoring.held_blocks)
        self._restoring = None
        return True

    @property
    def held_blocks(self) -> list[int]:
        """Blocks of a prefix that is being read back."""
        return [] if self._restoring is None else self._restoring.held_blocks

    def ask(self, sequence: _Prompt) -> _Asked:
        """Hash a sequence's tokens, unless it was the latest."""
        asked, salt = self._asked, sequence.chain.salt
        if asked is None or (asked.sequence, asked.salt) != (sequence, salt):
            tokens = np.ascontiguousarray(sequence.prefix_keys(0, sequence.num_tokens - 1), np.int32)
            asked = self._asked = _Asked(sequence, salt, tokens, list(self._names(tokens, salt)))
        return asked

    def _begin(
        self, sequence: _Prompt, *, num_running: int = 0, most_blocks: Sequence[int] | None = None
    ) -> _Restoring | None:
        """Find a sequence's prefix, and take blocks for it, at most so many of each pool. None if the store has nothing
        more, or there is no room."""
        pool, asked = self._pool, self.ask(sequence)
        self._store.refresh()
        wanted = self._find(asked)
        if wanted is None:
            return None
        shared = [each for each in chain(*wanted.blocks, wanted.states.values()) if isinstance(each, int)]
        pool.share(shared)
        needed = pool.by_pool(
            sum(isinstance(each, bytes) for each in ids) + isinstance(wanted.states.get(group), bytes)
            for group, ids in enumerate(wanted.blocks)
        )
        is_too_much = most_blocks is not None and any(map(int.__gt__, needed, most_blocks))
        if is_too_much or not pool.has_room(needed, num_running):
            pool.release(shared)
            return None
        fresh = [iter(pool.allocate(count, number, offloads=False)) for number, count in enumerate(needed)]
        taken: dict[bytes, int] = {}
        for group, ids in enumerate(wanted.blocks):
            of_group = [*ids, *([wanted.states[group]] if group in wanted.states else [])]
            taken.update((key, next(fresh[pool.pools[group]])) for key in of_group if isinstance(key, bytes))
        return _Restoring(sequence, wanted, taken, shared, deque(self._store.runs(list(taken))), asked.names)

    def _record(self, work: _Restoring) -> None:
        """Record the blocks as those of a sequence that has just ended, and release them."""
        pool, wanted, taken = self._pool, work.wanted, work.taken

        def block_of(each: int | bytes) -> int:
            return taken[each] if isinstance(each, bytes) else each

        blocks = [[*[NO_BLOCK] * first, *map(block_of, ids)] for first, ids in zip(wanted.first_pages, wanted.blocks)]
        for group, state in wanted.states.items():
            blocks[group] = [block_of(state)]
        recorded = Chain(work.sequence.chain.salt)
        is_inside = bool(wanted.num_tokens % pool.block_size)
        pool.record(recorded, blocks, wanted.first_pages, wanted.num_tokens, work.sequence, is_final=is_inside)
        for node in recorded.nodes:
            each: CachedBlock | None = node
            for name in reversed(work.names[: recorded.num_blocks]):
                assert each is not None, "it has fewer pages than were recorded"
                each.stored_key, each.is_noted = name.key, each.is_noted or each.block_id is not None
                each = each.parent
        states = [blocks[group].pop() for group in wanted.states]
        pool.release([*by_page(blocks, wanted.first_pages), *states])
        pool.forget(recorded)
        self.num_restored += wanted.num_tokens - wanted.num_known

    def _read(self, work: _Restoring, most_bytes: float) -> None:
        """Fill blocks with the next pages. Raises PageLostError."""
        ids = list(work.taken.values())
        while work.runs and most_bytes > 0:
            run, first = work.runs[0], ids[work.num_read]
            number = self._pool.pool_number(first)
            page_bytes, count = sum(self.pages.page_bytes[number]), 1
            while count < run.num_pages and count * page_bytes < most_bytes:  # pieces whose blocks are adjacent, too
                if ids[work.num_read + count] != first + count:
                    break
                count += 1
            piece = run._replace(num_pages=count)
            self._store.read(piece, lambda read: self.pages.fill(number, first, count, read))  # noqa: B023
            work.num_read += count
            most_bytes -= count * page_bytes
            if count == run.num_pages:
                work.runs.popleft()
            else:
                work.runs[0] = run._replace(row=run.row + count, num_pages=run.num_pages - count)

    def _find(self, asked: _Asked) -> _Wanted | None:
        """The longest prefix that tree and store have; None if the tree has as much."""
        pool, size, (_, salt, tokens, names) = self._pool, self._pool.block_size, asked
        paths = pool.paths(tokens, salt)
        followers = [group for group in range(len(pool.kinds)) if group not in pool.states]
        places = {group: self._places(names, paths[group], group) for group in followers}
        stored = [[each is not None for each in places[group]] for group in followers]
        kinds = [pool.kinds[group] for group in followers]
        most = findable_pages(stored, kinds, size) if followers else len(names)
        # A last page that is not full is read only if it was stored so: of a longer one most would be for nothing.
        is_whole = most == len(tokens) // size and all(
            self._rest(tokens, names, salt, len(tokens), group, is_exact=True) is not None for group in followers
        )
        whole = [len(tokens)] if is_whole and len(tokens) % size else []
        ends: Iterator[tuple[int, dict[int, int | bytes]]] = iter([(end, {}) for end in (*whole, most * size)])
        if pool.states:
            ends = self._states(tokens, salt, names, paths, most)
        for end, states in ends:
            rest = [self._rest(tokens, names, salt, end, group) for group in followers] if end % size else []
            num_pages = end // size
            if not all(each is not None for each in rest):
                continue
            if followers and findable_pages([each[:num_pages] for each in stored], kinds, size) < num_pages:
                continue
            first_pages = [kind.first_page(num_pages * size, size) for kind in pool.kinds]
            chosen: list[list[int | bytes]] = [[] for _ in pool.kinds]
            for number, group in enumerate(followers):
                of_group = [*places[group][first_pages[group] : num_pages], *rest[number : number + 1]]
                chosen[group] = [each for each in of_group if each is not None]
            known = len(tokens)
            if any(isinstance(each, bytes) for ids in (*chosen, states.values()) for each in ids):
                known = pool.find(tokens, salt).num_tokens
            return _Wanted(end, known, first_pages, chosen, states) if end > known else None
        return None

    def _places(self, names: list[PageName], path: list[CachedBlock], group: int) -> list[int | bytes | None]:
        """By page: the block that has it, or else its key if the store has it. For a group that keeps all tokens, up to
        the first that neither has."""
        found: list[int | bytes | None] = [node.block_id for node in path[: len(names)]]
        found += [None] * (len(names) - len(found))
        missing = [page for page, each in enumerate(found) if each is None]
        for page, key in zip(missing, self._stored([names[page] for page in missing], group)):
            found[page] = key
        is_whole = self._pool.kinds[group].is_whole
        return found[: found.index(None)] if is_whole and None in found else found

    def _states(
        self, tokens: NDArray[np.int32], salt: Salt, names: list[PageName], paths: list[list[CachedBlock]], most: int
    ) -> Iterator[tuple[int, dict[int, int | bytes]]]:
        """The lengths after which tree or store have a state in each group of states, and where, the longest first,
        from inside the page after ``most``."""
        pool, size = self._pool, self._pool.block_size
        data, root = tokens.tobytes(), self.root_key(salt)
        for page in range(min(most, len(names)), -1, -1):
            before = names[page - 1].key if page else root
            found: dict[int, dict[int, int | bytes]] = {}  # by length and group
            for group in pool.states:
                if page and (key := self._stored([names[page - 1]], group)[0]) is not None:
                    found.setdefault(page * size, {})[group] = key
                if page and page <= len(paths[group]) and (block_id := paths[group][page - 1].block_id) is not None:
                    found.setdefault(page * size, {})[group] = block_id
                inside = self._store.inside(of_group(before, group))
                following = self.identity(data[page * size * 4 : (page + 1) * size * 4]) if inside else None
                for name in inside:
                    end = page * size + len(name.tokens) // 4
                    is_inside = end < (page + 1) * size and end <= len(tokens)
                    if is_inside and following is not None and following.startswith(name.tokens):
                        found.setdefault(end, {})[group] = name.key
            for end in sorted(found, reverse=True):
                if len(found[end]) == len(pool.states):
                    yield end, found[end]

    def _rest(
        self, tokens: NDArray[np.int32], names: list[PageName], salt: Salt, end: int, group: int, *,
        is_exact: bool = False,
    ) -> int | bytes | None:  # fmt: skip
        """The stored page of a group that begins with the tokens before ``end`` after the last full page, or has
        exactly these."""
        page, size = end // self._pool.block_size, self._pool.block_size
        before = names[page - 1].key if page else self.root_key(salt)
        following = self.identity(tokens[page * size : end].tobytes())
        for name in self._store.inside(of_group(before, group)):
            is_it = following is not None and name.tokens.startswith(following)
            if is_it and (not is_exact or name.tokens == following):
                return name.key
        return None

    def _stored(self, names: Sequence[PageName], group: int) -> list[bytes | None]:
        """The keys of full pages, or of the states after them, that the store has with the same tokens."""
        keys = [of_group(name.key, group) for name in names]
        return [
            key if found is not None and found.tokens == name.tokens else None
            for key, name, found in zip(keys, names, self._store.find(keys))
        ]

    # Names

    def root_key(self, salt: Salt) -> bytes:
        """The key before all pages of a salt, without a group."""
        return hashlib.sha256(self._fingerprint + root_name(salt, 0)).digest()

    def identity(self, tokens: bytes) -> bytes | None:
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
        width, before = self._pool.block_size * 4, self.root_key(salt)
        data = tokens.tobytes()
        for start in range(0, len(data) - width + 1, width):
            identity = self.identity(data[start : start + width])
            if identity is None:
                return
            key = page_key(before, identity)
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
            identity = self.identity(each.tokens)
            if identity is None:
                return None
            each.stored_key = page_key(each.parent.stored_key, identity)
        assert node.parent is not None
        assert identity is not None, "that of the node, which came last"
        return PageName(of_group(node.stored_key, group), of_group(node.parent.stored_key, group), identity)


def page_key(before: bytes, identity: bytes) -> bytes:
    """A page's key, without a group, after that of the page before."""
    return hashlib.sha256(before + identity).digest()


def of_group(key: bytes, group: int) -> bytes:
    """A page's key in a cache group."""
    return key + bytes([group])


def without_group(key: bytes) -> bytes:
    """The key that ``of_group`` was given."""
    return key[:-1]


def _name_without_group(name: bytes) -> bytes:
    """A root's name as that of the first group's root."""
    return b"0" + name.lstrip(b"0123456789")
