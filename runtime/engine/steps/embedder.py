"""Embeddings and scores: the pooled hidden states of prompts, computed beside the running requests.

One forward pass at a time, of at most ``max_num_batched_tokens`` tokens, between two steps, so that running requests
wait no longer than for a chunk of another prompt. Short prompts share a pass; a longer one takes several, but for an
encoder's, which is one chunk. A prompt with images is added once they are encoded, and does not share a pass. Passes
have their own pages, apart from the scheduler's.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.dtype import float32
from runtime.engine.admission import pictures_of, prompt_of
from runtime.engine.checks import check_one_of
from runtime.engine.errors import RequestError
from runtime.engine.limits import EngineLimits
from runtime.engine.messages import ImageSupport, PoolingRequest
from runtime.engine.scheduling.pictures import Pictures
from runtime.engine.steps.assemble import chunk_spans
from runtime.engine.steps.executor import Executor, ExecutorLostError, SidePass
from runtime.engine.steps.step_input import PassPictures
from runtime.errors import XservError
from runtime.pooling import POOLING_TASKS, POOLINGS, PoolingInfo, PoolingTask, poolings_of
from runtime.tensor.tensor import Tensor

logger = logging.getLogger("xserv.engine")

SHARED_TOKENS = 256
"""Tokens at most of an encoder's pass that texts share on a CPU: more leave the second-level cache between two kernels
(MiniLM's shape on a Zen 5: 1 to 3 % of the time of texts of 64 tokens)."""


_FAILED = "the model failed at this embedding"


class EmbeddingError(XservError):
    """The model failed on an embedding, or computed one that is not finite."""


@dataclass(slots=True, eq=False)
class Embedding:
    """A prompt to embed.

    token_ids     [num_tokens] int32
    future        of the embedding ``[size]`` float32, or of the labels' scores, or of those of each token
                  ``[num_tokens, size]``; once it is cancelled, no further pass is run for it
    second_from   the first token of the second of two texts; None for one
    num_unpooled  how many of the first tokens are not pooled; "all" has their rows, too
    pooling       a pooling, or several ("cls+mean"), or "all" for a task of each token
    num_computed  tokens whose keys and values are in the pages
    totals        what each pooling has of their hidden states, ``[hidden_size]`` float64, or all of them, float32
    row           the pooled row, if the pass has pooled
    pictures      of the prompt, or None
    cache_salt    encoded images are shared within it
    """

    token_ids: NDArray[np.int32]
    pooling: str
    task: PoolingTask = "embed"
    second_from: int | None = None
    num_unpooled: int = 0
    num_computed: int = 0
    totals: dict[str, NDArray[Any]] = field(default_factory=dict)
    row: NDArray[np.float32] | None = None
    pictures: Pictures | None = None
    cache_salt: str | None = None
    _future: Future[NDArray[np.float32]] | None = None

    @property
    def future(self) -> Future[NDArray[np.float32]]:
        """Made at its first use: an embedding that is computed at once needs none."""
        if self._future is None:
            self._future = Future()
        return self._future

    @property
    def types(self) -> NDArray[np.int32] | None:
        """The types of its tokens: 0, and 1 in the second text; None if it has one text."""
        if self.second_from is None:
            return None
        return (np.arange(len(self.token_ids)) >= self.second_from).astype(np.int32)

    def absorb(self, hidden: NDArray[np.float32], count: int) -> None:
        """Take the hidden states ``[count, hidden_size]`` of its next tokens into ``totals``, or the one of them that
        the pooling reads."""
        first, rows = self.num_computed, hidden
        self.num_computed = first + count
        if self.pooling == "all":
            if "all" not in self.totals:
                self.totals["all"] = np.empty((len(self.token_ids), rows.shape[1]), np.float32)
            self.totals["all"][first : self.num_computed] = rows
            return
        if (left_out := self.num_unpooled - first) > 0:
            first, rows = self.num_unpooled, rows[left_out:]
            if not len(rows):
                return
        for pooling in poolings_of(self.pooling):
            before = self.totals.get(pooling)
            if pooling == "cls":
                found = rows[0].astype(np.float64) if before is None else before
            elif pooling == "last":
                found = rows[-1].astype(np.float64)
            elif pooling == "max":
                found = rows.max(axis=0).astype(np.float64)
                if before is not None:
                    found = np.maximum(before, found)
            else:
                summed: NDArray[Any] = rows
                if pooling == "weighted_mean":
                    summed = rows * np.arange(first + 1, first + 1 + len(rows), dtype=np.float64)[:, None]
                found = np.add.reduce(summed, axis=0, dtype=np.float64)
                if before is not None:
                    found = found + before
            self.totals[pooling] = found

    @property
    def pooled(self) -> NDArray[np.float32]:
        """The pooled row, or the rows of all tokens, once they are computed."""
        if self.row is not None:
            return self.row
        last, left_out = len(self.token_ids), self.num_unpooled
        count, weights = last - left_out, (last * (last + 1) - left_out * (left_out + 1)) / 2
        divisor = {"mean": count, "weighted_mean": weights, "mean_sqrt_len": count**0.5}
        rows = [total / divisor[name] if name in divisor else total for name, total in self.totals.items()]
        return np.asarray(rows[0] if len(rows) == 1 else np.concatenate(rows), np.float32)

    @property
    def request_id(self) -> str:
        """For the log, since an embedding has no id."""
        return "of an embedding"

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_computed


class Embedder:
    """The prompts that wait for their embedding, in order of arrival.

    ``prepare`` is thread-safe; the rest belongs to the engine's loop. ``on_end`` is called with each that had images,
    when it is over. A pass that prompts share has at most ``shared_tokens``, where given.
    """

    def __init__(
        self, executor: Executor, limits: EngineLimits, vocab_size: int, images: ImageSupport | None = None,
        pooling: PoolingInfo | None = None, shared_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._executor = executor
        self._pooling = pooling or PoolingInfo()
        self._limits = limits
        self._vocab_size = vocab_size
        self._images = images
        self._shared = min(limits.max_num_batched_tokens, shared_tokens or limits.max_num_batched_tokens)
        self.on_end: Callable[[Embedding], None] | None = None
        self._waiting: deque[Embedding] = deque()
        self._pass: SidePass | None = None  # of the first waiting prompt, if it takes several passes

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def prepare(self, request: PoolingRequest) -> Embedding:
        """A checked prompt of 1 … ``max_model_len`` tokens. Raises ``RequestError``."""
        own, task, pooling, num_unpooled = self._pooling, request.task, request.pooling, request.num_unpooled
        check_one_of("task", task, POOLING_TASKS)
        if why_not := own.why_not(task):
            raise RequestError(f"task is {task!r}, but the model has no head for it: {why_not}", param="task")
        if task != "embed":
            reads = own.head_pooling if task == "classify" else "all"
            if pooling not in (None, reads):
                raise RequestError(f"pooling is {pooling!r}, but the task {task!r} reads {reads!r}", param="pooling")
            pooling = reads
        else:
            pooling = own.pooling if pooling is None else pooling
            for each in poolings_of(pooling):
                check_one_of("pooling", each, POOLINGS)
        ids = prompt_of("token_ids", request.token_ids, self._vocab_size, self._limits.max_model_len, has_answer=False)
        if num_unpooled >= len(ids):
            raise RequestError(
                f"token_ids must be more than the prompt's {num_unpooled}, which are not pooled, got {len(ids)}",
                param="token_ids",
            )
        return Embedding(
            ids, pooling, task, request.second_from if own.reads_types else None, num_unpooled,
            pictures=pictures_of(request.images, ids, self._images), cache_salt=request.cache_salt,
        )  # fmt: skip

    def add(self, embedding: Embedding) -> None:
        """Enqueue an embedding whose images are encoded, if it has any."""
        self._waiting.append(embedding)

    def fail(self, embedding: Embedding, why: str) -> None:
        """Fail its future."""
        embedding.num_computed = len(embedding.token_ids)
        if not embedding.future.done() and embedding.future.set_running_or_notify_cancel():
            embedding.future.set_exception(EmbeddingError(why))

    def run_alone(self, embedding: Embedding) -> NDArray[np.float32]:
        """The result of an embedding of one pass, while no other waits. Raises ``EmbeddingError``."""
        try:
            self._run([embedding])
            return self._result(embedding)
        except EmbeddingError:
            raise
        except Exception as error:
            logger.exception("an embedding failed")
            raise EmbeddingError(_FAILED) from error
        finally:
            self._pass = None

    def _end_first(self) -> None:
        embedding = self._waiting.popleft()
        if embedding.pictures is not None and self.on_end is not None:
            self.on_end(embedding)

    def advance(self) -> None:
        """Run one forward pass, if there is work. A failure is raised by the futures of its prompts. Raises
        ExecutorLostError."""
        chosen = self._choose()
        if not chosen:
            return
        try:
            self._run(chosen)
            # A caller waits for the first of its futures: set last, it wakes the caller once, and finds all.
            for embedding in reversed(chosen):
                if not embedding.num_left:
                    self._finish(embedding)
        except ExecutorLostError:
            raise
        except Exception:
            logger.exception("the embedding of %d prompts failed", len(chosen))
            for embedding in chosen:
                self.fail(embedding, _FAILED)
        while self._waiting and not self._waiting[0].num_left:
            self._end_first()
        if not (self._waiting and self._waiting[0].num_computed):
            self._pass = None

    def _choose(self) -> list[Embedding]:
        """The prompts of the next pass: the first alone, or as many whole ones as fit."""
        while self._waiting and self._waiting[0].future.cancelled():
            self._end_first()
            self._pass = None
        if not self._waiting:
            return []
        chosen, room = [self._waiting[0]], self._shared - self._waiting[0].num_left
        if room < 0 or self._waiting[0].num_computed or self._waiting[0].pictures is not None:
            return chosen
        for embedding in list(self._waiting)[1 : self._limits.max_num_seqs]:
            room -= embedding.num_left
            if room < 0 or embedding.pictures is not None:
                break
            chosen.append(embedding)
        return chosen

    def _run(self, chosen: list[Embedding]) -> None:
        types = [each.types for each in chosen]
        if pooling := _shared_pooling(chosen):
            rows = self._executor.pooled([each.token_ids for each in chosen], types, pooling)
            if rows is not None:
                for embedding, row in zip(chosen, rows):
                    embedding.row, embedding.num_computed = row, len(embedding.token_ids)
                return
        if self._pass is None:
            self._pass = self._executor.pooling_pass([len(embedding.token_ids) for embedding in chosen])
        starts = [embedding.num_computed for embedding in chosen]
        most = self._limits.max_num_batched_tokens
        ids = [embedding.token_ids[start : start + most] for embedding, start in zip(chosen, starts)]
        pictures = None
        if (own := chosen[0].pictures) is not None:
            count = own.whole_chunk(starts[0], len(ids[0]), most)
            assert count > 0, "no step can compute the pictures side by side"
            ids, end = [ids[0][:count]], starts[0] + count
            rotary = None if own.positions is None else np.ascontiguousarray(own.positions[:, starts[0] : end])
            pictures = PassPictures(starts[0], count, rotary, *chunk_spans(own, starts[0], end, 0))
        hidden = self._pass.run(ids, starts, pictures, types)  # [num_tokens, hidden_size]
        ends = list(itertools.accumulate(map(len, ids)))
        firsts = [0, *ends[:-1]]
        if all(
            each.pooling in ("cls", "last") and not each.num_unpooled for each in chosen
        ):  # one row of each chunk is read
            wanted = [first if each.pooling == "cls" else end - 1 for each, first, end in zip(chosen, firsts, ends)]
            hidden = ops.gather_rows(hidden, Tensor.from_numpy(np.array(wanted, np.int32)).to(hidden.device))
            firsts, ends = list(range(len(chosen))), list(range(1, len(chosen) + 1))
        states = _on_host(hidden)
        for embedding, first, end, new_ids in zip(chosen, firsts, ends, ids):
            embedding.absorb(states[first:end], len(new_ids))

    def _result(self, embedding: Embedding) -> NDArray[np.float32]:
        vector = self._executor.head(embedding.task, embedding.pooled)
        wide = vector.astype(np.float64).ravel()
        if not math.isfinite(wide @ wide):  # which no finite float32 makes infinite
            raise EmbeddingError("the model's hidden states are not finite")
        return vector

    def _finish(self, embedding: Embedding) -> None:
        try:
            vector = self._result(embedding)
        except EmbeddingError as error:
            self.fail(embedding, str(error))
            return
        if embedding.future.set_running_or_notify_cancel():
            embedding.future.set_result(vector)


def _shared_pooling(chosen: Sequence[Embedding]) -> str:
    """The pooling that each takes over all of its tokens; "" if there is no such one."""
    pooling = chosen[0].pooling
    if pooling in POOLINGS and all(each.pooling == pooling and not each.num_unpooled for each in chosen):
        return pooling
    return ""


def _on_host(hidden: Tensor) -> NDArray[np.float32]:
    is_there = hidden.device.kind == "cpu" and hidden.dtype == float32
    return hidden.array if is_there else hidden.to("cpu", float32).array
