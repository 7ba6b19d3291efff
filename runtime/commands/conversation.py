"""A conversation that is kept within the model's context. Does not depend on the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.errors import InvalidArgumentError

Message = dict[str, Any]
Encoder = Callable[[list[Message]], list[int]]


class Conversation:
    """The system message and the turns since; each turn is a user's message and its answer, if complete."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[list[Message]] = []

    @property
    def is_open(self) -> bool:
        """Whether the last turn waits for its answer."""
        return bool(self.turns) and len(self.turns[-1]) == 1

    def ask(self, content: str | list[dict[str, Any]]) -> None:
        """Opens a turn with a text, or with parts."""
        self.turns.append([{"role": "user", "content": content}])

    def answer(self, text: str) -> None:
        """Closes the last turn."""
        self.turns[-1].append({"role": "assistant", "content": text})

    def take_back(self) -> Any:
        """Removes the last turn and returns its question, or None."""
        return self.turns.pop()[0]["content"] if self.turns else None

    def reset(self) -> None:
        """Drops every turn; the system message stays."""
        self.turns.clear()

    def messages(self, first_turn: int = 0) -> list[Message]:
        """The system message, if there is one, and the turns from `first_turn` on."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(message for turn in self.turns[first_turn:] for message in turn)]

    def fit(self, encode: Encoder, most_tokens: int) -> tuple[list[int], int]:
        """The prompt's ids, at most `most_tokens`, and how many of the oldest turns were dropped for it. Raises
        `InvalidArgumentError` if the last turn alone is too long; only that turn is then removed.
        """
        for first_turn in range(len(self.turns)):
            ids = encode(self.messages(first_turn))
            if len(ids) <= most_tokens:
                del self.turns[:first_turn]
                return ids, first_turn
        self.take_back()
        raise InvalidArgumentError(
            f"the message makes a prompt of {len(ids)} tokens; there is room for {most_tokens}",
            param="message",
        )
