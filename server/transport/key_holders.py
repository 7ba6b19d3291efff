"""The holders of API keys: what each may ask, what it has asked, and how much of that is open.

A holder's limits count what the engine computes, whichever API it was asked by: requests whose answer is not over, and
tokens a minute, prompts and answers together. Tokens come back evenly over the minute; a prompt needs as many as it has
when it is admitted (one that is longer than the limit, all of them), an answer takes its tokens as they come. Belongs
to the event loop's thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta

from runtime.errors import XservError
from server.config import ServerConfigError

OPEN_RETRY_S = 1.0
"""Retry-After seconds where too many requests are open, since their ends are not known."""

MOST_NAME_LENGTH = 64


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """The limits and the weight of a key. Raises `ServerConfigError`.

    name    in metrics and logs; keys of one name have one holder; "": a digest of the key
    weight  of its share of the engine under the fair policy
    max_requests, tokens_per_minute  None: no limit
    """

    name: str = ""
    weight: float = 1.0
    max_requests: int | None = None
    tokens_per_minute: int | None = None

    @classmethod
    def of(cls, words: list[str], usual: KeyTerms, where: str) -> KeyTerms:
        """From the words after a key in a file, such as `name=team` and `max-requests=8`; the others are `usual`."""
        given: dict[str, str] = {}
        known = {field.name.replace("_", "-"): field.name for field in fields(cls)}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or name not in known:
                raise ServerConfigError(f"{where}: {name[:80]!r} is none of {', '.join(f'{each}=' for each in known)}")
            if known[name] in given:
                raise ServerConfigError(f"{where}: {name}= is given twice")
            given[known[name]] = value
        if given.get("name") == "":
            raise ServerConfigError(f"{where}: name= is empty, must be a name of 1 to {MOST_NAME_LENGTH} characters")
        name = given.get("name", "")
        if len(name) > MOST_NAME_LENGTH:
            raise ServerConfigError(f"{where}: name= has {len(name)} characters, limit {MOST_NAME_LENGTH}")
        return cls(
            name=name,
            weight=_weight(given.get("weight"), usual.weight, where),
            max_requests=_count("max-requests", given.get("max_requests"), usual.max_requests, where),
            tokens_per_minute=_count(
                "tokens-per-minute", given.get("tokens_per_minute"), usual.tokens_per_minute, where
            ),
        )

    def __str__(self) -> str:
        """As a file has them, but for the name."""
        given = (("weight", f"{self.weight:g}"), ("max-requests", self.max_requests),
                 ("tokens-per-minute", self.tokens_per_minute))  # fmt: skip
        return " ".join(f"{name}={value}" for name, value in given if value is not None)


def _weight(text: str | None, usual: float, where: str) -> float:
    if text is None:
        return usual
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0.01 <= weight <= 100:
        raise ServerConfigError(f"{where}: weight= must be a number from 0.01 to 100, got {text[:80]!r}")
    return weight


def _count(name: str, text: str | None, usual: int | None, where: str) -> int | None:
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit() and int(text[:18]) >= 1 and len(text) <= 18):
        raise ServerConfigError(f"{where}: {name}= must be a whole number, at least 1, got {text[:80]!r}")
    return int(text)


class KeyLimitError(XservError):
    """A holder has no room for a request; `retry_after_s`: until it may."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(f"The API key's limit is reached: {why}. Ask again later.")
        self.retry_after_s = retry_after_s


class KeyHolder:
    """One holder.

    tenant       constant for one secret; names its prefixes and stored responses
    name         in metrics and logs
    num_open     requests whose answers are not over
    num_requests, num_prompt_tokens, num_cached_tokens, num_output_tokens  since the server's start
    refused      requests by the limit that refused them
    """

    def __init__(self, tenant: str, terms: KeyTerms, clock: Callable[[], float] = time.monotonic) -> None:
        self.tenant = tenant
        self.terms = terms
        self.num_open = 0
        self.num_requests = self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.refused = {"requests": 0, "tokens": 0}
        self._clock = clock
        self._tokens = float(terms.tokens_per_minute or 0)
        self._at_s = clock()

    @property
    def name(self) -> str:
        return self.terms.name or self.tenant[:8]

    def renew(self, terms: KeyTerms) -> None:
        """Sets other terms; tokens that were taken in this minute stay taken, as far as there was a limit, and at most
        all of the new one."""
        old, left = self.terms.tokens_per_minute, self._left()
        self.terms, limit = terms, terms.tokens_per_minute
        if limit != old:
            taken = 0.0 if old is None else max(0.0, old - left)
            self._tokens = (limit or 0) - min(taken, limit or 0)

    def begin(self, num_prompt_tokens: int) -> Use:
        """A request begins. Raises `KeyLimitError`."""
        terms = self.terms
        if terms.max_requests is not None and self.num_open >= terms.max_requests:
            self.refused["requests"] += 1
            raise KeyLimitError(f"{self.num_open} requests are open, limit {terms.max_requests}", OPEN_RETRY_S)
        if (limit := terms.tokens_per_minute) is not None:
            lacking = min(num_prompt_tokens, limit) - self._left()
            if lacking > 0:
                self.refused["tokens"] += 1
                raise KeyLimitError(
                    f"the prompt has {num_prompt_tokens} tokens and {max(0, math.floor(self._tokens))} are left of "
                    f"{limit} a minute",
                    lacking * 60 / limit,
                )
            self._tokens -= num_prompt_tokens
        self.num_open += 1
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens
        return Use(self)

    def headers(self, dialect: str) -> Mapping[str, str]:
        """The headers in which clients of an API look for the limit of tokens; none without one."""
        limit = self.terms.tokens_per_minute
        if limit is None or dialect == "ollama":
            return {}
        left = self._left()
        wait_s = (limit - left) * 60 / limit
        values = {"limit": str(limit), "remaining": str(max(0, math.floor(left)))}
        if dialect == "anthropic":
            full = datetime.now(UTC) + timedelta(seconds=math.ceil(wait_s))
            values["reset"] = full.strftime("%Y-%m-%dT%H:%M:%SZ")
            return {f"anthropic-ratelimit-tokens-{name}": value for name, value in values.items()}
        values["reset"] = f"{wait_s:.3f}s"
        return {f"x-ratelimit-{name}-tokens": value for name, value in values.items()}

    def _left(self) -> float:
        """The tokens that are left now; negative if answers have taken more."""
        now = self._clock()
        limit = self.terms.tokens_per_minute or 0
        self._tokens = min(float(limit), self._tokens + (now - self._at_s) * limit / 60)
        self._at_s = now
        return self._tokens

    def take(self, num_output_tokens: int) -> None:
        self._tokens -= num_output_tokens
        self.num_output_tokens += num_output_tokens


class Use:
    """An open request of a holder."""

    __slots__ = ("_is_open", "holder")

    def __init__(self, holder: KeyHolder) -> None:
        self.holder = holder
        self._is_open = True

    def drawn(self, num_tokens: int) -> None:
        """So many tokens of its answer have come."""
        self.holder.take(num_tokens)

    def found(self, num_tokens: int) -> None:
        """So many tokens of its prompt were in the prefix cache."""
        self.holder.num_cached_tokens += num_tokens

    def end(self) -> None:
        """The answer is over. May be called again."""
        if self._is_open:
            self._is_open = False
            self.holder.num_open -= 1
