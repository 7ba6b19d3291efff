"""One open request, with its growing choices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from runtime.engine.messages import EngineOutput, EngineRequest, PrefixMiss, TokenLogprobs
from runtime.llm.outputs import CompletionOutput, Logprob, RequestOutput
from runtime.text.formats import AnswerFormat
from runtime.text.pipeline import TextDelta, TextPipeline
from runtime.text.reasoning import reasoning_start
from runtime.text.tools.table import ToolReading
from tokenizer import Tokenizer


class Job:
    """A request, and the engine's outputs for it so far."""

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
        if answer_format.reasoning and not answer_format.harmony and tokenizer is not None:
            reasoning = reasoning_start(tokenizer, prompt_token_ids, answer_format.tags)
        tools = None if answer_format.tools is None else ToolReading(answer_format.tools)
        self._new_pipeline = partial(
            TextPipeline,
            tokenizer,
            params,
            prompt_token_ids,
            reasoning=reasoning,
            tags=answer_format.tags,
            tools=tools,
            harmony=answer_format.harmony,
            template=answer_format.template,
        )
        self.pipelines = [self._new_pipeline() for _ in range(params.n)]
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached_tokens: int | None = None
        self._prefix_miss: PrefixMiss | None = None
        self._choices = [self._new_choice(index) for index in range(params.n)]

    def _new_choice(self, index: int) -> CompletionOutput:
        has_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index, logprobs=[] if has_logprobs else None, cumulative_logprob=0.0 if has_logprobs else None
        )

    def receive(self, output: EngineOutput) -> TextDelta:
        """Take one output of the engine; returns what it adds to its choice."""
        if output.finish_reason is not None:
            self.num_running -= 1
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [None if entry is None else self._by_id(entry) for entry in output.prompt_logprobs]
        if output.index == 0 and output.num_cached_tokens is not None:
            self._num_cached_tokens, self._prefix_miss = output.num_cached_tokens, output.prefix_miss
        choice = self._choices[output.index]
        if output.begins_again and choice.finish_reason is None:
            self.pipelines[output.index] = self._new_pipeline()
            choice = self._choices[output.index] = self._new_choice(output.index)
        if choice.finish_reason is None:
            choice.weight_version, choice.num_restarts = output.weight_version, output.num_restarts
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

    @property
    def is_finished(self) -> bool:
        """Whether every choice has had its last delta."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def result(self) -> RequestOutput:
        """The request's output object, which grows with the request."""
        return self._output(self._choices)

    def copy(self) -> RequestOutput:
        """A copy of the output so far."""
        return self._output(
            [
                replace(
                    choice,
                    token_ids=list(choice.token_ids),
                    logprobs=None if choice.logprobs is None else list(choice.logprobs),
                )
                for choice in self._choices
            ]
        )

    def piece(self, index: int, delta: TextDelta) -> RequestOutput:
        """An output with only what a delta has added to choice ``index``."""
        logprobs = None if delta.logprobs is None else [self._by_id(entry) for entry in delta.logprobs]
        new = replace(self._choices[index], text=delta.text, token_ids=list(delta.token_ids), logprobs=logprobs)
        return self._output([new])

    def _output(self, choices: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.request.prompt_token_ids,
            choices,
            self._prompt_logprobs,
            self._num_cached_tokens,
            self.is_finished,
            self._prefix_miss,
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
