"""Waits for an engine that starts, and loads what the server needs with it: tokenizer, sampling defaults, adapters."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from models.checkpoints.model_files import open_model
from models.configuration.generation_config import recommended_sampling
from runtime.device.device import Device
from runtime.engine.make_client import StartingClient
from runtime.engine.messages import EngineOutput, EngineRequest, PoolingRequest
from runtime.engine.process.client import EngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import XservError
from runtime.pooling import PoolingTask
from runtime.text.load import load_tokenizer, tokenizer_of
from server.adapters import Adapters
from server.config import ServerConfig
from tokenizer import Tokenizer
from tokenizer import warm_up as loops


class TokenizerAhead:
    """A model's tokenizer, which is read and tried on a thread of its own while the engine starts. If it needs compiled
    loops that are not on disk yet, it is read when it is asked for: on the cpu the engine's process compiles them first
    (`compile_ahead`). ``path`` is the model's, None for one that is still to be downloaded."""

    def __init__(self, path: Path | None, chat_template: str | None, device: str) -> None:
        self._path, self._chat_template, self._device = path, chat_template, device
        self._read: Future[tuple[Tokenizer | None] | None] = Future()
        threading.Thread(target=self._run, name="tokenizer", daemon=True).start()

    def tokenizer(self, folder: Path) -> Tokenizer | None:
        """Waits for it, or reads it, of the folder that the engine has loaded. Raises as `load_tokenizer`."""
        read = self._read.result()
        return load_tokenizer(folder, self._chat_template) if read is None else read[0]

    def _run(self) -> None:
        try:
            self._read.set_result(None if self._path is None else self._found(self._path))
        except BaseException as error:
            self._read.set_exception(error)

    def _found(self, path: Path) -> tuple[Tokenizer | None] | None:
        files = open_model(path).tokenizer_files()
        if files is None:
            return (None,)
        if loops.has_loops(files) and not loops.is_compiled() and Device.parse(self._device).kind == "cpu":
            return None
        tokenizer = tokenizer_of(files, self._chat_template)
        tokenizer.encode("a")
        return (tokenizer,)


class ServerStartError(XservError):
    """The address cannot be listened on, or the model cannot run."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine's client and the model's files that the server reads.

    tokenizer         None if prompts and answers are token ids
    default_sampling  the model's own defaults, by `SamplingParams`' names
    """

    client: EngineClient
    tokenizer: Tokenizer | None
    default_sampling: Mapping[str, float | int]
    adapters: Adapters


def load(
    engine: StartingClient, model_names: Sequence[str], config: ServerConfig, chat_template: str | None = None,
    ahead: TokenizerAhead | None = None,
) -> LoadedModel:  # fmt: skip
    """Waits for the engine and its first answer; the tokenizer may be read already. Raises the errors of
    `StartingClient.wait`, `load_tokenizer`, `warm_up` and `Adapters.of`."""
    client = engine.wait()
    folder = Path(client.info.model_path)
    tokenizer = load_tokenizer(folder, chat_template) if ahead is None else ahead.tokenizer(folder)
    warm_up(client)
    adapters = Adapters.of(client, model_names, config)
    return LoadedModel(client, tokenizer, recommended_sampling(folder), adapters)


def warm_up(client: EngineClient) -> None:
    """Runs one short request, an embedding where the model writes no text, so that kernels are compiled before the
    first user's, and a model that cannot run fails at once. Raises `ServerStartError`."""
    outputs: SimpleQueue[EngineOutput] = SimpleQueue()
    prompt_length = max(1, min(4, client.info.max_model_len - 2))
    if not client.info.pooling.generates:
        try:
            task: PoolingTask = "classify" if client.info.pooling.labels else "embed"
            client.embed(PoolingRequest([0] * prompt_length, task=task)).result()
        except XservError as error:
            raise ServerStartError(f"the model failed on its first text: {error}") from error
        return
    request = EngineRequest(
        request_id="warm-up",
        prompt_token_ids=[0] * prompt_length,
        params=SamplingParams(max_tokens=2, seed=0, ignore_eos=True, detokenize=False),
    )
    client.submit(request, outputs.put)
    while (output := outputs.get()).finish_reason is None:
        pass
    if output.finish_reason != "length":
        raise ServerStartError("the model failed on its first request; see the log")
