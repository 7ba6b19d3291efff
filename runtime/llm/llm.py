"""``LLM``: a model in this process, for scripts and notebooks.

    from xserv import LLM, SamplingParams

    with LLM() as llm:
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=20))
        print(outputs[0].outputs[0].text)

A client of ``EngineClient``: it tokenizes prompts and detokenizes outputs.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.engine.admission import prepare
from runtime.engine.errors import QueueFullError, RequestError
from runtime.engine.messages import EngineOutput
from runtime.engine.option_names import known_options
from runtime.engine.sampling_params import SamplingParams
from runtime.llm.beam_search import BeamSearch, BeamSearchParams
from runtime.llm.job import Job
from runtime.llm.loaded_model import LoadedModel
from runtime.llm.outputs import BeamSearchOutput, EmbeddingRequestOutput, RequestOutput
from runtime.llm.progress import progress
from runtime.llm.prompts import Prompt, as_list, one_each, take_images
from runtime.text.formats import AnswerFormat
from runtime.text.pipeline import TextDelta

T = TypeVar("T")


def _when_there_is_room(call: Callable[[], T]) -> T:
    """The call's result. It is made again if the queue is full, since other clients use the engine, too."""
    while True:
        try:
            return call()
        except QueueFullError as error:
            time.sleep(error.retry_after_s)


