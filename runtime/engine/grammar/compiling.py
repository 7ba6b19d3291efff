"""A model's grammars over the threads of a server and of an engine: checked once each, and compiled while the engine
runs other requests. llguidance is imported with the first one."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.matcher import GrammarMatcher, LazyVocabulary
from runtime.engine.scheduling.sequence import Request
from runtime.later import later

_compiler = later("runtime.engine.grammar.compiler")

NUM_REMEMBERED = 256
"""Accepted grammars that a checker remembers."""
NUM_THREADS = 2


class GrammarChecker:
    """Checks the grammars of a model's requests, each once. Thread-safe."""

    def __init__(self, vocabulary: LazyVocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._good: dict[Grammar, None] = {}

    def is_known(self, grammar: Grammar | None) -> bool:
        """Whether ``check`` would return at once."""
        return grammar is None or grammar in self._good

    def check(self, grammar: Grammar | None) -> None:
        """Raises as ``check_grammar`` does, and if the model has no tokenizer."""
        if grammar is None or grammar in self._good:
            return
        _compiler.check_grammar(grammar, self._vocabulary.get())
        with self._lock:
            if len(self._good) >= NUM_REMEMBERED:
                del self._good[next(iter(self._good))]
            self._good[grammar] = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request whose grammar was compiled: a matcher for each of its choices, or the error."""

    request: Request
    matchers: list[GrammarMatcher]
    error: Exception | None = None


class GrammarQueue:
    """Belongs to the engine's loop, except for the threads that compile."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._taken: list[Compiled] = []
        self._num_under_way = 0

    def __len__(self) -> int:
        """Requests that have not been taken."""
        return self._num_under_way + len(self._taken)

    def add(self, request: Request, vocabulary: LazyVocabulary) -> None:
        """Compile the request's grammar."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS, "xserv-grammar")
        self._num_under_way += 1
        self._pool.submit(self._compile, request, vocabulary)

    def take(self) -> list[Compiled]:
        """The compiled ones; never waits."""
        while self._num_under_way:
            try:
                self._receive(self._done.get_nowait())
            except queue.Empty:
                break
        taken, self._taken = self._taken, []
        return taken

    def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until one is compiled."""
        if self._taken or not self._num_under_way:
            return
        with suppress(queue.Empty):
            self._receive(self._done.get(timeout=timeout_s))

    def close(self) -> None:
        """Compile no more; waits for those in progress."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _receive(self, compiled: Compiled) -> None:
        self._num_under_way -= 1
        self._taken.append(compiled)

    def _compile(self, request: Request, vocabulary: LazyVocabulary) -> None:
        """Runs in a thread of the pool."""
        matchers: list[GrammarMatcher] = []
        error: Exception | None = None
        try:
            grammar = request.params.grammar
            assert grammar is not None
            if request.open_sequences:  # otherwise it was cancelled
                matchers = _compiler.compile_grammar(grammar, vocabulary.get(), request.params.n)
        except Exception as failure:
            error = failure
        self._done.put(Compiled(request, matchers, error))
