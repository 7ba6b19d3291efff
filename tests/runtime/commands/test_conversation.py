"""The conversation forgets its oldest turns, never the system message, never the question at hand."""

from __future__ import annotations

import pytest

from runtime.commands.chat_session import Conversation, Message
from runtime.errors import InvalidArgumentError


def encode(messages: list[Message]) -> list[int]:
    """One id a character, so that lengths are easy to say."""
    return [ord(character) for message in messages for character in message["content"]]


def filled(system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    for question, answer in (("aa", "AA"), ("bb", "BB")):
        conversation.ask(question)
        conversation.answer(answer)
    conversation.ask("cc")
    return conversation


def test_messages_are_in_order() -> None:
    roles = [message["role"] for message in filled("s").messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("most_tokens", "expected", "num_dropped"),
    [(11, "saaAAbbBBcc", 0), (10, "sbbBBcc", 1), (7, "sbbBBcc", 1), (6, "scc", 2), (3, "scc", 2)],
)
def test_oldest_turns_are_dropped(most_tokens: int, expected: str, num_dropped: int) -> None:
    conversation = filled("s")
    ids, dropped = conversation.fit(encode, most_tokens)
    assert ("".join(map(chr, ids)), dropped) == (expected, num_dropped)
    assert len(conversation.turns) == 3 - num_dropped


def test_too_long_a_message_is_taken_back_and_nothing_else() -> None:
    conversation = filled("s")
    with pytest.raises(InvalidArgumentError, match=r"3 tokens; there is room for 2"):
        conversation.fit(encode, 2)
    assert [turn[0]["content"] for turn in conversation.turns] == ["aa", "bb"]


def test_take_back_and_reset() -> None:
    conversation = filled("s")
    assert conversation.take_back() == "cc"
    conversation.reset()
    assert conversation.take_back() is None
    assert conversation.messages() == [{"role": "system", "content": "s"}]
