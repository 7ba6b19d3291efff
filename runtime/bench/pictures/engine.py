"""What an engine does with pictures: the time to a first token with everything to do, with a picture's embeddings kept,
and with its pages kept; and the gaps between the tokens of a text beside which pictures are encoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from runtime.bench.metrics import BenchmarkError
from runtime.bench.pictures.shapes import IMAGE_TOKEN
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM

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
    pictures end with their first token."""
    asker = Asker(llm, side)
    gaps: dict[str, list[float]] = {"alone": [], "beside_prompts": [], "beside_pictures": []}
    asked = dict.fromkeys(gaps, 0)
    _gaps(llm, num_tokens)
    for _ in range(num_rounds):
        for way, found in gaps.items():
            made, count = _gaps_beside(asker, way, num_tokens)
            found += made
            asked[way] += count
    p99 = {way: float(np.quantile(found, 0.99)) for way, found in gaps.items()}
    return {
        "num_prompts": asked["beside_prompts"],
        "num_pictures": asked["beside_pictures"],
        **{f"{way}_ms": _in_ms(found) for way, found in gaps.items()},
        "p99_times_of_prompts": round(p99["beside_pictures"] / p99["beside_prompts"], 2),
        "p99_times_of_alone": round(p99["beside_pictures"] / p99["alone"], 2),
    }


def _gaps_beside(asker: Asker, way: str, num_tokens: int) -> tuple[list[float], int]:
    """Gaps, and how many others were answered meanwhile."""
    if way == "alone":
        return _gaps(asker.llm, num_tokens), 0
    is_over, num_asked = threading.Event(), 0

    def ask() -> None:
        nonlocal num_asked
        while not is_over.is_set():
            is_text = way == "beside_prompts"
            asker.ttft_s(asker.text() if is_text else asker.prompt(asker.picture(), first=asker.new_first()))
            num_asked += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        return _gaps(asker.llm, num_tokens), num_asked
    finally:
        is_over.set()
        thread.join()


def _gaps(llm: LLM, num_tokens: int) -> list[float]:
    """Of one greedy text."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    times = [time.perf_counter() for _ in llm.stream({"prompt_token_ids": [3, 4, 5]}, params)]
    return [later - earlier for earlier, later in pairwise(times)]


def _in_ms(gaps: Sequence[float]) -> dict[str, float]:
    return {name: round(1e3 * float(np.quantile(gaps, part)), 2) for name, part in (("p50", 0.5), ("p99", 0.99))}


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BenchmarkError(otherwise)
