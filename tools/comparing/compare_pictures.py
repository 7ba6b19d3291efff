"""Compares patches, grids and prompts of 1,000 pictures with transformers' processors (``backend="pil"``), to the byte.

    python -m tools.comparing.compare_pictures --reference .venv-reference/bin/python

Sizes are those of the tests, from 1 x 1 to 8,000 lines and to the extremes of aspect; pixels are noise, or only black
and white, which overshoot most. By Qwen2.5-VL's and Qwen3-VL's rules the ids of a prompt around the picture are
compared, too; the rules of Pixtral, Mistral 3, CLIP, SigLIP and Gemma 3 have the sizes of published models. Both sides
draw the pictures from their seeds. The peer runs in a process of the Python that `--reference` names, which needs
transformers, torch and Pillow. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bench.peers.child_process import ChildProcess, answering_program
from runtime.engine.messages import ImageSupport
from runtime.engine.prompt_images import place_images, prepare_image
from runtime.images.errors import ImageError
from runtime.images.patches import FixedRule, PatchRule, Rule, SideRule
from tests.runtime.images.pictures import SIZES
from tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "models" / "demo_vision"
TEXT = "<|user|>Look:<|vision_start|><|image_pad|><|vision_end|>Which bar is the largest?<|assistant|>"
HALVES = (0.5, 0.5, 0.5)
RULES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "qwen2.5-vl": (
        PatchRule(max_pixels=1003520),
        {"processor": "Qwen2VL", "patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 1003520}},
    ),
    "qwen3-vl": (
        PatchRule(patch_size=16, min_pixels=65536, max_pixels=16777216, mean=HALVES, std=HALVES),
        {"processor": "Qwen2VL", "patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
    ),
    "pixtral": (
        SideRule(most_height=1024, most_width=1024, patch_size=16),
        {"processor": "Pixtral", "size": {"longest_edge": 1024}, "patch_size": 16},
    ),
    "mistral3": (
        SideRule(most_height=1540, most_width=1540, patch_size=14, merge_size=2),
        {"processor": "Pixtral", "size": {"longest_edge": 1540}, "patch_size": 28},  # as its processor asks for
    ),
    "clip": (
        FixedRule(height=336, width=336, patch_size=14, num_tokens=576, shortest_edge=336),
        {"processor": "CLIP", "size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "siglip": (
        FixedRule(height=384, width=384, patch_size=16, num_tokens=576),
        {"processor": "Siglip", "size": {"height": 384, "width": 384}},
    ),
    "gemma3": (
        FixedRule(height=896, width=896, patch_size=14, num_tokens=256, resample="bilinear"),
        {"processor": "Gemma3", "size": {"height": 896, "width": 896}},
    ),
}
"""Our rule, and what transformers' processor gets for the same."""

