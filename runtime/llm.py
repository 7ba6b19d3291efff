"""``LLM``: a model in this process, for scripts and notebooks.

    from runtime import LLM, SamplingParams

    with LLM() as llm:
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=20))
        print(outputs[0].outputs[0].text)

It is one more user of ``EngineClient``: prompts become ids here, ids become text here.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from runtime.engine.admission import prepare
from runtime.engine.checks import is_integer
from runtime.engine.config import EngineSettings
from runtime.engine.errors import QueueFullError, RequestError
from runtime.engine.grammar.compiler import GrammarChecker
from runtime.engine.grammar.vocabulary import LazyVocabulary
from runtime.engine.messages import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    RequestTimes,
    TokenLogprobs,
)
from runtime.engine.process.client import EngineClient, ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.text.chat import chat_prompt
from runtime.text.formats import AnswerFormat
from runtime.text.load import load_tokenizer, read_chat_template, read_tokenizer
from runtime.text.pipeline import TextDelta, TextPipeline
from runtime.text.reasoning import reasoning_start

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. Such a mapping may also have
``EngineRequest``'s "cache_salt", "priority", "ttft_target_s" and "tpot_target_s"."""

_SCHEDULING_KEYS = ("cache_salt", "priority", "ttft_target_s", "tpot_target_s")


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token under the raw logits; ``rank`` 1 is the most probable."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One choice.

    logprobs            for each token of ``token_ids``, the token and its alternatives by id; None if not
                        asked for
    cumulative_logprob  the sum over ``token_ids``; None if not asked for
    finish_reason       "stop", "length", "abort", or "error" (then ``error`` says what happened)
    stop_reason         the stop string or stop id; None for EOS
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    times: RequestTimes | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its choices. ``prompt`` is None when ids were given; ``prompt_logprobs[0]`` is None;
    ``num_cached_tokens`` of the prompt were in the prefix cache (None: nothing was computed)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None


class LLM:
    """A loaded model with its engine in a thread of this process; a context manager.

    model      folder, hub id, or None: the bundled model
    tokenizer  a ``Tokenizer``, a folder or a GGUF file; None: the model's. A model without one serves token ids.
    chat_template  a Jinja template, or a file that holds one, instead of the tokenizer's own

    settings   ``runtime.engine.config.EngineConfig``'s, device and dtype among them; its seed is 0 here unless given
               (None: fresh ones each run)

    Raises ``ModelLoadError``,
    ``TokenizerFileError``, ``DeviceError``, ``RequestError``.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        chat_template: str | None = None,
        skip_tokenizer_init: bool = False,
        **settings: Unpack[EngineSettings],
    ) -> None:
        from runtime.engine.make_engine import build_engine

        settings.setdefault("seed", 0)
        template = read_chat_template(chat_template)
        if template is not None and not (tokenizer is None or isinstance(tokenizer, (str, Path))):
            raise RequestError("chat_template is given beside a Tokenizer, which has its own", param="chat_template")
        engine = build_engine(model, **settings)
        self.tokenizer: Tokenizer | None
        if skip_tokenizer_init:
            self.tokenizer = None
        elif tokenizer is None:
            self.tokenizer = load_tokenizer(engine.info.model_path, template)
        elif isinstance(tokenizer, (str, Path)):
            self.tokenizer = read_tokenizer(tokenizer, template)
        else:
            self.tokenizer = tokenizer
        known_tokenizer = self.tokenizer  # not through self, which the engine would keep alive
        vocabulary = LazyVocabulary(lambda: known_tokenizer, engine.info.vocab_size, engine.info.eos_token_ids)
        engine.vocabulary = vocabulary
        self._grammars = GrammarChecker(vocabulary)
        self.client: EngineClient = ThreadEngineClient(engine)
        self._request_ids = itertools.count()
        self._finalizer = weakref.finalize(self, self.client.close)

    def close(self) -> None:
        """Stop the engine. May be called again."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def default_sampling_params(self) -> SamplingParams:
        """What the model's ``generation_config.json`` recommends, over ``SamplingParams``' defaults."""
        from runtime.engine.recommended_sampling import recommended_sampling

        return SamplingParams(**recommended_sampling(self.client.info.model_path))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, all together; the results are in the prompts' order.

        prompts   one prompt or a list of them (a flat list of ints is one prompt)
        params    one for all, or one a prompt; None: ``default_sampling_params()``
        use_tqdm  show progress on stderr, when that is a terminal and there is more than one prompt

        Every prompt and its parameters are checked before the first is computed. Raises ``RequestError``,
        ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        listed = _as_list(prompts)
        jobs = [self._job(prompt, each) for prompt, each in zip(listed, self._params_for(listed, params))]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: see ``chat_prompt``, ``generate`` and ``EngineRequest``."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [
            self.chat_prompt(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **template_kwargs,
            )
            for conversation in conversations
        ]
        scheduling = {"cache_salt": cache_salt, "priority": priority}
        return self.generate(
            [{"prompt_token_ids": ids, **scheduling} for ids in prompts], params, use_tqdm=use_tqdm
        )

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """The token ids of a conversation, by the model's chat template. Raises ``RequestError``."""
        return chat_prompt(
            self.tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **template_kwargs,
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        answer_format: AnswerFormat | None = None,
    ) -> Generator[TextDelta, None, None]:
        """Complete one prompt, with ``n=1``, and yield what comes as it comes; the last delta has a
        ``finish_reason``. With an ``answer_format``, reasoning and tool calls are told from the text. The request
        starts with the first ``next``; closing the iterator cancels it. Raises as ``generate`` does."""
        job = self._job(prompt, params or self.default_sampling_params(), answer_format)
        if job.params.n != 1:
            raise RequestError(f"stream has one choice, got n={job.params.n}", param="n")
        return self._stream(job)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The raw logits after each of 1 … ``max_model_len`` tokens: ``[num_tokens, vocab_size]`` float32.

        Raises ``RequestError``, ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        return self.client.logits(token_ids)

    def _job(self, prompt: Prompt, params: SamplingParams, answer_format: AnswerFormat | None = None) -> _Job:
        text, token_ids = self._encode(prompt)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}", param="params")
        self._grammars.check(params.grammar)
        request = EngineRequest(
            request_id=f"llm-{next(self._request_ids)}",
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self.client.info.eos_token_ids,
            **_scheduling_of(prompt),
        )
        return _Job(request, text, self.tokenizer, answer_format or AnswerFormat())

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if not isinstance(prompt.get("prompt"), str):
                raise RequestError("a prompt needs 'prompt_token_ids' or the text 'prompt'", param="prompt")
            return self._encode(prompt["prompt"])
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer: give token ids instead of text", param="prompt")
        return prompt, self.tokenizer.encode(prompt)

    def _params_for(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Iterable[SamplingParams]:
        if params is None:
            params = self.default_sampling_params()
        if isinstance(params, SamplingParams):
            return itertools.repeat(params, len(prompts))
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(params)} params", param="params")
        return params

    def _run(self, jobs: list[_Job], use_tqdm: bool) -> list[RequestOutput]:
        outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        open_jobs: dict[str, _Job] = {}
        waiting = iter(jobs)
        window = self.client.info.max_waiting
        for job in jobs:
            prepare(job.request, self.client.info)
        try:
            with _progress(len(jobs), use_tqdm) as advance:
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
        finally:  # an interrupt, or a prompt that was refused
            for request_id in open_jobs:
                self.client.cancel(request_id)
        return [job.result() for job in jobs]

    def _submit(
        self, job: _Job, outputs: queue.SimpleQueue[EngineOutput], open_jobs: dict[str, _Job]
    ) -> None:
        while True:
            try:
                self.client.submit(job.request, outputs.put)
            except QueueFullError as error:  # others use the engine too
                time.sleep(error.retry_after_s)
            else:
                open_jobs[job.request_id] = job
                return

    def _receive(self, job: _Job, output: EngineOutput) -> bool:
        """Take one output; True when the engine is done with the request."""
        if job.receive(output).should_cancel:
            self.client.cancel(job.request_id, output.index)
        return job.num_running == 0

    def _stream(self, job: _Job) -> Generator[TextDelta, None, None]:
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


