"""Request traces: arrivals, lengths of prompts and answers, and shared prefixes.

It reads the two public formats of serving papers: Azure's CSV (``TIMESTAMP,ContextTokens,GeneratedTokens``;
github.com/Azure/AzurePublicDataset) and Mooncake's JSON lines (``timestamp`` in ms, ``input_length``,
``output_length``, ``hash_ids``: one id for each 512 tokens of the prompt, equal exactly where prompts are equal up to
there; github.com/kvcache-ai/Mooncake). They hold no text: ``Trace.prompt_ids`` generates tokens of that structure.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bench.metrics import BenchmarkError

MOONCAKE_BLOCK_LEN = 512
_UNIQUE = 1 << 40
"""Ids from here on stand for text that no other request has; a trace's own hash ids are smaller."""


class TraceError(BenchmarkError):
    """A trace cannot be read: the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    arrival_s             seconds after the trace's first request
    input_len, output_len tokens of prompt and answer, at least 1 each
    hash_ids              one for each ``hash_block_len`` tokens of the prompt, the last perhaps shorter; empty if the
                          prompt shares nothing with any other
    tenant                who asks; None if the trace has no tenants
    """

    arrival_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    hash_block_len: int = MOONCAKE_BLOCK_LEN

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer."""
        return max(request.input_len + request.output_len for request in self.requests)

    def head(self, num_requests: int) -> Trace:
        """The first requests alone."""
        if num_requests < 1:
            raise TraceError(f"{num_requests} requests of a trace: at least 1 is needed")
        return replace(self, requests=self.requests[:num_requests])

    def scaled(self, *, rate: float = 1.0, length: float = 1.0, max_len: int | None = None) -> Trace:
        """Arrivals ``rate`` times as dense, lengths times ``length`` (at least 1 token each); prompts that leave no
        room for their answer in ``max_len`` tokens are cut, answers to at most half of it."""
        if not (0.0 < rate < np.inf and 0.0 < length < np.inf):
            raise TraceError(f"a trace is scaled by positive numbers, not by rate {rate} and length {length}")
        if max_len is not None and max_len < 2:
            raise TraceError(f"a request of {max_len} tokens has no room for a prompt and an answer")
        return replace(
            self,
            requests=tuple(_scaled(request, rate, length, max_len) for request in self.requests),
            hash_block_len=max(1, round(self.hash_block_len * length)),
        )

    def multiplied(self, copies: int, spread_s: float = 60.0, tenants: Sequence[str] = ()) -> Trace:
        """So many copies of the trace in parallel, without shared prefixes between copies; each copy starts a little
        after the previous one, the last within ``spread_s``. ``tenants``, if given, has each copy's."""
        if copies < 1 or not 0.0 <= spread_s < np.inf:
            raise TraceError(f"{copies} copies of a trace within {spread_s} s: at least 1 is needed, within a time")
        stride = 1 + max((hash_id for request in self.requests for hash_id in request.hash_ids), default=0)
        if copies * stride > 1 << 31:
            raise TraceError(f"{copies} copies of a trace of {stride} hash ids are too many")
        found = [
            replace(
                request,
                arrival_s=request.arrival_s + copy * spread_s / copies,
                hash_ids=tuple(copy * stride + hash_id for hash_id in request.hash_ids),
                tenant=tenants[copy] if tenants else request.tenant,
            )
            for copy in range(copies)
            for request in self.requests
        ]
        return replace(self, requests=tuple(sorted(found, key=lambda request: request.arrival_s)))

    def prompt_ids(self, index: int, fill: Callable[[int, NDArray[np.int32]], None]) -> NDArray[np.int32]:
        """Request ``index``'s prompt, ``[input_len]`` int32; ``fill(hash_id, out)`` writes each block's tokens."""
        request = self.requests[index]
        ids = np.empty(request.input_len, np.int32)
        if not request.hash_ids:
            fill(_UNIQUE + index, ids)
        for place, hash_id in enumerate(request.hash_ids):
            block = ids[place * self.hash_block_len : (place + 1) * self.hash_block_len]
            if len(block):
                fill(hash_id, block)
        if request.hash_ids and (rest := len(request.hash_ids) * self.hash_block_len) < len(ids):
            fill(_UNIQUE + index, ids[rest:])  # the rest of rounding scaled lengths
        return ids


def numbered(hash_id: int, out: NDArray[np.int32]) -> None:
    """Tokens that only number their block: enough for a scheduler, and cheap.

    Unique text is numbered downwards from -1, a trace's blocks upwards from 0.
    """
    out[:] = _UNIQUE - 1 - hash_id if hash_id >= _UNIQUE else hash_id


def random_tokens(vocab_size: int, seed: int = 0) -> Callable[[int, NDArray[np.int32]], None]:
    """Fills blocks with ids of ``[0, vocab_size)``, the same for the same block and seed."""

    def fill(hash_id: int, out: NDArray[np.int32]) -> None:
        out[:] = np.random.default_rng([seed, hash_id]).integers(0, vocab_size, len(out), np.int32)

    return fill


