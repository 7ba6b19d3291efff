"""`POST /infill`: the text between two others in the shapes of llama.cpp's server, which editors' plug-ins speak."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from server.errors import invalid
from server.openai_api.completions import fill_in_ends
from server.openai_api.schema import CompletionRequest, GenerationRequest
from server.requests.answering import Answer, Prepared, answered
from server.requests.generation import Generation, Piece, Scheduling
from server.requests.prompt import infill_prompt
from server.requests.sampling import completion_params
from server.requests.structured import RequestSchemas, answer_grammar
from server.service import Service, new_id
from server.transport.body import Body, decode_body
from server.transport.sse import frame


class InfillFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text of another file, or of another place."""

    text: str
    filename: str | None = None


class InfillRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /infill`.

    input_prefix, input_suffix  the texts around the answer
    prompt        follows `input_prefix`: what has been typed
    input_extra   files that the model reads first
    max_tokens    default: to the context's end; 0: the prompt is only computed, for its cache
    """

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str | None = None
    input_extra: Annotated[list[InfillFile], msgspec.Meta(max_length=1024)] | None = None


class InfillTimings(msgspec.Struct):
    """Numbers of tokens, and milliseconds; those of the prompt are until the first token."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


class InfillAnswer(msgspec.Struct, omit_defaults=True):
    """An answer, or a piece of a stream: `stop` and what follows it are in the last one.

    stop_type  "eos", "word" for a stop string, "limit"
    """

    content: str = msgspec.field(default_factory=str)
    stop: bool = msgspec.field(default_factory=bool)
    index: int = 0
    model: str = ""
    tokens: list[int] = []
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    stop_type: Literal["none", "eos", "word", "limit"] = "none"
    stopping_word: str = ""
    truncated: bool = False
    timings: InfillTimings | None = None


@dataclass(slots=True, kw_only=True)
class _Infill(Answer):
    drops_output: bool
    has_token_ids: bool
    begun_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: InfillAnswer | None = None

    def spelled(self, events: Iterable[Any]) -> bytes:
        return b"".join(map(frame, events))

    def events(self, piece: Piece) -> Iterator[InfillAnswer]:
        delta = piece.delta
        self.first_s = self.first_s or time.monotonic()
        text, token_ids = ("", []) if self.drops_output else (delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            is_word = isinstance(delta.stop_reason, str)
            kind: Any = "word" if is_word else "eos" if delta.finish_reason == "stop" else "limit"
            self.last = InfillAnswer(
                stop=True,
                stop_type=kind,
                stopping_word=str(delta.stop_reason) if is_word else "",
            )
        self.texts.append(text)
        self.token_ids += token_ids
        if text or token_ids:
            yield InfillAnswer(text, tokens=token_ids if self.has_token_ids else [])

    def ends(self) -> Iterator[InfillAnswer]:
        last, generation = self.last, self.generation
        assert last is not None
        assert self.first_s is not None
        num_predicted = 0 if self.drops_output else generation.num_completion_tokens
        last.model = self.asked.model_name
        last.tokens_predicted, last.tokens_evaluated = num_predicted, generation.num_prompt_tokens
        last.tokens_cached = generation.num_cached_tokens
        last.timings = InfillTimings(
            generation.num_prompt_tokens - generation.num_cached_tokens,
            (self.first_s - self.begun_s) * 1e3,
            num_predicted,
            (time.monotonic() - self.first_s) * 1e3,
        )
        yield last

    async def whole(self) -> InfillAnswer:
        deque(self.ends(), maxlen=0)
        assert self.last is not None
        self.last.content = "".join(self.texts)
        self.last.tokens = self.token_ids if self.has_token_ids else []
        return self.last


def _prepare(service: Service, body: Body) -> _Infill:
    exchange = body.exchange
    asked = decode_body(body, InfillRequest, service.config)
    adapter = service.adapter_of(asked.model)
    if asked.n not in (None, 1):
        raise invalid("n", f"n must be 1, got {asked.n}.")
    for name in ("stream_options", "echo", "truncate_prompt_tokens", "prompt_logprobs"):
        if getattr(asked, name):
            raise invalid(name, f"Unsupported parameter: {name} (not in this API).", "unsupported_parameter")
    schemas = RequestSchemas(closes=service.config.close_schemas)
    grammar = answer_grammar(asked, schemas)
    common = {name: getattr(asked, name) for name in GenerationRequest.__struct_fields__}
    common["max_tokens"] = -1 if asked.max_tokens is None else asked.max_tokens
    params = completion_params(
        CompletionRequest(prompt="", **common), service.default_sampling, service.tokenizer, grammar=grammar
    )
    files = [(each.filename, each.text) for each in asked.input_extra or ()]
    before = asked.input_prefix + (asked.prompt or "")
    sent_name = "input_prefix" if asked.input_prefix or not asked.prompt else "prompt"
    generation = Generation(
        client=service.client,
        bridge=service.bridge,
        tokenizer=service.tokenizer,
        request_id=new_id("infill"),
        prompts=[infill_prompt(service, before, asked.input_suffix, files, sent_name)],
        params=params,
        arrival_time_s=exchange.arrival_s,
        scheduling=Scheduling.of(asked, adapter),
        eos_token_ids=fill_in_ends(service),
    )
    return _Infill(
        asked=Prepared(service=service, generation=generation, schemas=schemas, is_streamed=bool(asked.stream)),
        names={"messages": sent_name, "prompt": sent_name},
        drops_output=asked.max_tokens == 0,
        has_token_ids=bool(asked.return_token_ids),
    )


create_infill = answered(_prepare)
