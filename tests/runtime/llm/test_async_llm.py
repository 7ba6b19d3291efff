"""`AsyncLLM`: streams of outputs beside `LLM`'s whole ones, aborts, and what is left behind by those who go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from runtime import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from runtime.engine.errors import EngineDeadError, RequestError, UnknownOptionError
from tests.runtime.llm.test_llm import write_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Any) -> Iterator[AsyncLLM]:
    with AsyncLLM(folder, load_format="dummy", device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def whole(folder: Any) -> RequestOutput:
    with LLM(folder, load_format="dummy", device="cpu") as llm:
        return llm.generate("abc", GREEDY)[0]


def of_kind(kind: RequestOutputKind, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, output_kind=kind, **more)


async def until(is_true: Any) -> None:
    for _ in range(500):
        if is_true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError


async def test_cumulative_outputs_grow_into_the_whole(llm: AsyncLLM, whole: RequestOutput) -> None:
    outputs = [output async for output in llm.generate("abc", GREEDY, "mine")]
    assert {output.request_id for output in outputs} == {"mine"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for before, after in pairwise(outputs):
        assert after.outputs[0].token_ids[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids
        assert after.outputs[0].text.startswith(before.outputs[0].text)
    last = outputs[-1].outputs[0]
    assert last.token_ids == whole.outputs[0].token_ids
    assert (last.text, last.finish_reason) == (whole.outputs[0].text, "length")
    assert last.cumulative_logprob == pytest.approx(whole.outputs[0].cumulative_logprob)


async def test_deltas_are_the_whole_in_pieces(llm: AsyncLLM, whole: RequestOutput) -> None:
    pieces = [output.outputs[0] async for output in llm.generate("abc", of_kind(RequestOutputKind.DELTA))]
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
    assert [token_id for piece in pieces for token_id in piece.token_ids] == whole.outputs[0].token_ids
    assert sum(len(piece.logprobs or ()) for piece in pieces) == 12
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


async def test_final_only_is_one_output(llm: AsyncLLM, whole: RequestOutput) -> None:
    (only,) = [output async for output in llm.generate("abc", of_kind(RequestOutputKind.FINAL_ONLY, n=2))]
    assert [choice.token_ids for choice in only.outputs] == [whole.outputs[0].token_ids] * 2


async def test_requests_run_together_and_stop_strings_end_them(llm: AsyncLLM, whole: RequestOutput) -> None:
    stop = whole.outputs[0].text[3:5]

    async def last(prompt: Any, params: SamplingParams) -> RequestOutput:
        outputs = [output async for output in llm.generate(prompt, params)]
        return outputs[-1]

    found = await asyncio.gather(
        last("abc", GREEDY),
        last({"prompt": "abc", "cache_salt": "x"}, GREEDY),
        last("abc", SamplingParams(temperature=0.0, max_tokens=12, stop=stop)),
    )
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids == whole.outputs[0].token_ids
    assert (found[2].outputs[0].finish_reason, found[2].outputs[0].stop_reason) == ("stop", stop)
    await until(lambda: not llm.client.stats().num_running)


async def test_abort_ends_a_stream(llm: AsyncLLM) -> None:
    forever = SamplingParams(max_tokens=None, ignore_eos=True)
    last = None
    async for output in llm.generate("abc", forever, "long"):
        if last is None:
            await llm.abort(["long", "unknown"])
        last = output
    assert last is not None
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")


async def test_who_leaves_leaves_nothing_behind(llm: AsyncLLM) -> None:
    forever = SamplingParams(max_tokens=None, ignore_eos=True)
    stream = llm.generate("abc", forever)
    await anext(stream)
    await stream.aclose()

    async def read() -> None:
        async for _ in llm.generate("abc", forever):
            pass

    task = asyncio.create_task(read())
    await until(lambda: llm.client.stats().num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: llm.client.stats().num_running == 0)


async def test_wrong_requests(llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        await anext(llm.generate([10**6], GREEDY))
    with pytest.raises(UnknownOptionError, match="did you mean 'request_id'"):
        llm.generate("a", GREEDY, request_ids="x")  # type: ignore[call-arg]
    stream = llm.generate("abc", SamplingParams(max_tokens=None, ignore_eos=True), "twice")
    await anext(stream)
    with pytest.raises(RequestError, match="'twice' is in use"):
        await anext(llm.generate("abc", GREEDY, "twice"))
    await stream.aclose()


async def test_more_than_the_queue_takes(folder: Any) -> None:
    async with AsyncLLM(folder, load_format="dummy", device="cpu", max_waiting=2, max_num_seqs=1) as llm:

        async def count(priority: int) -> int:
            final = of_kind(RequestOutputKind.FINAL_ONLY)
            return len([0 async for _ in llm.generate([1, 2], final, priority=priority)])

        assert await asyncio.gather(*map(count, range(6))) == [1] * 6
        await llm.check_health()
    with pytest.raises(EngineDeadError):
        await llm.check_health()
    with pytest.raises(EngineDeadError):
        await anext(llm.generate("abc", GREEDY))


async def test_embeddings_are_those_of_llm(llm: AsyncLLM, folder: Any) -> None:
    found = await llm.embed("abc")
    with LLM(folder, load_format="dummy", device="cpu") as plain:
        assert found.outputs.embedding == pytest.approx(plain.embed("abc")[0].outputs.embedding)
