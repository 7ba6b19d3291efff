"""Large answers in pieces: the same JSON as whole, with room for others between two of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType
from starlette.testclient import TestClient

from server.transport import json_answer
from server.transport.json_answer import EncodedList, JsonAnswer, pieces, weight

PIECE_BYTES = 100


class Inner(msgspec.Struct, tag_field="type", tag="inner"):
    numbers: list[float | None]
    name: str | UnsetType = UNSET


class Sparse(msgspec.Struct, omit_defaults=True):
    text: str = ""


class Outer(msgspec.Struct, rename="camel"):
    many_items: list[Inner]
    by_name: dict[str, Any]
    sparse: Sparse
    rest: tuple[Any, ...] = ()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.none()
PLAIN = st.recursive(
    NUMBERS | st.booleans() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=25
)  # some pieces of text
INNER = st.builds(Inner, st.lists(NUMBERS), TEXTS | st.just(UNSET))
OUTER = st.builds(
    Outer, st.lists(INNER), st.dictionaries(TEXTS, PLAIN), st.builds(Sparse, TEXTS), st.tuples(PLAIN, PLAIN)
)


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_answer, "PIECE_BYTES", PIECE_BYTES)
        yield


@settings(deadline=None, max_examples=60)
@given(OUTER)
def test_the_pieces_are_the_whole(value: Outer) -> None:
    assert b"".join(pieces(value)) == msgspec.json.encode(value)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(PLAIN, max_size=5), max_size=20))
def test_an_encoded_list_is_the_list(parts: list[list[Any]]) -> None:
    encoded: EncodedList[Any] = EncodedList()
    for part in parts:
        encoded.extend(part)
    whole = [item for part in parts for item in part]
    assert json.loads(b"".join(pieces([encoded.as_list(), 1]))) == [json.loads(json.dumps(whole)), 1]
    assert TestClient(JsonAnswer({"held": encoded.as_list()})).get("/").json() == {"held": whole}


def test_no_piece_is_much_larger_than_asked_for() -> None:
    value = {"choices": [{"index": i, "tokens": [f"token {i}"] * i, "ids": list(range(i))} for i in range(100)]}
    sizes = [len(piece) for piece in pieces(value)]
    assert sum(sizes) == len(msgspec.json.encode(value)) > 50 * PIECE_BYTES
    assert max(sizes) < 4 * PIECE_BYTES


def test_weight_looks_no_further_than_it_must() -> None:
    class Watched(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("its items are looked at")

    assert weight(["x" * PIECE_BYTES, *range(5)], PIECE_BYTES) > PIECE_BYTES
    assert weight([Watched([None] * PIECE_BYTES)], PIECE_BYTES) > PIECE_BYTES


def test_others_have_their_turn_between_two_pieces() -> None:
    async def scenario() -> tuple[int, int]:
        num_sent = num_turns = 0

        async def send(message: Any) -> None:
            nonlocal num_sent
            num_sent += 1

        async def other() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        await JsonAnswer([["word"] * 10] * 200)({"type": "http"}, None, send)  # type: ignore[arg-type]
        task.cancel()
        return num_sent, num_turns

    num_sent, num_turns = asyncio.run(scenario())
    assert num_sent > 50
    assert num_turns >= num_sent - 2


def test_small_ones_say_their_length_and_large_ones_come_whole() -> None:
    small, large = {"a": [1, 2]}, {"a": ["word"] * 200}
    for value in (small, large):
        answer = TestClient(JsonAnswer(value, {"X-Of": "mine"})).get("/")
        assert answer.json() == value
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-of"] == "mine"
        assert ("content-length" in answer.headers) == (value is small)
