"""`xserv bench accuracy`: right answers to word problems, and perplexity, of any running OpenAI server.

A text is scored without its tokenizer: it is sent in pieces, and the server scores tokens. A piece is some context
followed by scored text, cut before a space, so that every server gets the same characters; tokens are scored if their
first character lies after the context. Two servers with the same tokenizer score the same tokens; with different ones
`nats_per_character` compares them. A server gives scores of a prompt in one of two ways, tried in this order:

    echo              POST /v1/completions {"echo": true, "logprobs": 1}: OpenAI's legacy form
    prompt_logprobs   the same with {"prompt_logprobs": 0}: vLLM's, with each token's text
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.bench.accuracy.gsm8k import STOP, Problem, as_messages, as_text, flexible_number, strict_number
from runtime.bench.environment import describe_machine
from runtime.bench.load.http_client import Origin, ask_json, first_model
from runtime.bench.metrics import BenchmarkError
from runtime.errors import InvalidArgumentError
from runtime.progress import Reporter, Show

ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRun:
    """The settings of an accuracy run.

    Attributes:
        problems, shots: word problems, and the worked examples before each; may be empty.
        text: to be scored, if any; `context` and `scored` are the characters of its pieces.
        concurrency: the most open requests.
        model: the first that the server lists if None.
    """

    url: str
    problems: Sequence[Problem] = ()
    shots: Sequence[Problem] = ()
    endpoint: Literal["completions", "chat"] = "completions"
    max_tokens: int = 320
    text: str = ""
    context: int = 512
    scored: int = 512
    concurrency: int = 8
    timeout_s: float = 600.0
    model: str | None = None
    api_key: str | None = None


class Records:
    """A run's results so far by key, a JSON line each in a file, so that an interrupted run can be resumed; without a
    file they are kept in memory. The first line has the run's settings."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Raises `InvalidArgumentError` for a file of other settings, or of another format."""
        self.found: dict[str, dict[str, Any]] = {}
        self._path = path
        if path is None:
            return
        if not path.exists() or not path.stat().st_size:
            path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # the last line may be truncated
        try:
            first, *rest = (json.loads(line) for line in whole)
            before = first["settings"]
            self.found = {entry["key"]: entry for entry in rest}
        except (ValueError, KeyError, TypeError):
            raise InvalidArgumentError(f"--records {path} is not what an earlier run wrote") from None
        for name in sorted({*before, *settings}):
            if before.get(name) != settings.get(name):
                raise InvalidArgumentError(
                    f"--records {path} was made with {name} {before.get(name)!r}, now it is {settings.get(name)!r}:"
                    " name another file"
                )
        if len(whole) < len(lines):
            path.write_text("".join(whole), encoding="utf-8")

    def add(self, key: str, values: dict[str, Any]) -> None:
        """Adds a result, on disk before the next request."""
        entry = {"key": key, **values}
        self.found[key] = entry
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


async def measure(run: AccuracyRun, records_path: Path | None, reporter: Reporter) -> dict[str, Any]:
    """The report. A request that fails is sent three times.

    Raises:
        BenchmarkError: for a server that cannot be reached, refuses, or cannot score prompts.
        InvalidArgumentError: for a text that is too short, and for records of another run.
    """
    origin = Origin.parse(run.url)
    model = run.model or await first_model(origin, run.api_key)
    settings = {
        "model": model, "endpoint": run.endpoint, "num_shots": len(run.shots), "max_tokens": run.max_tokens,
        "shots": _digest([shot.question + shot.answer for shot in run.shots]), "text": _digest([run.text]),
        "context": run.context, "scored": run.scored,
    }  # fmt: skip
    records = Records(records_path, settings)
    report: dict[str, Any] = {"base_url": str(origin), "model_id": model}
    if run.problems:
        with reporter.shown("word problems") as show:
            report["gsm8k"] = await _problems(run, origin, model, records, show)
    if run.text:
        with reporter.shown("scoring the text") as show:
            report["perplexity"] = await _text(run, origin, model, records, show)
    return {**report, "environment": describe_machine()}


