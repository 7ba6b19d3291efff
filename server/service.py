"""The state shared by all endpoints: engine, tokenizer and settings; and the steps common to all generations, from the
model's name to the prompt's ids."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar
from uuid import uuid4

from prometheus_client import CollectorRegistry
from starlette.datastructures import State
from starlette.requests import Request

from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.grammar.compiling import GrammarChecker
from runtime.engine.grammar.matcher import LazyVocabulary
from runtime.engine.messages import AdapterRef, EngineOutput
from runtime.engine.process.client import EngineClient
from runtime.errors import XservError
from runtime.text.fill_in import fill_in_tokens
from runtime.text.formats import AnswerFormat
from runtime.text.reasoning import ReasoningEnd
from runtime.version import release
from server.code_colours import Renderer
from server.config import ServerConfig
from server.errors import (
    ApiError,
    asleep,
    broken_off,
    cancelled,
    engine_errors,
    from_engine,
    internal_error,
    invalid,
    logits_processor_failed,
    own_name,
    renamed,
    starting,
    unsatisfiable,
)
from server.loading import LoadedModel
from server.names import UNTAGGED
from server.observing.logs import FIELDS
from server.observing.meter import RequestMeter
from server.observing.metrics import Metrics
from server.pictures.reader import PictureReader
from server.requests.bridge import LoopBridge
from server.requests.call_memory import CallMemory
from server.requests.generation import Generation, GenerationError
from server.requests.structured import RequestSchemas
from server.responses_api.folder import response_folder
from server.responses_api.store import Key as ResponseKey
from server.responses_api.store import ResponseStore, Running
from server.transport.auth import ApiKeys
from server.transport.exchange import Exchange, Lifecycle

T = TypeVar("T")

logger = logging.getLogger("xserv.server")

_SIGNS_OF_PICTURES = (b"image", b"previous_response_id", b"\\u")
"""One of them is in every body that leads to pictures; JSON may write any letter as an escape."""

_SHOWN_TOKENS = 24
"""Tokens of a prompt that `--log-prompts` shows before and after its first difference from the prefix cache."""

_LOOKS_AGAIN_S = 3.0
"""How often a waiting request reads the engine's state; an engine reports that more often."""

SMALL_BODY_BYTES = 4096
"""A body up to this size is prepared on the event loop: that takes less time than changing threads."""


class AppState(State):
    """An application's state, `app.state`, from the opening of the port to its end.

    lifecycle  whether it drains, and how many requests are open
    registry   the metrics of `/metrics`; metrics: those of the model
    admin_keys  of those who may pause, and change weights
    service    of the loaded model; raises `ApiError`, 503, until then
    shared     what all models of the server share; raises `ApiError`, 503, until requests are taken
    """

    lifecycle: Lifecycle
    registry: CollectorRegistry
    metrics: Metrics
    admin_keys: ApiKeys
    service: Service
    shared: Shared

    def __getattr__(self, key: str) -> Any:
        if key in ("service", "shared") and key not in self._state:
            raise starting()
        return super().__getattr__(key)

    @property
    def found_service(self) -> Service | None:
        """The service, if there is one."""
        return self._state.get("service")

    @staticmethod
    def of(request: Request) -> AppState:
        state = request.app.state
        assert isinstance(state, AppState)
        return state


class RunningGenerations:
    """Generations by tenant and name. A name is the answer's id, the request's `request_id` or its `X-Request-Id`;
    several generations may share one of the last two. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str | None, str], list[Generation]] = {}

    def add(self, generation: Generation, tenant: str | None, names: Iterable[str]) -> None:
        """Registers it under these names until it is closed."""
        keys = {(tenant, name) for name in names}
        for key in keys:
            self._by_key.setdefault(key, []).append(generation)
        generation.on_close.append(partial(self._remove, generation, keys))

    def cancel(self, tenant: str | None, name: str) -> int:
        """Cancels the generations of this name for this tenant; returns how many."""
        found = list(self._by_key.get((tenant, name), ()))
        for generation in found:
            generation.cancel()
        return len(found)

    def cancel_any(self, names: Iterable[str]) -> int:
        """Cancels all tenants' generations of these names, or all without names; returns how many."""
        wanted = set(names)
        found = {
            id(each): each
            for (_, name), running in self._by_key.items()
            if not wanted or name in wanted
            for each in running
        }
        for generation in found.values():
            generation.cancel()
        return len(found)

    def __len__(self) -> int:
        return len(self._by_key)

    def _remove(self, generation: Generation, keys: Iterable[tuple[str | None, str]]) -> None:
        for key in keys:
            left = [other for other in self._by_key[key] if other is not generation]
            if left:
                self._by_key[key] = left
            else:
                del self._by_key[key]


