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
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from runtime.engine.admission import check_generates, prepare
from runtime.engine.checks import check_one_of, is_number
from runtime.engine.errors import QueueFullError, RequestError
from runtime.engine.messages import EngineOutput
from runtime.engine.option_names import known_options
from runtime.engine.sampling_params import SamplingParams
from runtime.llm.beam_search import BeamSearch, BeamSearchParams
from runtime.llm.decisions import (
    AskedQuestion,
    Conversation,
    DecisionInput,
    Decisions,
    asked_in,
    questions_of,
)
from runtime.llm.job import Job
from runtime.llm.loaded_model import AskedPooling, LoadedModel
from runtime.llm.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    ClassificationRequestOutput,
    DecisionOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from runtime.llm.progress import progress
from runtime.llm.prompts import LoRARequest, Prompt, as_list, conversations_of, one_each, take_images, texts_of
from runtime.pooling import POOLING_TASKS, PoolingTask, activated
from runtime.text.classifier_decisions import read_by_classifier, reading_of, text_of_input
from runtime.text.decisions import Options, Question, content_start, options_by_question
from runtime.text.formats import AnswerFormat, end_ids
from runtime.text.pipeline import TextDelta
from tokenizer import Tokenizer

T = TypeVar("T")


def _when_there_is_room(call: Callable[[], T]) -> T:
    """The call's result. It is made again if the queue is full, since other clients use the engine, too."""
    while True:
        try:
            return call()
        except QueueFullError as error:
            time.sleep(error.retry_after_s)


