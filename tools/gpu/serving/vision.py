"""Pictures on the device: the bundled model with a tower gives its cpu's answers.

    python -m tools.gpu.serving.vision       # writes vision_answers.json anew

That file has the cpu's answers, so that a GPU does not wait for the cpu's kernels to be compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest, ImageItem
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams
from tools.gpu.sections import ROOT, Case, Options, Result
from tools.gpu.serving.asking import ask, first_difference, ids_of

MODEL = ROOT / "models" / "demo_vision"
ANSWERS = Path(__file__).with_name("vision_answers.json")
"""By the cpu in float32: tokens by picture and question."""
PATCH, SIDE = 8, 80
"""Pixels of a patch's side and of a picture's: none has to be resized, which needs a package."""
COLOURS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
QUESTIONS = ("Which bar is the largest?", "How many bars are there?", "Describe the picture.")
NUM_TOKENS = 20

Array = np.ndarray[Any, Any]


def pictures() -> dict[str, Array]:
    """Charts and shapes, `[80, 80, 3]`."""
    found = {}
    names = list(COLOURS)
    for number, heights in enumerate(((60, 30, 45), (20, 55, 40), (30, 62))):
        canvas = np.full((SIDE, SIDE, 3), 245, np.uint8)
        for bar, height in enumerate(heights):
            left = 8 + 24 * bar
            canvas[72 - height : 72, left : left + 16] = COLOURS[names[(number + bar) % 4]]
        found[f"chart {number}"] = canvas
    lines, columns = np.mgrid[:SIDE, :SIDE]
    for number, colour in enumerate(("red", "blue")):
        canvas = np.full((SIDE, SIDE, 3), 235, np.uint8)
        inside = (lines - 40) ** 2 + (columns - 40) ** 2 < 22**2 if number else abs(lines - 40) + abs(columns - 40) < 40
        canvas[inside] = COLOURS[colour]
        found[f"shape {number}"] = canvas
    return found


def patches_of(picture: Array) -> bytes:
    """The model's patches: channels, lines, columns of each, those of a token together."""
    count = SIDE // PATCH // 2
    parts = picture.reshape(count, 2, PATCH, count, 2, PATCH, 3)
    return bytes(parts.transpose(0, 3, 1, 4, 6, 2, 5).tobytes())


def answers(options: Options, dtype: str) -> dict[str, list[int]]:
    """Tokens by picture and question."""
    most, length = (1, 3) if options.is_quick else (100, NUM_TOKENS)
    engine = build_engine(
        MODEL, device=options.device, dtype=dtype, num_blocks=256, max_model_len=128, max_num_seqs=8, seed=0
    )
    params = SamplingParams(temperature=0.0, max_tokens=length, detokenize=False)
    client, requests, side = ThreadEngineClient(engine), [], SIDE // PATCH
    before, behind = (ids_of(MODEL, part) for part in ("<|user|><|vision_start|>", "<|vision_end|>"))
    image_token = ids_of(MODEL, "<|image_pad|>")
    try:
        for name, picture in pictures().items():
            patches = patches_of(picture)
            item = ImageItem(
                digest=hashlib.sha256(patches).digest(), first_token=len(before), rows=side, columns=side,
                patches=patches,
            )  # fmt: skip
            for question in QUESTIONS:
                ids = before + image_token * (side // 2) ** 2 + behind + ids_of(MODEL, f"{question}<|assistant|>")
                requests.append(
                    EngineRequest(
                        request_id=f"{name}: {question}", prompt_token_ids=ids, params=params, images=(item,),
                        eos_token_ids=engine.info.eos_token_ids,
                    )
                )  # fmt: skip
        requests = requests[:most]
        found = ask(client, requests)
    finally:
        client.close()
    return {request.request_id: answer for request, answer in zip(requests, found)}


def correctness(options: Options) -> Iterator[Case]:
    yield Case("as on the cpu, float32", lambda: _compare(options, "float32"))
    if not options.is_quick:
        yield Case("bfloat16", lambda: _compare(options, "bfloat16"))


def _compare(options: Options, dtype: str) -> Result:
    """Compares answers: equal in float32; in bfloat16, which rounds, the number of equal ones is reported."""
    stored: dict[str, list[int]] = json.loads(ANSWERS.read_text(encoding="utf-8"))
    found = answers(options, dtype)
    expected = {name: stored[name][: len(answer)] for name, answer in found.items()}
    if dtype == "float32" and (difference := first_difference([*found.values()], [*expected.values()])) is not None:
        raise AssertionError(difference)
    same = sum(answer == expected[name] for name, answer in found.items())
    return {"answers": len(found), "same": same, "tokens": sum(map(len, found.values()))}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    said = answers(Options("cpu"), "float32")
    lines = [f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in said.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
