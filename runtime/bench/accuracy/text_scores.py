"""Perplexity of a text on any OpenAI server, without its tokenizer: the text is sent in pieces, and the server scores
tokens.

A piece is some context followed by scored text, cut before a space, so that every server gets the same characters;
tokens are scored if their first character lies after the context. Two servers with the same tokenizer score the same
tokens; with different ones `nats_per_character` compares them.

A server gives scores of a prompt in one of two ways, tried in this order:

    echo              POST /v1/completions {"echo": true, "logprobs": 1}: OpenAI's legacy form
    prompt_logprobs   the same with {"prompt_logprobs": 0}: vLLM's, with each token's text
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runtime.bench.load.http_client import Origin, post_json
from runtime.bench.metrics import BenchmarkError
from runtime.errors import InvalidArgumentError

Way = Literal["echo", "prompt_logprobs"]
WAYS: tuple[Way, ...] = ("echo", "prompt_logprobs")

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Piece:
    """A prompt; tokens that begin at `first_scored` (in characters) or later are scored."""

    text: str
    first_scored: int


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one piece: the sum of its tokens' natural log probabilities, and their number."""

    total: float
    num_tokens: int


def pieces_of(text: str, context: int, scored: int) -> list[Piece]:
    """The text in pieces of about `scored` characters, each after about `context` others.

    All but the first `context` characters are scored once. Raises `InvalidArgumentError` for a text that is shorter.
    """
    cuts = [found.start() for found in re.finditer(r"(?<=\S)\s", text)]

    def at_or_before(place: int) -> int:
        """The last cut at or before the place, else the first; 0 if there is none."""
        return cuts[max(0, bisect_right(cuts, place) - 1)] if cuts else 0

    if len(text) <= context or not cuts:
        raise InvalidArgumentError(f"the text has {len(text)} characters, must have more than {context}, with spaces")
    pieces: list[Piece] = []
    begin = at_or_before(context)
    while begin < len(text):
        end = len(text) if begin + scored >= len(text) else at_or_before(begin + scored)
        if end <= begin:  # a word longer than a piece
            end = next((cut for cut in cuts if cut > begin), len(text))
        start = at_or_before(begin - context) if begin - context >= cuts[0] else 0
        pieces.append(Piece(text[start:end], begin - start))
        begin = end
    return pieces


async def way_of(origin: Origin, model: str, api_key: str | None) -> Way:
    """The way in which this server scores prompts. Raises `BenchmarkError` with its answer if it cannot."""
    said = []
    for way in WAYS:
        try:
            scores = await score(origin, model, api_key, Piece("One two three four", 3), way)
        except BenchmarkError as error:
            said.append(f"{way}: {error}")
        else:
            if scores.num_tokens:
                return way
            said.append(f"{way}: no token scored")
    raise BenchmarkError(f"{origin} scores no prompt, so it has no perplexity here; {'; '.join(said)}")


async def score(origin: Origin, model: str, api_key: str | None, piece: Piece, way: Way) -> Scores:
    """The scores of one piece. Raises `BenchmarkError` if the server's answer lacks them."""
    asked: dict[str, Any] = {"echo": True, "logprobs": 1} if way == "echo" else {"prompt_logprobs": 0}
    payload = {"model": model, "prompt": piece.text, "max_tokens": 1, "temperature": 0.0, **asked}
    answer = await post_json(origin, PATH, payload, api_key)
    try:
        choice = answer["choices"][0]
        tokens = list(_echoed(choice, piece.text) if way == "echo" else _prompted(choice, piece.text))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BenchmarkError(f"{origin}{PATH} answered without its prompt's log probabilities") from error
    if not tokens:
        raise BenchmarkError(f"{origin}{PATH} answered without its prompt's log probabilities")
    counted = [value for place, value in tokens if place >= piece.first_scored]
    if not all(math.isfinite(value) for value in counted):
        raise BenchmarkError(f"{origin}{PATH} gave a log probability that is not finite")
    return Scores(math.fsum(counted), len(counted))


def _echoed(choice: dict[str, Any], prompt: str) -> Iterator[tuple[int, float]]:
    """First character and score of each of the prompt's tokens; the tokens sampled after it are left out."""
    if not choice["text"].startswith(prompt):
        return
    found = choice["logprobs"]
    offsets, values = found["text_offset"], found["token_logprobs"]
    for place, value in zip(offsets, values, strict=True):
        if place < len(prompt) and value is not None:
            yield place, float(value)


def _prompted(choice: dict[str, Any], prompt: str) -> Iterator[tuple[int, float]]:
    """The same from vLLM's entries, each an object by token id; the first is null. The prompt's own token comes
    first."""
    entries = choice["prompt_logprobs"]
    texts: list[tuple[str, float]] = []
    for entry in entries[1:]:
        first = next(iter(entry.values()))
        texts.append((str(first["decoded_token"]), float(first["logprob"])))
    place = len(prompt) - sum(len(text) for text, _ in texts)  # the first token's length is not given
    for text, value in texts:
        yield place, value
        place += len(text)


def summary(scores: Sequence[Scores], pieces: Sequence[Piece], text: str) -> dict[str, Any]:
    """The report over all pieces."""
    num_tokens = sum(each.num_tokens for each in scores)
    characters = sum(len(piece.text) - piece.first_scored for piece in pieces)
    if not num_tokens:
        raise BenchmarkError("no token of the text was scored")
    total = -math.fsum(each.total for each in scores)
    return {
        "perplexity": math.exp(total / num_tokens),
        "nats_per_token": total / num_tokens,
        "nats_per_character": total / characters,
        "num_scored_tokens": num_tokens,
        "num_scored_characters": characters,
        "num_pieces": len(pieces),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