PEER = answering_program(
    """
import hashlib
import numpy as np, PIL, torch, transformers
from PIL import Image
torch.set_num_threads(1)
Image.MAX_IMAGE_PIXELS = None

def load(folder, text, rules, sizes):
    global made, prompt, all_sizes
    prompt, all_sizes = text, sizes
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    made = {}
    for name, settings in rules.items():
        kind = settings.pop("processor")
        images = getattr(transformers, kind + "ImageProcessorPil")(**settings, do_rescale=False, do_normalize=False)
        whole = None
        if kind == "Qwen2VL":  # its processor of films is never asked
            whole = transformers.Qwen3VLProcessor
            whole.check_argument_for_proper_class = lambda self, name, given: None
            whole = whole(image_processor=images, tokenizer=tokenizer, video_processor=images)
        made[name] = images, whole
    return {"transformers": transformers.__version__, "pillow": PIL.__version__}

def drawn(number):
    height, width = all_sizes[number]
    pixels = np.frombuffer(np.random.RandomState(number).bytes(height * width * 3), np.uint8)
    return (pixels if number % 2 else pixels // 128 * 255).reshape(height, width, 3)

def run(number):
    image = Image.fromarray(drawn(number))
    found = {}
    for name, (images, whole) in made.items():
        try:
            if whole is None:
                pixels = np.asarray(images([image], return_tensors="np")["pixel_values"][0]).astype(np.uint8)
                found[name] = [hashlib.sha256(pixels.tobytes()).hexdigest()]
                continue
            answer = whole(images=[image], text=[prompt], return_tensors="np")
            grid, pixels = answer["image_grid_thw"][0].tolist(), answer["pixel_values"]
            size = images.patch_size
            frames = pixels.reshape(len(pixels), 3, 2, size * size).astype(np.uint8)
            assert (frames[:, :, 0] == frames[:, :, 1]).all() and grid[0] == 1
            digest = hashlib.sha256(np.ascontiguousarray(frames[:, :, 0]).tobytes()).hexdigest()
            found[name] = [digest, grid[1:], answer["input_ids"][0].tolist()]
        except ValueError as error:
            found[name] = ["refused", str(error)]
    return found
"""
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", required=True, help="a Python with transformers, torch and Pillow")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of them, from the first on")
    args = parser.parse_args()
    count, wrong = Counter[str](), 0
    with ChildProcess([args.reference, "-c", PEER], "transformers") as peer:
        versions = peer.ask(
            "load", folder=str(FOLDER), text=TEXT, rules={name: given for name, (_, given) in RULES.items()},
            sizes=SIZES[: args.sizes],
        )  # fmt: skip
        tokens = Tokenizer.from_pretrained(FOLDER)
        for number, (height, width) in enumerate(SIZES[: args.sizes]):
            if number % 50 == 0:
                print(f"{number} sizes, {wrong} differences", file=sys.stderr, flush=True)
            theirs = peer.ask("run", number=number)
            picture = drawn(number, height, width)
            for name, (rule, _) in RULES.items():
                mine = ours(picture, rule, tokens)
                count[name] += 1
                if mine != theirs[name][: len(mine)]:
                    wrong += 1
                    print(f"{name} {width} x {height}: {str(mine)[:200]} beside {str(theirs[name])[:200]}")
    print(json.dumps({**versions, "pictures": dict(count), "different": wrong}))
    return int(wrong > 0)


def drawn(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """A picture, drawn as by the peer: noise, or black and white."""
    pixels = np.frombuffer(np.random.RandomState(number).bytes(height * width * 3), np.uint8)
    return (pixels if number % 2 else pixels // 128 * 255).reshape(height, width, 3)


def ours(picture: NDArray[np.uint8], rule: Rule, tokenizer: Tokenizer) -> list[Any]:
    """The patches' digest, for rules that keep a picture's shape also the grid and the prompt's ids; or the refusal."""
    try:
        made = prepare_image(picture, rule)
    except ImageError:
        return ["refused"]
    pixels = np.frombuffer(made.patches, np.uint8)
    if not isinstance(rule, PatchRule):
        return [hashlib.sha256(_whole(pixels, (made.rows, made.columns), rule)).hexdigest()]
    (token,) = tokenizer.encode("<|image_pad|>")
    support = ImageSupport(token_id=token, rule=rule, max_tokens=1 << 20, has_axes=True)
    ids, _ = place_images(tokenizer.encode(TEXT), [made], support)
    return [hashlib.sha256(pixels.data).hexdigest(), [made.rows, made.columns], ids]


def _whole(pixels: NDArray[np.uint8], grid: tuple[int, int], rule: Rule) -> bytes:
    """Patches as the picture that they were cut from, `[3, height, width]`; the grid covers all of it."""
    merge, size = rule.merge_size, rule.patch_size
    blocks = pixels.reshape(grid[0] // merge, grid[1] // merge, merge, merge, 3, size, size)
    return blocks.transpose(4, 0, 2, 5, 1, 3, 6).tobytes()


if __name__ == "__main__":
    sys.exit(main())