class _Job:
    """One request on its way: its choices as they grow."""

    def __init__(
        self, request: EngineRequest, prompt: str | None, tokenizer: Tokenizer | None, answer_format: AnswerFormat
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.params = params
        self.prompt = prompt
        self.num_running = params.n
        prompt_token_ids = request.prompt_token_ids
        reasoning = None
        if answer_format.reasoning and tokenizer is not None:
            reasoning = reasoning_start(tokenizer, prompt_token_ids)
        self.pipelines = [
            TextPipeline(tokenizer, params, prompt_token_ids, reasoning=reasoning, tools=answer_format.tools)
            for _ in range(params.n)
        ]
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached_tokens: int | None = None
        has_logprobs = params.logprobs is not None
        self._choices = [
            CompletionOutput(
                index,
                logprobs=[] if has_logprobs else None,
                cumulative_logprob=0.0 if has_logprobs else None,
            )
            for index in range(params.n)
        ]

    def receive(self, output: EngineOutput) -> TextDelta:
        """Take one output of the engine; what it adds to its choice."""
        if output.finish_reason is not None:
            self.num_running -= 1
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [
                None if entry is None else self._by_id(entry) for entry in output.prompt_logprobs
            ]
        if output.index == 0 and output.num_cached_tokens is not None:
            self._num_cached_tokens = output.num_cached_tokens
        choice = self._choices[output.index]
        if output.times is not None:
            choice.times = output.times
        delta = self.pipelines[output.index].push(output)
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        for entry in delta.logprobs or ():
            assert choice.logprobs is not None
            assert choice.cumulative_logprob is not None
            choice.logprobs.append(self._by_id(entry))
            choice.cumulative_logprob += entry.logprob
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            choice.error = output.error
        return delta

    def result(self) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.request.prompt_token_ids,
            self._choices,
            self._prompt_logprobs,
            self._num_cached_tokens,
        )

    def _by_id(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token itself first, then the alternatives, most probable first."""
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            found.setdefault(token_id, Logprob(logprob, rank, self._token_text(token_id)))
        return found

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None or not self.params.detokenize:
            return None
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _scheduling_of(prompt: Prompt) -> dict[str, Any]:
    """What a prompt that is a mapping says of its turn and its prefix. Raises ``RequestError`` for unknown keys."""
    if not isinstance(prompt, Mapping):
        return {}
    unknown = prompt.keys() - {"prompt", "prompt_token_ids", *_SCHEDULING_KEYS}
    if unknown:
        raise RequestError(f"a prompt has no {sorted(map(str, unknown))[0]!r}", param="prompt")
    return {name: prompt[name] for name in _SCHEDULING_KEYS if name in prompt}


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(is_integer(item) for item in listed):
        return [listed]
    for item in listed:
        if not isinstance(item, (str, Mapping)) and not hasattr(item, "__iter__"):
            raise RequestError(
                f"a prompt is a text or a list of token ids, got {item!r:.80}", param="prompts"
            )
    return listed


@contextlib.contextmanager
def _progress(total: int, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr that each call advances by one; nothing where nobody would see it."""
    import sys

    if not is_wanted or total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("Prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
