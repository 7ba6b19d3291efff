"""Compares log probabilities of models that read pictures, saved again by transformers and loaded by both sides.

    python -m tools.comparing.compare_resaved_vision --reference .venv-reference/bin/python

Each tiny model of the tests, with random weights, is made in bfloat16 and in float32, loaded by
`from_pretrained(dtype=...)` and saved again: with today's names of tensors and with those of published files, and its
processor as `processor_config.json` and as `preprocessor_config.json`. Both sides then read two pictures and compute in
float32. The peer runs in a process of the Python that `--reference` names, which needs transformers, torch and Pillow.
Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench.peers.child_process import ChildProcess, answering_program
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import XservError
from runtime.llm import LLM
from tests.models.vision import cases, gemma3_cases, llava_cases, pixtral_cases

CASES: dict[str, dict[str, Any]] = {
    **cases.CASES, **llava_cases.CASES, **pixtral_cases.CASES, **gemma3_cases.CASES,
}  # fmt: skip
PROMPT = [3, cases.IMAGE, 17, 5, cases.IMAGE, 81, 44]
SIZES = ((22, 13), (18, 30))
MOST_DIFFERENCE = 2e-3
"""Largest difference of a log probability."""

PEER = answering_program(
    """
import numpy as np, torch, transformers
torch.set_num_threads(1)

def load():
    return {"transformers": transformers.__version__}

@torch.no_grad()
def run(step, **given):
    return {"save": save, "read": read}[step](**given)

def save(config, processor, folder, dtype, is_original, is_nested):
    transformers.set_seed(1)
    dtype = getattr(torch, dtype)
    config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for name, each in model.named_parameters():
        if each.ndim > 1:
            each.normal_(0.0, each[0].numel() ** -0.5)
        elif "norm" in name:
            each.add_(torch.randn_like(each) / 8)
    model.to(dtype).save_pretrained(folder + "/first")
    again = type(model).from_pretrained(folder + "/first", dtype=dtype)
    again.save_pretrained(folder, save_original_format=is_original)
    own, kind = processor.pop("own", {}), processor.pop("kind")
    images = getattr(transformers, kind + "ImageProcessorPil")(**processor)
    if is_nested:
        json.dump({"image_processor": images.to_dict(), **own}, open(folder + "/processor_config.json", "w"))
    else:
        images.save_pretrained(folder)
        json.dump({"processor_class": "Any", **own}, open(folder + "/processor_config.json", "w"))
    return {}

def read(folder, ids, image_token, pictures, token_size):
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    images = transformers.AutoImageProcessor.from_pretrained(folder)
    pictures = [np.load(path) for path in pictures]
    more = {"patch_size": token_size} if token_size else {}
    made = dict(images(pictures, return_tensors="pt", **more))
    ids = torch.tensor([ids])
    kinds = (ids == image_token).int()
    if "image_grid_thw" in made:
        made["mm_token_type_ids"] = kinds
    if model.config.model_type == "gemma3":
        made["token_type_ids"] = kinds
    made.pop("num_crops", None)
    logits = model(input_ids=ids, **made).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
"""
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", required=True, help="a Python with transformers, torch and Pillow")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    wrong = 0
    with ChildProcess([args.reference, "-c", PEER], "transformers") as peer, tempfile.TemporaryDirectory() as place:
        print(json.dumps(peer.ask("load")))
        pictures = [Path(place) / f"{number}.npy" for number in range(len(SIZES))]
        for number, (path, size) in enumerate(zip(pictures, SIZES, strict=True)):
            np.save(path, np.random.RandomState(number).randint(0, 256, (*size, 3)).astype(np.uint8))
        for case, dtype, is_original in product(args.cases, ("bfloat16", "float32"), (False, True)):
            how = f"{case}, {dtype}, {'published' if is_original else 'current'} names"
            folder = Path(place) / how
            try:
                difference = compared(peer, CASES[case], folder, dtype, is_original, pictures)
                is_wrong = not difference <= MOST_DIFFERENCE
                print(f"{how}: {difference:.1e}")
            except XservError as error:
                is_wrong = True
                print(f"{how}: {error}")
            wrong += is_wrong
    print(json.dumps({"models": 4 * len(args.cases), "different": wrong}))
    return int(wrong > 0)


def compared(
    peer: ChildProcess, config: dict[str, Any], folder: Path, dtype: str, is_original: bool, pictures: list[Path]
) -> float:
    """The largest difference of a log probability."""
    processor = processor_of(config)
    peer.ask(
        "run", step="save", config=config, processor=processor, folder=str(folder), dtype=dtype,
        is_original=is_original, is_nested=not is_original,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    with LLM(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=128, compile_ahead=False) as llm:
        asked = {"prompt_token_ids": PROMPT, "images": [np.load(path) for path in pictures]}
        (output,) = llm.generate(asked, params, use_tqdm=False)
    ids, said = output.prompt_token_ids, output.prompt_logprobs
    assert said is not None
    mine = [each[token].logprob for token, each in zip(ids[1:], said[1:], strict=True) if each is not None]
    merge = config.get("spatial_merge_size", 1)
    theirs = peer.ask(
        "run", step="read", folder=str(folder), ids=ids, image_token=cases.IMAGE, pictures=[*map(str, pictures)],
        token_size=pixtral_cases.PATCH * merge if processor["kind"] == "Pixtral" else 0,
    )  # fmt: skip
    return float(np.abs(np.array(mine) - theirs).max())


def processor_of(config: dict[str, Any]) -> dict[str, Any]:
    """transformers' image processor for a case, and what stands beside it in `processor_config.json`."""
    vision = config["vision_config"]
    if "image_size" not in vision:
        return {"kind": "Qwen2VL", "patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 4096}}
    side = vision["image_size"]
    if vision["model_type"] == "pixtral":
        own = {"patch_size": pixtral_cases.PATCH, "spatial_merge_size": config.get("spatial_merge_size", 1)}
        return {"kind": "Pixtral", "size": {"longest_edge": side}, "own": own}
    both = {"height": side, "width": side}
    if vision["model_type"] == "clip_vision_model":
        return {"kind": "CLIP", "size": {"shortest_edge": side}, "crop_size": both}
    return {"kind": "Gemma3" if config["model_type"] == "gemma3" else "Siglip", "size": both}


if __name__ == "__main__":
    sys.exit(main())