class Shared:
    """State that all models of a server share. It is made on the event loop that will serve.

    running             running generations, to be cancelled by name
    responses           the store of `/v1/responses`; running_responses: those being generated
    renderer            the colours of answers' code, for the page
    """

    def __init__(self, config: ServerConfig) -> None:
        self.running = RunningGenerations()
        self.responses = ResponseStore(
            config.max_stored_responses, config.max_stored_response_bytes, config.stored_response_ttl_s,
            folder=response_folder(config),
        )  # fmt: skip
        self.running_responses: dict[ResponseKey, Running] = {}
        self.renderer = Renderer()

    def end(self) -> None:
        """Call it after all services have ended."""
        self.renderer.close()
        self.responses.close()


class Service:
    """The endpoints' shared state from the model's loading until the server stops: `app.state.service`. It is made on
    the event loop that will serve.

    model_name          the first of model_names, the model's names in requests; answers have it
    adapters            those of the model that requests may name instead
    answer_format       the parts of its answers beside content
    reasoning_end       how reasoning is closed by a budget; None if it cannot have one
    fill_in             the tokens for a text between two others; None if the model was not taught to fill in
    default_sampling    the model's own sampling defaults, by `SamplingParams`' names
    running, responses, running_responses  see `Shared`
    calls               past calls as models wrote them
    pictures            the picture reader, or None if the model reads none
    """

    def __init__(
        self,
        model: LoadedModel,
        model_names: tuple[str, ...],
        config: ServerConfig,
        state: AppState,
    ) -> None:
        self.client, self.tokenizer, self.adapters = model.client, model.tokenizer, model.adapters
        client, tokenizer, info, shared = model.client, model.tokenizer, model.client.info, state.shared
        self.model_name, self.model_names = model_names[0], model_names
        self.answer_format = AnswerFormat.of(
            tokenizer, reasoning_parser=config.reasoning_parser, tool_call_parser=config.tool_call_parser
        )
        if info.pooling.generates:
            logger.info("answers are read by %s", self.answer_format.origin)
        self.reasoning_end: ReasoningEnd | None = None
        if tokenizer is not None and self.answer_format.reasoning and not self.answer_format.harmony:
            self.reasoning_end = ReasoningEnd.of(
                tokenizer, info.architecture, config.reasoning_budget_message, self.answer_format.tags
            )
        self.fill_in = None if tokenizer is None else fill_in_tokens(tokenizer)
        self.default_sampling = model.default_sampling
        self.config = config
        self.lifecycle, self.metrics = state.lifecycle, state.metrics
        self.running, self.responses, self.running_responses = (
            shared.running,
            shared.responses,
            shared.running_responses,
        )
        self.calls = CallMemory(0 if info.exact else config.remembered_call_bytes)
        self.bridge = LoopBridge(asyncio.get_running_loop())
        self.executor = ThreadPoolExecutor(config.num_tokenizer_threads, thread_name_prefix="xserv-tokenize")
        self.grammars = GrammarChecker(LazyVocabulary(lambda: tokenizer, info.vocab_size, info.eos_token_ids))
        self.created = int(time.time())
        self.system_fingerprint = _fingerprint(client, model_names[0])
        self.pictures = None if info.images is None else PictureReader(info.images, config)
        self._has_noted_tools = False
        self.awake = asyncio.Event()
        self.awake.set()

    async def until_awake(self) -> None:
        """Waits while the engine sleeps, for `model_wait_s` at most. Raises `ApiError` 503."""
        end_s = time.monotonic() + self.config.model_wait_s
        while not self.awake.is_set():
            if (left_s := end_s - time.monotonic()) <= 0:
                raise asleep()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.awake.wait(), min(left_s, _LOOKS_AGAIN_S))
                return
            with suppress(EngineDeadError):
                if self.client.stats().sleep_level == 0:  # it was started anew
                    self.awake.set()

    def note_sleep(self, *, is_asleep: bool) -> None:
        """The engine was told to sleep, or to wake up, and has done so."""
        if is_asleep:
            self.awake.clear()
        else:
            self.awake.set()

    def note_tools(self) -> None:
        """Logs, once, that a request has tools and the model's chat template leaves them out."""
        if self.answer_format.tells_tools and self.answer_format.tools is not None and not self._has_noted_tools:
            self._has_noted_tools = True
            logger.warning(
                "the model's chat template ignores tools: a system message of the server's own tells them, and how to "
                "call them (%s)",
                self.answer_format.tools.name,
            )

    def end(self) -> None:
        """Stops the service. The caller closes the client."""
        self.bridge.close()
        if self.pictures is not None:
            self.pictures.close()
        self.executor.shutdown(wait=True, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 unless `name` is one of the served model's; None means that one. An adapter's name is
        a 400: adapters only generate."""
        if self.adapter_of(name) is not None:
            raise invalid("model", f"{name!r} is an adapter, which only generates text: name {self.model_name!r}.")

    def adapter_of(self, name: str | None) -> AdapterRef | None:
        """The adapter of this name; None for the served model's own. Raises `ApiError` 404 for other names."""
        name = None if name is None else self.own_name(name)
        adapter = self.adapters.get(name)
        if adapter is None and name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server has {self.model_name!r}"
                + (" and adapters of it" if self.adapters.all else "")
                + ".",
                param="model",
                code="model_not_found",
            )
        return adapter

    def own_name(self, name: str) -> str:
        """The served name that is meant: programs that know Ollama add the tag ":latest" to one without a tag, at all
        routes."""
        bare = name.removesuffix(UNTAGGED)
        return bare if bare != name and ":" not in bare and bare in self.all_names else name

    @property
    def all_names(self) -> tuple[str, ...]:
        """The model's names and its adapters'."""
        return (*self.model_names, *(adapter.name for adapter in self.adapters.all))

    async def check_grammar(
        self, request: Request, generation: Generation, schemas: RequestSchemas, names: Mapping[str, str]
    ) -> None:
        """Compiles the generation's grammar, unless cached, on a thread, since it may take a second. The answer's
        headers name changes to its schemas. `names` maps a chat's field names to the request's. Raises `ApiError`."""
        exchange = Exchange.of(request)
        names = {**exchange.sent, **names}
        exchange.ignored += [own_name(name, names) for name in schemas.ignored]
        exchange.closed += [own_name(name, names) for name in schemas.closed]
        grammar = generation.params.grammar
        if grammar is None or self.grammars.is_known(grammar):
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self.executor, self.grammars.check, grammar)
        except RequestError as error:
            at_fault = await loop.run_in_executor(self.executor, schemas.at_fault, self.grammars, grammar, error)
            told = at_fault or from_engine(error, {"grammar": schemas.field or "grammar"})
            raise renamed(told, names) from None

    async def prepare(self, body_size: int, work: Callable[[], T]) -> T:
        """Runs `work` (decoding, chat template, encoding) on a thread where the body is large,
        so that no other request waits for it."""
        if body_size <= SMALL_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)

    async def prepare_body(self, body: bytes, work: Callable[[], T]) -> T:
        """The same for a body. One that may have pictures, or continue a conversation with some, is prepared on the
        pictures' threads."""
        if self.pictures is None or not any(sign in body for sign in _SIGNS_OF_PICTURES):
            return await self.prepare(len(body), work)
        return await asyncio.get_running_loop().run_in_executor(self.pictures.threads, work)

    def salt_of(self, tenant: str | None, given: str | None = None) -> str | None:
        """The cache salt that separates a tenant's prefixes and pictures from others', beside the request's own."""
        return given if tenant is None or self.config.share_prefix_cache else f"{tenant}:{given or ''}"

    def admit(self, request: Request, generation: Generation, names: Mapping[str, str]) -> None:
        """Admits the generation, under its tenant's salt if there are tenants. Raises `ApiError`; `names` maps the
        engine's field names to the request's."""
        exchange = Exchange.of(request)
        exchange.generation = generation
        generation.max_kept_bytes = self.config.max_kept_output_bytes
        generation.tells_versions = bool(self.config.admin_key_files)
        with engine_errors(names):
            use = exchange.use(generation.num_prompt_tokens)
        if use is not None:
            generation.on_close.append(use.end)
        exchange.meter = generation.meter = RequestMeter(
            self.metrics.generation, generation.params, generation.arrival_time_s, use
        )
        salt = self.salt_of(exchange.tenant, generation.scheduling.cache_salt)
        generation.scheduling = replace(generation.scheduling, cache_salt=salt, holder=exchange.holder)
        generation.on_call = partial(self.calls.put, exchange.tenant)
        if self.config.log_prompts:
            self._log_prompts(generation)
            generation.on_miss = partial(self._log_difference, generation.request_id)
        try:
            generation.start()
        except XservError as error:
            raise from_engine(error, {"extra_args": "vllm_xargs", **names}) from None
        ids = (generation.request_id, exchange.given_id, generation.scheduling.given_id)
        self.running.add(generation, exchange.tenant, (each for each in ids if each is not None))

    def _log_prompts(self, generation: Generation) -> None:
        for token_ids in generation.prompts:
            text = str(token_ids) if self.tokenizer is None else self.tokenizer.decode(token_ids)
            fields = {"generation_id": generation.request_id, "prompt": repr(text)}
            logger.info("a prompt of %d tokens", len(token_ids), extra={FIELDS: fields})

    def _log_difference(self, generation_id: str, prompt_ids: list[int], output: EngineOutput) -> None:
        """Logs a prompt's text where it leaves those in the cache, and the latest other text there, of the same tenant
        and salt."""
        miss = output.prefix_miss
        assert miss is not None
        place = miss.first_difference
        parts = {
            "before": prompt_ids[max(0, place - _SHOWN_TOKENS) : place],
            "prompt_has": prompt_ids[place : place + _SHOWN_TOKENS],
            "cache_has": output.cached_ids,
        }
        fields = {"generation_id": generation_id, "prefix_miss": miss.reason, "first_difference": place}
        fields |= {name: repr(self._shown(ids)) for name, ids in parts.items()}
        logger.info("reused %d of %d tokens", output.num_cached_tokens, len(prompt_ids), extra={FIELDS: fields})

    def _shown(self, token_ids: list[int]) -> str:
        """The text of token ids; each run of a picture's tokens, whose ids in the cache are of no vocabulary, as
        "[picture]"."""
        if self.tokenizer is None:
            return str(token_ids)
        runs = groupby(token_ids, lambda each: 0 <= each < self.client.info.vocab_size)
        return "".join(self.tokenizer.decode(list(ids)) if is_text else "[picture]" for is_text, ids in runs)

    def failure(self, request_id: str, error: GenerationError) -> ApiError:
        """The client's error for a generation that failed; the cause goes to the log."""
        if error.is_cancelled:
            return cancelled()
        if error.code == "unsatisfiable_request":
            return unsatisfiable()
        if error.code == "logits_processor_failed":
            return logits_processor_failed(str(error))
        if error.code == "invalid_extra_args":
            return invalid("vllm_xargs", str(error).replace("extra_args", "vllm_xargs", 1), error.code)
        if error.code is not None:
            return invalid(None, str(error), error.code)
        logger.error("%s broke off: %s", request_id, error)
        if not error.is_shutdown:
            return internal_error()
        try:
            self.client.stats()
        except EngineDeadError as dead:
            return broken_off(dead.retry_after_s)
        return broken_off(1)


def new_id(kind: str) -> str:
    """A unique id: "chatcmpl-…", "cmpl-…"."""
    return f"{kind}-{uuid4().hex}"


def _fingerprint(client: EngineClient, model_name: str) -> str:
    """A hash of everything that may change a seeded request's answer: the release, the model, its numbers."""
    info = client.info
    parts = (release(), model_name, info.architecture, info.device, info.dtype, info.quantization, str(info.vocab_size))
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]