async def _problems(run: AccuracyRun, origin: Origin, model: str, records: Records, show: Show) -> dict[str, Any]:
    keys = [f"problem {_digest([problem.question])[:16]}" for problem in run.problems]

    async def ask(number: int) -> dict[str, Any]:
        problem = run.problems[number]
        text, why = await _answer(run, origin, model, problem)
        strict, flexible = strict_number(text), flexible_number(text)
        return {
            "strict": strict == problem.number, "flexible": flexible == problem.number, "finish_reason": why,
            "question": problem.question, "wanted": str(problem.number), "answer": text,
        }  # fmt: skip

    await _all(run, keys, ask, records, show)
    found = [records.found[key] for key in keys]
    right = {rule: sum(entry[rule] for entry in found) for rule in ("strict", "flexible")}
    return {
        "num_problems": len(found),
        "num_shots": len(run.shots),
        "endpoint": run.endpoint,
        "max_tokens": run.max_tokens,
        **{f"num_right_{rule}": count for rule, count in right.items()},
        **{f"exact_match_{rule}": count / len(found) for rule, count in right.items()},
        "finish_reasons": dict(Counter(str(entry["finish_reason"]) for entry in found)),
        "problems_sha256": _digest([problem.question + problem.answer for problem in run.problems]),
    }


async def _answer(run: AccuracyRun, origin: Origin, model: str, problem: Problem) -> tuple[str, str | None]:
    payload: dict[str, Any] = {"model": model, "max_tokens": run.max_tokens, "temperature": 0.0}
    if run.endpoint == "chat":
        path = "/v1/chat/completions"
        payload["messages"] = as_messages(problem, run.shots)
    else:
        path = "/v1/completions"
        payload |= {"prompt": as_text(problem, run.shots), "stop": list(STOP)}
    answer = await ask_json(origin, path, payload, run.api_key)
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if run.endpoint == "chat" else choice["text"]
        return str(text or ""), choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise BenchmarkError(f"{origin}{path} answered without a choice's text") from error


async def _text(run: AccuracyRun, origin: Origin, model: str, records: Records, show: Show) -> dict[str, Any]:
    pieces = pieces_of(run.text, run.context, run.scored)
    way = await way_of(origin, model, run.api_key)
    keys = [f"piece {number}" for number in range(len(pieces))]

    async def ask(number: int) -> dict[str, Any]:
        scores = await score(origin, model, run.api_key, pieces[number], way)
        return {"total": scores.total, "num_tokens": scores.num_tokens}

    await _all(run, keys, ask, records, show)
    found = [Scores(records.found[key]["total"], records.found[key]["num_tokens"]) for key in keys]
    return {
        **summary(found, pieces, run.text),
        "way": way, "context_characters": run.context, "scored_characters": run.scored,
    }  # fmt: skip


async def _all(
    run: AccuracyRun, keys: Sequence[str], ask: Callable[[int], Awaitable[dict[str, Any]]], records: Records,
    show: Show,
) -> None:  # fmt: skip
    """Requests the missing results, so many at once; each is stored before the next request."""
    missing = [number for number, key in enumerate(keys) if key not in records.found]
    done = len(keys) - len(missing)
    show(done, len(keys))
    queue = iter(missing)

    async def work() -> None:
        nonlocal done
        for number in queue:
            for attempt in range(ATTEMPTS):
                try:
                    async with asyncio.timeout(run.timeout_s):
                        values = await ask(number)
                    break
                except (BenchmarkError, TimeoutError) as error:
                    if attempt == ATTEMPTS - 1:
                        late = f"no answer within {run.timeout_s:g} s"
                        said = late if isinstance(error, TimeoutError) else error
                        raise BenchmarkError(f"{keys[number]}: {said}") from None
            records.add(keys[number], values)
            done += 1
            show(done, len(keys))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(run.concurrency, len(missing))):
                group.create_task(work())
    except* BenchmarkError as errors:
        first = errors.exceptions[0]
        raise BenchmarkError(str(first)) from None


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


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
    answer = await ask_json(origin, PATH, payload, api_key)
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