def _if_there_is_room(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except QueueFullError:
        return None


class LLM(LoadedModel):
    """Calls block until their results are complete; they may come from several threads."""

    @known_options()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch; the results are in the prompts' order.

        prompts          one prompt (or a flat list of ints), or a list of them
        sampling_params  one for all, or one a prompt; by default ``default_sampling_params()``
        lora_request     an adapter for all, or one or None a prompt; needs ``enable_lora``
        use_tqdm         show the progress of several prompts, if stderr is a terminal

        Every prompt and its parameters are checked before the first is computed. Raises ``RequestError``,
        ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        return self._run(self._jobs(as_list(prompts), sampling_params, lora_request=lora_request), use_tqdm)

    def _jobs(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        template: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[Job]:
        asked: Any = [None] * len(prompts) if lora_request is None else lora_request
        adapters = [self._adapter_of(each) for each in one_each("lora_request", prompts, asked, LoRARequest)]
        chosen = self.default_sampling_params() if sampling_params is None else sampling_params
        each = one_each("sampling_params", prompts, chosen, SamplingParams)
        return [
            self._job(prompt, params, template=template, adapter=adapter, restarts=True)
            for prompt, params, adapter in zip(prompts, each, adapters)
        ]

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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: see ``chat_prompt`` and ``generate``. Messages may be objects of an SDK,
        and their contents lists of parts in the forms of OpenAI, Anthropic and transformers;
        ``{"type": "image", "image": ...}`` takes the values of a prompt's "images"."""
        check_generates(self.client.info)
        conversations = conversations_of("messages", messages)
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
        return self._run(self._jobs(asked, sampling_params, chat_template, lora_request), use_tqdm)

    @known_options()
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        answer_format: AnswerFormat | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Generator[TextDelta, None, None]:
        """Complete one prompt, with ``n=1``, and yield its deltas as they come; the last one has a ``finish_reason``.
        With an ``answer_format``, reasoning and tool calls are parsed from the text. The request starts with the first
        ``next``; closing the iterator cancels it. Raises as ``generate`` does."""
        adapter = self._adapter_of(lora_request)
        job = self._job(prompt, sampling_params or self.default_sampling_params(), answer_format, adapter=adapter)
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
        pooling: str | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The hidden states of prompts, images included, after the final norm, one vector a prompt, in their order.

        pooling      "cls", "last", "mean", "max", "weighted_mean" or "mean_sqrt_len"; by default the model's own, a
                     decoder's is "last"
        normalize    make each vector's length one; default: the folder's, else true
        prompt_name  the model's prompt before each text ("" for none)
        dimensions   only the first so many numbers, at length one
        truncate_prompt_tokens  most tokens of a text, special ones included; -1: all that fit

        Raises ``RequestError``, ``EngineDeadError``, ``EmbeddingError``.
        """
        asked = [self._asked_embedding(prompt, prompt_name, truncate_prompt_tokens) for prompt in as_list(prompts)]
        found = self._pooled(asked, pooling, "embed", use_tqdm)
        return [self._embedded(each, vector, normalize, dimensions) for each, vector in zip(asked, found, strict=True)]

    @known_options()
    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_activation: bool = True,
        truncate_prompt_tokens: int | None = None, use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:  # fmt: skip
        """The labels' probabilities by a model with a classifier, or its scores if ``use_activation`` is False.
        ``truncate_prompt_tokens`` as in ``embed``.

        Raises ``RequestError``, ``EngineDeadError``, ``EmbeddingError``.
        """
        asked = [self._asked_embedding(prompt, "", truncate_prompt_tokens) for prompt in as_list(prompts)]
        return [
            ClassificationRequestOutput(self._new_id(), each.text, each.token_ids, ClassificationOutput(probs))
            for each, probs in zip(asked, self._scores(asked, use_activation, use_tqdm), strict=True)
        ]

    @known_options()
    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_activation: bool = True,
        truncate_prompt_tokens: int | None = None, use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        """The relevance of the second texts to the first, which is one or as many, by a model that was trained to rank.
        ``truncate_prompt_tokens``: a pair has at most so many, its longer text is cut; -1: all that fit.

        Raises ``RequestError``, ``EngineDeadError``, ``EmbeddingError``.
        """
        firsts, seconds = (texts_of(name, each) for name, each in (("data_1", data_1), ("data_2", data_2)))
        if len(firsts) not in (1, len(seconds)):
            raise RequestError(
                f"data_1 must have one text, or as many as data_2: they have {len(firsts)} and {len(seconds)}",
                param="data_1",
            )
        if not self.client.info.pooling.scores_pairs:
            info = self.client.info
            raise RequestError(f"{info.architecture} cannot rank: {info.pooling.why_no_scores}", param="data_1")
        pairs = zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)
        asked = [self._asked_pair(*pair, truncate_prompt_tokens) for pair in pairs]
        return [
            ScoringRequestOutput(self._new_id(), None, each.token_ids, ScoringOutput(probs[0]))
            for each, probs in zip(asked, self._scores(asked, use_activation, use_tqdm), strict=True)
        ]

    @known_options()
    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, pooling_task: str = "embed", use_tqdm: bool = True
    ) -> list[PoolingRequestOutput]:
        """Vectors ("embed") or labels' probabilities ("classify") of prompts, or of each token ("token_embed",
        "token_classify"; the span's scores by a model that answers questions), by vLLM's names. A pair of texts is
        ``{"prompt": first, "text_pair": second}``.

        Raises ``RequestError``, ``EngineDeadError``, ``EmbeddingError``.
        """
        check_one_of("pooling_task", pooling_task, POOLING_TASKS)
        task, embeds = cast(PoolingTask, pooling_task), pooling_task.endswith("embed")
        asked = [self._asked_embedding(prompt, None if embeds else "") for prompt in as_list(prompts)]
        rows = self._pooled(asked, None, task, use_tqdm)
        activation = self.client.info.pooling.activation
        found = [(self._shaped(each, None, None) if embeds else activated(each, activation)).tolist() for each in rows]
        return [
            PoolingRequestOutput(self._new_id(), each.text, each.token_ids, PoolingOutput(numbers))
            for each, numbers in zip(asked, found, strict=True)
        ]

    @known_options()
    def decide(
        self, inputs: DecisionInput | Sequence[DecisionInput], questions: Sequence[Any], *,
        refusal_threshold: float = 0.0, cache_salt: str | None = None, use_tqdm: bool = True,
    ) -> list[DecisionOutput]:  # fmt: skip
        """The probabilities of answers to questions about each input; no text is generated. An input's tokens are
        computed once for all of its questions.

        inputs             a text or a conversation, or a list of them
        questions          1 to 400, in the form of OpenAI's Decisions API: dicts with a ``type``, "predicate", "choice"
                           (with ``choices``) or "score" (with ``levels``), with ``instructions`` and perhaps a
                           ``name``. A classifier answers those that its labels fit (docs/server.md)
        refusal_threshold  a refusal answers a question whose labels together have less probability

        Raises ``RequestError``, ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        if not (is_number(refusal_threshold) and 0 <= refusal_threshold <= 1):
            problem = f"refusal_threshold must be from 0 to 1, got {refusal_threshold!r:.80}"
            raise RequestError(problem, param="refusal_threshold")
        asked, tokenizer = questions_of(questions), self.get_tokenizer()
        conversations = conversations_of("inputs", inputs, takes_texts=True)
        if not self.client.info.pooling.generates and self.client.info.pooling.labels:
            if refusal_threshold:
                problem = "refusal_threshold is for a model that chats: a classifier always answers"
                raise RequestError(problem, param="refusal_threshold")
            return [self._classified(asked, each, tokenizer, use_tqdm) for each in conversations]
        check_generates(self.client.info)
        ends = end_ids(self._answer_format, tokenizer, self.client.info.eos_token_ids)
        options = options_by_question(asked, tokenizer, ends)
        prompts = [
            [
                self._decision(asked_in(each, question, own, f"questions[{index}]"), own, cache_salt)
                for index, (question, own) in enumerate(zip(asked, options, strict=True))
            ]
            for each in conversations
        ]
        decisions = Decisions(asked, prompts)
        decisions.ask(lambda given, params: self._run(self._jobs(given, params), use_tqdm))
        return decisions.outputs(self._new_id, refusal_threshold)

    def _classified(
        self, questions: Sequence[Question], messages: Conversation, tokenizer: Tokenizer, use_tqdm: bool
    ) -> DecisionOutput:  # fmt: skip
        """A classifier's answers about an input."""
        pooling, text = self.client.info.pooling, text_of_input(messages, "inputs")
        readings = [reading_of(each, text, pooling, f"questions[{at}]") for at, each in enumerate(questions)]
        rows = [read_by_classifier(tokenizer, pooling, *pair) for reading in readings for pair in reading.pairs]
        asked = [AskedPooling(None, ids, (), None, second_from) for ids, second_from in rows]
        scores = iter(self._pooled(asked, None, "classify", use_tqdm))
        answers = [reading.answer([next(scores) for _ in reading.pairs], pooling) for reading in readings]
        return DecisionOutput(self._new_id(), answers, sum(len(ids) for ids, _ in rows), 0)

    def _decision(self, messages: Conversation, options: Options, cache_salt: str | None) -> AskedQuestion:
        """The prompt of a conversation that ends with a question."""
        tokenizer = self.get_tokenizer()
        plain, images = take_images(messages, reads_images=self.client.info.images is not None)
        thinks = tokenizer.has_chat_template and "enable_thinking" in tokenizer.chat_template()
        ids = self.chat_prompt(plain, chat_template_kwargs={"enable_thinking": False} if thinks else None)
        ids += content_start(tokenizer, self._answer_format, ids)
        return AskedQuestion({"prompt_token_ids": ids, "images": images, "cache_salt": cache_salt}, options)

    def _scores(self, asked: Sequence[AskedPooling], use_activation: bool, use_tqdm: bool) -> list[list[float]]:
        """The labels' scores of each."""
        activation = self.client.info.pooling.activation if use_activation else "identity"
        return [activated(scores, activation).tolist() for scores in self._pooled(asked, None, "classify", use_tqdm)]

    def _pooled(
        self, asked: Sequence[AskedPooling], pooling: str | None, task: PoolingTask, use_tqdm: bool
    ) -> list[NDArray[np.float32]]:  # fmt: skip
        """The engine's result of each, in their order."""
        waiting: list[Future[NDArray[np.float32]]] = []
        found: list[NDArray[np.float32]] = []
        try:
            if len(asked) == 1 and (lone := self.client.embed_here(asked[0].request(pooling, task))) is not None:
                return [lone]
            with progress("Prompts", len(asked), use_tqdm) as advance:

                def take_next() -> None:
                    found.append(waiting[len(found)].result())
                    advance()

                for each in asked:
                    start = partial(self.client.embed, each.request(pooling, task))
                    while (future := _if_there_is_room(start)) is None:
                        if len(found) < len(waiting):
                            take_next()
                        else:  # the queue is full of others'
                            future = _when_there_is_room(start)
                            break
                    waiting.append(future)
                while len(found) < len(waiting):
                    take_next()
        finally:
            for future in waiting:
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
        """The ``params.beam_width`` most probable continuations of each prompt, best first.

        concurrency_limit  prompts at once, by default all

        The search is that of transformers' ``generate(num_beams=...)``: the best ``beam_width`` candidates that end
        are kept by ``cum_logprob / num_new_tokens ** length_penalty`` (vLLM's length counts the prompt), the best
        others continue, until none of these could be better.
        Raises ``RequestError``, ``ContextLengthExceededError``, ``EngineDeadError``.
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
                    step = [self._job(prompt, part[0].step_params, restarts=True) for prompt in prompts_of_step]
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
