"""Two models that differ in their numbers, and engines over them."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from runtime.engine.config import EngineConfig
from runtime.engine.make_engine import engine_of
from runtime.engine.messages import AdapterRef, EngineOutput, EngineRequest
from runtime.engine.process.client import EngineClient
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.weights.commands import Command, EngineCondition
from tests.models.folders import load_golden, write_model

CASE = "qwen3_odd"
TIMEOUT_S = 600.0  # an emulated GPU on a busy machine
USUAL: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8, "num_blocks": 64, "seed": 0,
    "device": "cpu",
}  # fmt: skip


def write_pair(root: Path, case: str, stored_as: str = "F32") -> tuple[Path, Path]:
    """The folders `old` and `new` of a golden's config."""
    golden = load_golden(case)
    other = dataclasses.replace(golden, seed=golden.seed + 1)
    return write_model(root / "old", golden, stored_as), write_model(root / "new", other, stored_as)


def prompt_of(case: str) -> list[int]:
    return load_golden(case).prompt_ids[:6]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("weights"), CASE)


@pytest.fixture(scope="module")
def answers(folders: tuple[Path, Path]) -> dict[str, Any]:
    """The answers of engines that run alone, by version of the weights: "0" and "new"."""
    found = {}
    for version, folder in zip(("0", "new"), folders, strict=True):
        client = opened(folder)
        found[version] = Asked(client, "alone", prompt_of(CASE)).answer().tokens
        client.close()
    assert found["0"] != found["new"]
    return found


def told(client: EngineClient, command: Command) -> EngineCondition:
    return EngineCondition.of(client.order(command).result(TIMEOUT_S))


def opened(folder: Path, **settings: Any) -> ThreadEngineClient:
    return ThreadEngineClient(engine_of(str(folder), EngineConfig(**{**USUAL, **settings})))


class Answer(NamedTuple):
    """The tokens that count, with their log probabilities, and what is told about them."""

    tokens: list[tuple[int, float]]
    finish_reason: str
    weight_version: str
    num_restarts: int


class Asked:
    """A request that was sent."""

    def __init__(
        self, client: EngineClient, name: str, ids: Sequence[int], *, restarts: bool = True,
        adapter: AdapterRef | None = None, **params: Any,
    ) -> None:  # fmt: skip
        given = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "logprobs": 0, **params}
        self._outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self._first: list[EngineOutput] = []
        request = EngineRequest(
            request_id=name, prompt_token_ids=list(ids), params=SamplingParams(**given), restarts=restarts,
            adapter=adapter,
        )  # fmt: skip
        client.submit(request, self._outputs.put)

    def wait_for_output(self) -> None:
        self._first.append(self._outputs.get(timeout=TIMEOUT_S))

    def answer(self) -> Answer:
        tokens: list[tuple[int, float]] = []
        versions = set()
        while True:
            output = self._first.pop(0) if self._first else self._outputs.get(timeout=TIMEOUT_S)
            if output.begins_again:
                tokens, versions = [], set()
            versions |= {output.weight_version} - {""}
            entries = output.logprobs or []
            tokens += [(token, entry.logprob) for token, entry in zip(output.new_token_ids, entries, strict=True)]
            if output.finish_reason is not None:
                assert len(versions) <= 1 or not tokens, "tokens of two versions"
                return Answer(tokens, output.finish_reason, output.weight_version, output.num_restarts)