class LLM(LoadedModel):
    """Calls block until their results are complete; they may come from several threads."""

    @known_options()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch; the results are in the prompts' order.

        prompts          one prompt or a list of them (a flat list of ints is one prompt)
        sampling_params  one for all, or one a prompt; by default ``default_sampling_params()``
        use_tqdm         show progress on stderr, if that is a terminal and there is more than one prompt

        Every prompt and its parameters are checked before the first is computed. Raises ``RequestError``,
        ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        return self._run(self._jobs(as_list(prompts), sampling_params), use_tqdm)

    def _jobs(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        template: str | None = None,
    ) -> list[Job]:
        chosen = self.default_sampling_params() if sampling_params is None else sampling_params
        each = one_each("sampling_params", prompts, chosen, SamplingParams)
        return [self._job(prompt, params, template=template) for prompt, params in zip(prompts, each)]

    @known_options()
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: see ``chat_prompt`` and ``generate``; a prompt's ``cache_salt`` and
        ``priority`` are the request's. Messages may be objects of an SDK, and a message's content a list of parts, in
        the forms of OpenAI, Anthropic and transformers; ``{"type": "image", "image": ...}`` takes the values of a
        prompt's "images"."""
        is_one = bool(messages) and not isinstance(messages[0], (list, tuple))
        conversations: Sequence[Any] = [messages] if is_one else messages
        reads_images = self.client.info.images is not None
        taken = [take_images(conversation, reads_images=reads_images) for conversation in conversations]
        prompts = [
            self.chat_prompt(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation, _ in taken
        ]
        scheduling = {"cache_salt": cache_salt, "priority": priority}
        asked: list[Prompt] = [
            {"prompt_token_ids": ids, "images": images, **scheduling} for ids, (_, images) in zip(prompts, taken)
        ]
        return self._run(self._jobs(asked, sampling_params, chat_template), use_tqdm)

    @known_options()
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        answer_format: AnswerFormat | None = None,
    ) -> Generator[TextDelta, None, None]:
        """Complete one prompt, with ``n=1``, and yield its deltas as they come; the last one has a ``finish_reason``.
        With an ``answer_format``, reasoning and tool calls are parsed from the text. The request starts with the first
        ``next``; closing the iterator cancels it. Raises as ``generate`` does."""
        job = self._job(prompt, sampling_params or self.default_sampling_params(), answer_format)
        if job.params.n != 1:
            raise RequestError(f"stream has one choice, got n={job.params.n}", param="n")
        return self._stream(job)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The raw logits after each of 1 … ``max_model_len`` tokens: ``[num_tokens, vocab_size]`` float32.

        Raises ``RequestError``, ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        return self.client.logits(token_ids)

    @known_options()
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The hidden states of prompts, images included, after the final norm, one vector a prompt, in their order.

        pooling    "last": the last token's; "mean": the mean of all
        normalize  make each vector's length one

        Raises ``RequestError``, ``EngineDeadError``, ``EmbeddingError``.
        """
        asked = [self._asked_embedding(prompt) for prompt in as_list(prompts)]
        waiting: list[tuple[str | None, list[int], Future[NDArray[np.float32]]]] = []
        found = []
        try:
            for text, ids, images, salt in asked:
                start = partial(self.client.embed, ids, pooling, images, salt)
                waiting.append((text, ids, _when_there_is_room(start)))
            with progress("Prompts", len(waiting), use_tqdm) as advance:
                for text, ids, future in waiting:
                    found.append(self._embedded(text, ids, future.result(), normalize))
                    advance()
        finally:
            for _, _, future in waiting:
                future.cancel()
        return found

    @known_options()
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The most probable continuations that a beam search finds, ``params.beam_width`` a prompt, best first.

        concurrency_limit  prompts that are searched at once, by default all

        The search, its scores and its end are those of transformers' ``generate(num_beams=...)``: the best
        ``beam_width`` candidates of a step that end are kept by ``cum_logprob / num_new_tokens ** length_penalty``, the
        best that do not end continue, and the search is over when none of these could be better. (vLLM counts the
        prompt's tokens in the length.) Raises ``RequestError``, ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        if concurrency_limit is not None and concurrency_limit < 1:
            name = "concurrency_limit"
            raise RequestError(f"{name} must be at least 1, got {concurrency_limit}", param=name)
        listed = as_list(prompts)
        searches = [BeamSearch(prompt, self._encode(prompt)[1], params, self.client.info) for prompt in listed]
        limit = concurrency_limit or max(1, len(searches))
        for first in range(0, len(searches), limit):
            part = searches[first : first + limit]
            with progress("Tokens", params.max_tokens, use_tqdm) as advance:
                while prompts_of_step := [prompt for search in part for prompt in search.prompts()]:
                    step = [self._job(prompt, part[0].step_params) for prompt in prompts_of_step]
                    outputs = iter(self._run(step, use_tqdm=False))
                    for search in part:
                        search.take(list(itertools.islice(outputs, len(search.prompts()))))
                    advance()
        return [search.result(self.tokenizer) for search in searches]

    def _run(self, jobs: list[Job], use_tqdm: bool) -> list[RequestOutput]:
        outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        open_jobs: dict[str, Job] = {}
        waiting = iter(jobs)
        window = self.client.info.max_waiting
        for job in jobs:
            prepare(job.request, self.client.info)
        try:
            with progress("Prompts", len(jobs), use_tqdm) as advance:
                for job in itertools.islice(waiting, window):
                    self._submit(job, outputs, open_jobs)
                while open_jobs:
                    output = outputs.get()
                    job = open_jobs[output.request_id]
                    if self._receive(job, output):
                        del open_jobs[job.request_id]
                        advance()
                        for following in itertools.islice(waiting, 1):
                            self._submit(following, outputs, open_jobs)
        finally:  # an interrupt, or a refused prompt
            for request_id in open_jobs:
                self.client.cancel(request_id)
        return [job.result() for job in jobs]

    def _submit(self, job: Job, outputs: queue.SimpleQueue[EngineOutput], open_jobs: dict[str, Job]) -> None:
        _when_there_is_room(lambda: self.client.submit(job.request, outputs.put))
        open_jobs[job.request_id] = job

    def _receive(self, job: Job, output: EngineOutput) -> bool:
        """Take one output; True if the engine has finished the request."""
        if job.receive(output).should_cancel:
            self.client.cancel(job.request_id, output.index)
        return job.num_running == 0

    def _stream(self, job: Job) -> Generator[TextDelta, None, None]:
        outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self._submit(job, outputs, {})
        try:
            while not job.pipelines[0].is_finished:
                delta = job.receive(outputs.get())
                if delta.token_ids or delta.text or delta.reasoning or delta.finish_reason is not None:
                    yield delta
        finally:
            if job.num_running:
                self.client.cancel(job.request_id)