def read_trace(path: str | Path) -> Trace:
    """A trace by its file's ending: ``.csv`` Azure's, ``.jsonl`` Mooncake's. Raises ``TraceError``."""
    path = Path(path)
    readers = {".csv": _read_azure, ".jsonl": _read_mooncake}
    if path.suffix not in readers:
        raise TraceError(f"{path}: a trace is a .csv (Azure) or a .jsonl (Mooncake) file")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            requests = sorted(readers[path.suffix](path, file), key=lambda request: request.arrival_s)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    if not requests:
        raise TraceError(f"{path}: there is no request in it")
    first_s = requests[0].arrival_s
    return Trace(path.stem, tuple(replace(each, arrival_s=each.arrival_s - first_s) for each in requests))


def beside_decodes(
    *,
    num_decodes: int,
    decode_len: int,
    context_len: int,
    prompt_len: int,
    num_prompts: int,
    first_s: float,
    gap_s: float,
) -> Trace:
    """``num_decodes`` answers of ``decode_len`` tokens from the start, beside which ``num_prompts`` prompts of
    ``prompt_len`` tokens arrive one by one, the first at ``first_s`` seconds, ``gap_s`` seconds apart."""
    decodes = [TraceRequest(0.0, context_len, decode_len)] * num_decodes
    prompts = [TraceRequest(first_s + index * gap_s, prompt_len, 1) for index in range(num_prompts)]
    for request in (*decodes, *prompts):
        if min(request.input_len, request.output_len) < 1 or not request.arrival_s >= 0.0:
            raise TraceError(f"{request}: lengths are at least 1, times at least 0")
    return Trace("beside-decodes", tuple(sorted((*decodes, *prompts), key=lambda request: request.arrival_s)))


def shared_prefixes(
    *,
    num_requests: int,
    num_prefixes: int,
    prefix_len: int,
    own_len: int,
    output_len: int,
    hot_share: float = 0.0,
    seed: int = 0,
) -> Trace:
    """Requests all at once, each with one of ``num_prefixes`` prefixes of ``prefix_len`` tokens, drawn evenly, and
    ``own_len`` tokens of its own; a ``hot_share`` of them has the first prefix."""
    if min(num_requests, num_prefixes, prefix_len, own_len, output_len) < 1 or not 0.0 <= hot_share <= 1.0:
        raise TraceError("counts and lengths of a trace of shared prefixes are at least 1, the hot share is in [0, 1]")
    rng = np.random.default_rng(seed)
    size = math.gcd(prefix_len, own_len)
    num_ids, num_own = prefix_len // size, own_len // size
    requests = []
    for index in range(num_requests):
        prefix = 0 if rng.random() < hot_share else int(rng.integers(num_prefixes))
        own = num_prefixes * num_ids + index * num_own
        ids = (*range(prefix * num_ids, (prefix + 1) * num_ids), *range(own, own + num_own))
        requests.append(TraceRequest(0.0, prefix_len + own_len, output_len, ids))
    return Trace("shared-prefixes", tuple(requests), hash_block_len=size)


def _scaled(request: TraceRequest, rate: float, length: float, max_len: int | None) -> TraceRequest:
    input_len, output_len = (max(1, round(count * length)) for count in (request.input_len, request.output_len))
    if max_len is not None:
        output_len = min(output_len, max_len // 2)
        input_len = min(input_len, max_len - output_len)
    return replace(request, arrival_s=request.arrival_s / rate, input_len=input_len, output_len=output_len)


def _read_azure(path: Path, file: Any) -> Iterator[TraceRequest]:
    reader = csv.DictReader(file)
    wanted = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    if missing := [name for name in wanted if name not in (reader.fieldnames or ())]:
        raise TraceError(f"{path}: the header lacks {', '.join(missing)}")
    for row in reader:
        where = f"{path}:{reader.line_num}"
        try:
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven decimals, of which Python parses six
        except (TypeError, ValueError):
            raise TraceError(f"{where}: TIMESTAMP {row['TIMESTAMP']!r} is not a time") from None
        input_len, output_len = (_length(where, name, row[name]) for name in wanted[1:])
        yield TraceRequest((moment - datetime(1970, 1, 1)).total_seconds(), input_len, output_len)


def _read_mooncake(path: Path, file: Any) -> Iterator[TraceRequest]:
    for number, line in enumerate(file, start=1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{where}: not a JSON object")
        moment, hash_ids = row.get("timestamp"), row.get("hash_ids")
        if isinstance(moment, bool) or not isinstance(moment, int | float) or not 0 <= moment < np.inf:
            raise TraceError(f"{where}: timestamp {moment!r} is not a number of milliseconds")
        lengths = [_length(where, name, row.get(name)) for name in ("input_length", "output_length")]
        if not isinstance(hash_ids, list) or not all(type(i) is int and 0 <= i < 1 << 31 for i in hash_ids):
            raise TraceError(f"{where}: hash_ids must be a list of integers in [0, 2^31)")
        if len(hash_ids) != -(-lengths[0] // MOONCAKE_BLOCK_LEN):
            raise TraceError(
                f"{where}: {len(hash_ids)} hash_ids for input_length {lengths[0]}, "
                f"which is {-(-lengths[0] // MOONCAKE_BLOCK_LEN)} blocks of {MOONCAKE_BLOCK_LEN}"
            )
        yield TraceRequest(moment / 1e3, lengths[0], lengths[1], tuple(hash_ids))


def _length(where: str, name: str, value: Any) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise TraceError(f"{where}: {name} {value!r} is not a positive number of tokens")
    return count
