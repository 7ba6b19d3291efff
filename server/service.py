"""What every endpoint shares: the engine, the tokenizer, the settings; and what all generations have in
common, from the model's name to the prompt's ids."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar
from uuid import uuid4

from runtime.engine.client import EngineClient
from runtime.errors import XservError
from server.bridge import LoopBridge
from server.config import ServerConfig
from server.errors import ApiError, engine_unavailable, from_engine, internal_error
from server.generation import Generation, GenerationError
from tokenizer import Tokenizer

T = TypeVar("T")

logger = logging.getLogger("xserv.server")

SMALL_BODY_BYTES = 4096
"""A body up to this size is prepared on the event loop: that takes less time than changing threads."""


@dataclass(slots=True)
class Service:
    """One server's state; lives as `app.state.service` from start to stop.

    model_name          the one name under which the model is asked for
    default_sampling    the model's own sampling defaults, by `SamplingParams`' names
    """

    client: EngineClient
    tokenizer: Tokenizer | None
    model_name: str
    default_sampling: Mapping[str, float | int]
    config: ServerConfig
    bridge: LoopBridge
    executor: ThreadPoolExecutor
    created: int
    system_fingerprint: str

    @classmethod
    def begin(
        cls,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        model_name: str,
        default_sampling: Mapping[str, float | int],
        config: ServerConfig,
    ) -> Service:
        """To be called on the event loop that will serve."""
        return cls(
            client=client,
            tokenizer=tokenizer,
            model_name=model_name,
            default_sampling=default_sampling,
            config=config,
            bridge=LoopBridge(asyncio.get_running_loop()),
            executor=ThreadPoolExecutor(config.num_tokenizer_threads, thread_name_prefix="xserv-tokenize"),
            created=int(time.time()),
            system_fingerprint=_fingerprint(client, model_name),
        )

    def end(self) -> None:
        """Ends what `begin` began. The client belongs to whoever made it."""
        self.bridge.close()
        self.executor.shutdown(wait=True, cancel_futures=True)

    def check_model(self, name: str) -> None:
        """Raises `ApiError` 404 unless `name` is the served model."""
        if name != self.model_name:
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server has {self.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def prepare(self, body_size: int, work: Callable[[], T]) -> T:
        """Runs `work` (decoding, chat template, encoding) on a thread where the body is large,
        so that no other request waits for it."""
        if body_size <= SMALL_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)

    def admit(self, generation: Generation, renamed: Mapping[str, str]) -> None:
        """Admits the generation. Raises `ApiError`; `renamed` maps the engine's field names to the
        request's."""
        try:
            generation.start()
        except XservError as error:
            raise from_engine(error, renamed) from None

    def failure(self, request_id: str, error: GenerationError) -> ApiError:
        """What the client is told of a generation that broke off; the cause goes to the log."""
        logger.error("%s broke off: %s", request_id, error)
        return engine_unavailable() if error.is_shutdown else internal_error()


def new_id(kind: str) -> str:
    """ "chatcmpl-…", "cmpl-…": unique, and nothing else."""
    return f"{kind}-{uuid4().hex}"


def _fingerprint(client: EngineClient, model_name: str) -> str:
    """Changes with whatever may change the answer to a seeded request: the release, the model, its
    numbers."""
    try:
        release = version("xserv")
    except PackageNotFoundError:  # run from a checkout that is not installed
        release = "0"
    info = client.info
    parts = (release, model_name, info.architecture, info.device, info.dtype, str(info.vocab_size))
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]
