"""Pictures on the device: the bundled model with a tower gives its cpu's answers; and a large tower's time.

    python -m tools.gpu.serving.vision       # writes vision_answers.json anew

That file has the cpu's answers, so that a GPU does not wait for the cpu's kernels to be compiled.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from models.registry import load_model
from runtime.device.gpu import Gpu
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest, ImageItem
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.recorder import open_recorder
from runtime.engine.steps.tower_recordings import TowerRecordings
from tools.gpu.sections import ROOT, Case, Options, Result
from tools.gpu.serving.asking import ask, first_difference, ids_of
from tools.gpu.serving.models import quick_weights_of

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


# A picture through a tower of Qwen3-VL-2B's widths, on dummy weights

SIDES = (64, 32)
"""Patches of 16 pixels along a side: 1024 and 512 pixels."""
LAYERS, NUM_RUNS = 24, 10


def tower_cases(options: Options) -> Iterator[Case]:
    """The time from a picture's patches on the host to its embeddings, and the device's part."""
    for side in (4,) if options.is_quick else SIDES:
        yield Case(f"{16 * side} x {16 * side} pixels", functools.partial(_picture, options, side))


@functools.cache
def _tower(options: Options) -> Any:
    with tempfile.TemporaryDirectory() as folder, quick_weights_of(""):
        write_qwen3_vl(Path(folder), tower_layers=2 if options.is_dry or options.is_quick else LAYERS, text_layers=3)
        model: Any = load_model(folder, load_format="dummy", device=options.device, dtype="bfloat16")
    return model.tower


def _picture(options: Options, side: int) -> Result:
    """Runs a picture, launched from Python and recorded. Raises AssertionError if an embedding is not finite, or
    differs another time."""
    gpu, tower = Gpu.of(options.device), _tower(options)
    rng, config = np.random.default_rng(0), tower.config
    patches = rng.uniform(-1, 1, (side * side, 3 * config.num_frames * config.patch_size**2)).astype(np.float32)
    first = [each.to("cpu").array.astype(np.float32) for each in tower(patches, (side, side))]
    if not options.is_dry and not all(np.isfinite(each).all() and each.any() for each in first):
        raise AssertionError("the tower's embeddings are not finite, or zero")
    recordings = TowerRecordings(open_recorder(gpu.device))

    def recorded() -> Any:
        size = recordings.begin((side, side), -1)
        made = tower.start(patches, (side, side), keeper=size).finish()
        if size is not None:
            size.end(is_complete=True)
        return made

    for number in range(2, 6):  # the last one is replayed
        again = [each.to("cpu").array.astype(np.float32) for each in recorded()]
        if not options.is_dry and not all(np.array_equal(*each) for each in zip(first, again, strict=True)):
            raise AssertionError(f"the tower's embeddings differ in run {number}")
    usual = _times(options, gpu, lambda: tower(patches, (side, side)))
    by_graphs = _times(options, gpu, recorded)
    recordings.release()
    flops, device_ms = product_flops(tower, side * side), usual["device_ms"]
    flops += 4 * side**4 * config.hidden_size * config.num_layers
    return {
        "patches": side * side, "layers": config.num_layers, "gflop": round(flops / 1e9, 1),
        "tflop_per_s": round(flops / device_ms / 1e9, 1) if device_ms else None, **usual, "recorded": by_graphs,
    }  # fmt: skip


def _times(options: Options, gpu: Gpu, encode: Callable[[], Any]) -> dict[str, float]:
    """Medians: until the device has ended, of the launches, of the device."""
    found, start, end = [], gpu.new_event(is_timed=True), gpu.new_event(is_timed=True)
    for _ in range(NUM_RUNS if options.is_real and not options.is_dry else 1):
        begun = time.perf_counter()
        start.record(gpu.stream)
        made = encode()
        queued = time.perf_counter()
        end.record(gpu.stream)
        end.synchronize()
        ended = time.perf_counter()
        found.append((1e3 * (ended - begun), 1e3 * (queued - begun), end.elapsed_ms(start)))
        del made
    names = "whole_ms", "host_ms", "device_ms"
    return {name: round(statistics.median(each), 3) for name, each in zip(names, zip(*found, strict=True), strict=True)}


def product_flops(tower: Any, num_patches: int) -> int:
    """FLOPs of all matrices of a tower, for a picture of so many patches."""
    linears = [
        (each, num_patches)
        for layer in tower.layers.layers
        for each in (layer.qkv, layer.proj, layer.mlp.up, layer.mlp.down)
    ]
    num_tokens = num_patches // tower.config.merge_size**2
    linears += [
        (each, num_tokens) for merger in (tower.merger, *tower.deepstack) for each in (merger.mlp.up, merger.mlp.down)
    ]
    return sum(2 * rows * linear.weight.shape[0] * linear.weight.shape[1] for linear, rows in linears)


_IMAGE_TOKEN = 1000
_VOCAB_SIZE = 4096


def write_qwen3_vl(folder: Path, *, tower_layers: int, text_layers: int) -> Path:
    """Its `config.json`, with every matrix of a layer and of the mergers as in Qwen3-VL-2B, a small vocabulary, and one
    merger of a middle layer for every eight layers of the tower."""
    deepstack = [index for index in (5, 11, 17) if index < tower_layers]
    config: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": _IMAGE_TOKEN,
        "video_token_id": _IMAGE_TOKEN + 1,
        "vision_start_token_id": _IMAGE_TOKEN + 2,
        "vision_end_token_id": _IMAGE_TOKEN + 3,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": _VOCAB_SIZE, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": text_layers, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
            "dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": tower_layers, "hidden_size": 1024, "num_heads": 16,
            "intermediate_size": 4096, "out_hidden_size": 2048, "patch_size": 16, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "num_position_embeddings": 2304, "deepstack_visual_indexes": deepstack,
            "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    said = answers(Options("cpu"), "float32")
    lines = [f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in said.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
