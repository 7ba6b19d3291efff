"""What an engine does with pictures: the time to a first token with everything to do, with a picture's embeddings kept,
and with its pages kept; and the gaps between the tokens of a text beside which pictures are encoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from runtime.bench.metrics import BenchmarkError
from runtime.bench.pictures.shapes import IMAGE_TOKEN
from runtime.engine.messages import StepView
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM

MOST_TOKENS = 3000
"""Of a text beside which others are asked."""

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Asker:
    """Prompts with one picture each, of `side` pixels a side."""

    def __init__(self, llm: LLM, side: int) -> None:
        self.llm, self._side = llm, side
        self._rng = np.random.default_rng(0)
        self._num_prompts = 0

    def picture(self) -> Any:
        """One that nobody has seen."""
        return self._rng.integers(0, 256, (self._side, self._side, 3)).astype(np.uint8)

    def prompt(self, picture: Any, *, first: int) -> dict[str, Any]:
        """`first`: the token before the picture; another one, and no page of it is known."""
        return {"prompt_token_ids": [first, IMAGE_TOKEN, 5, 6, 7], "images": [picture]}

    def new_first(self) -> int:
        self._num_prompts += 1
        return 10 + self._num_prompts % 900

    def text(self) -> dict[str, Any]:
        """A prompt of as many tokens, without a picture, that nobody has seen."""
        num_tokens = (self._side // 32) ** 2
        return {"prompt_token_ids": [self.new_first(), *self._rng.integers(8, 80, num_tokens).tolist(), 5, 6, 7]}

    def ttft_s(self, prompt: dict[str, Any]) -> tuple[float, int]:
        """Seconds, and tokens of the prompt whose pages were kept."""
        begin = time.perf_counter()
        (output,) = self.llm.generate(prompt, ONE, use_tqdm=False)
        return time.perf_counter() - begin, output.num_cached_tokens or 0


def bench_reuse(llm: LLM, side: int, num_rounds: int) -> dict[str, Any]:
    """Seconds to the first token, and the ratios of each round: all three ways take turns."""
    asker = Asker(llm, side)
    asker.ttft_s(asker.prompt(asker.picture(), first=asker.new_first()))
    cold, features, pages = [], [], []
    for _ in range(num_rounds):
        picture, first = asker.picture(), asker.new_first()
        prompt = asker.prompt(picture, first=first)
        seconds, num_cached = asker.ttft_s(prompt)
        _expect(num_cached == 0, "a new picture has pages")
        cold.append(seconds)
        seconds, num_cached = asker.ttft_s(asker.prompt(picture, first=asker.new_first()))
        _expect(num_cached == 0, "another prefix has pages")
        features.append(seconds)
        seconds, num_cached = asker.ttft_s(prompt)
        _expect(num_cached > 0, "a prompt that was just asked has no pages")
        pages.append(seconds)
    return {
        "num_prompt_tokens": (side // 32) ** 2 + 4,
        "cold_s": round(median(cold), 4),
        "features_kept_s": round(median(features), 4),
        "pages_kept_s": round(median(pages), 4),
        "times_faster_with_features": round(median(a / b for a, b in zip(cold, features)), 2),
        "times_faster_with_pages": round(median(a / b for a, b in zip(cold, pages)), 2),
    }


def bench_gaps(llm: LLM, side: int, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Seconds between a text's tokens, in turns: alone; beside one prompt after the other of as many tokens as a
    picture has, which is what others' requests usually cost it; and beside one picture after the other. Prompts and
    pictures end with their first token. A text has `num_tokens` at least, and goes on until two of the others are
    answered; beside prompts, each of which takes a step, a fifth of that.

    `while_encoding_ms` are the gaps beside pictures in which no step computed a prompt: what encoding costs."""
    asker = Asker(llm, side)
    gaps: dict[str, list[_Gap]] = {"alone": [], "beside_prompts": [], "beside_pictures": []}
    asked = dict.fromkeys(gaps, 0)
    _gaps(llm, num_tokens, _ANSWERED)
    for way in ("beside_prompts", "beside_pictures"):  # shapes are recorded when they come for the first time
        _gaps_beside(asker, way, 2)
    for _ in range(num_rounds):
        for way, found in gaps.items():
            made, count = _gaps_beside(asker, way, num_tokens // 5 if way == "beside_prompts" else num_tokens)
            found += made
            asked[way] += count
    seconds = {way: [gap.seconds for gap in found] for way, found in gaps.items()}
    seconds["while_encoding"] = [gap.seconds for gap in gaps["beside_pictures"] if not gap.has_prompt]
    p99 = {way: float(np.quantile(found, 0.99)) for way, found in seconds.items()}
    return {
        "num_prompts": asked["beside_prompts"],
        "num_pictures": asked["beside_pictures"],
        "num_gaps": {way: len(found) for way, found in seconds.items()},
        **{f"{way}_ms": _in_ms(found) for way, found in seconds.items()},
        "p99_times_of_prompts": round(p99["beside_pictures"] / p99["beside_prompts"], 2),
        "p99_times_of_alone": round(p99["beside_pictures"] / p99["alone"], 2),
        "p99_encoding_times_of_alone": round(p99["while_encoding"] / p99["alone"], 2),
    }


@dataclass(frozen=True)
class _Gap:
    """Between two tokens. `has_prompt`: a step within it computed tokens of a prompt."""

    seconds: float
    has_prompt: bool


_ANSWERED = threading.Event()
_ANSWERED.set()
"""Nobody else is waited for."""


def _gaps_beside(asker: Asker, way: str, num_tokens: int) -> tuple[list[_Gap], int]:
    """Gaps, and how many others were answered meanwhile."""
    if way == "alone":
        return _gaps(asker.llm, num_tokens, _ANSWERED), 0
    is_over, are_answered, num_asked = threading.Event(), threading.Event(), 0
    failures: list[BaseException] = []

    def ask() -> None:
        nonlocal num_asked
        try:
            while not is_over.is_set():
                is_text = way == "beside_prompts"
                asker.ttft_s(asker.text() if is_text else asker.prompt(asker.picture(), first=asker.new_first()))
                num_asked += 1
                if num_asked == 2:
                    are_answered.set()
        except BaseException as error:
            failures.append(error)
            are_answered.set()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        found = _gaps(asker.llm, num_tokens, are_answered), num_asked
    finally:
        is_over.set()
        thread.join()
    if failures:
        raise BenchmarkError(f"what was asked beside the text failed: {failures[0]}") from failures[0]
    return found


def _gaps(llm: LLM, num_tokens: int, are_answered: threading.Event) -> list[_Gap]:
    """Of one greedy text."""
    most = min(MOST_TOKENS, llm.client.info.max_model_len - 8)
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    prompts: list[float] = []  # ends of steps that computed one

    def look(view: StepView) -> None:
        if any(chunk.count > 1 or chunk.start + 1 < chunk.num_prompt_tokens for chunk in view.chunks):
            prompts.append(view.start_s + view.duration_s)

    forget = llm.client.watch(look)
    times: list[float] = []
    try:
        with closing(llm.stream({"prompt_token_ids": [3, 4, 5]}, params)) as deltas:
            for _ in deltas:
                times.append(time.monotonic())
                if len(times) > num_tokens and are_answered.is_set():
                    break
        time.sleep(0.1)  # views come behind the tokens
    finally:
        forget()
    if len(times) <= num_tokens:
        raise BenchmarkError(f"a text ended after {len(times)} tokens")
    ends = np.array(prompts)
    return [
        _Gap(later - earlier, bool(((ends > earlier) & (ends <= later)).any())) for earlier, later in pairwise(times)
    ]


def _in_ms(gaps: Sequence[float]) -> dict[str, float]:
    return {name: round(1e3 * float(np.quantile(gaps, part)), 2) for name, part in (("p50", 0.5), ("p99", 0.99))}


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BenchmarkError(otherwise)
