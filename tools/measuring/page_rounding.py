"""What rounding keys and values costs the bundled model: by number, by scale, and for keys and values alone.

    python -m tools.measuring.page_rounding write QUESTIONS.json      # the questions of tools.quality, as ids
    python tools/measuring/page_rounding.py measure QUESTIONS.json    # in a Python with torch and transformers >= 5.20

`measure` runs transformers' float32 model with each head's row of keys (rotated) and values rounded as pages of a byte
keep them. A shift of the perplexity of the right answers has the standard error of its mean over questions. A scale
that makes a row's largest number another than 448 rounds as finely (but below 240): it draws other errors of the same
size.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

LARGEST = 448.0
OTHERS = (416.0, 384.0, 352.0, 320.0, 288.0, 272.0, 240.0)
AT_ONCE = 65


def write(path: str) -> None:
    """Ids of each question and its right answer, and where the model lies."""
    from models.checkpoints.hub import BUNDLED_MODEL
    from runtime.text.load import read_tokenizer
    from tools.demo_model import tasks

    encode = read_tokenizer(BUNDLED_MODEL).encode
    turns = [turn for task in tasks.TASKS for turn in tasks.held_out_questions(task, 100, 0)]
    pairs = [
        (encode(f"<|user|>{turn.question}<|end|><|assistant|>"), encode(f"{turn.answer}<|end|>")) for turn in turns
    ]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"model": str(BUNDLED_MODEL), "pairs": sorted(pairs, key=lambda pair: len(pair[0] + pair[1]))}, file)


def measure(path: str) -> None:
    """Prints a line for each way of rounding."""
    import torch
    import transformers
    from transformers.models.qwen3 import modeling_qwen3

    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    model = transformers.AutoModelForCausalLM.from_pretrained(content["model"], dtype=torch.float32).eval()
    pairs, head_dim = content["pairs"], model.config.head_dim
    Rounding = Callable[[torch.Tensor], torch.Tensor]
    rounding: dict[str, Rounding] = {}
    rotate = modeling_qwen3.apply_rotary_pos_emb

    def rotated(q: torch.Tensor, k: torch.Tensor, *others: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = rotate(q, k, *others, **named)
        return q, rounding["keys"](k) if "keys" in rounding else k

    def rounded_values(module: Any, inputs: Any, values: torch.Tensor) -> torch.Tensor:
        if "values" not in rounding:
            return values
        return rounding["values"](values.unflatten(-1, (-1, head_dim))).flatten(-2)

    modeling_qwen3.apply_rotary_pos_emb = rotated
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(rounded_values)

    def int8(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return (x / scale).round() * scale

    def e4m3(largest: float) -> Rounding:
        def rounded(x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
            return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale

        return rounded

    def scores(**chosen: Rounding) -> torch.Tensor:
        """The log probability of each answer."""
        rounding.clear()
        rounding.update(chosen)
        found = []
        for first in range(0, len(pairs), AT_ONCE):
            some = pairs[first : first + AT_ONCE]
            ids = torch.zeros(len(some), max(len(asked + answer) for asked, answer in some), dtype=torch.long)
            for row, (asked, answer) in enumerate(some):
                ids[row, : len(asked + answer)] = torch.tensor(asked + answer)
            with torch.no_grad():
                logprobs = model(ids).logits.log_softmax(-1)
            for row, (asked, answer) in enumerate(some):
                places = torch.arange(len(asked) - 1, len(asked + answer) - 1)
                found.append(logprobs[row, places, torch.tensor(answer)].double().sum())
        return torch.stack(found)

    num_tokens = sum(len(answer) for _, answer in pairs)
    floats, usual = scores(), e4m3(LARGEST)
    print(f"{'floats':<24}{math.exp(-floats.sum() / num_tokens):.5f}", flush=True)
    ways: dict[str, dict[str, Rounding]] = {
        "int8": {"keys": int8, "values": int8},
        "e4m3": {"keys": usual, "values": usual},
        "e4m3, keys alone": {"keys": usual},
        "e4m3, values alone": {"values": usual},
    }
    for largest in OTHERS:
        ways[f"e4m3, largest {largest:g}"] = {"keys": e4m3(largest), "values": e4m3(largest)}
    for name, chosen in ways.items():
        found = scores(**chosen)
        worse = floats - found
        error = worse.std() * math.sqrt(len(worse)) / num_tokens
        perplexity = math.exp(-found.sum() / num_tokens)
        print(f"{name:<24}{perplexity:.5f} {math.expm1(worse.sum() / num_tokens):+.3%} +- {error:.3%}", flush=True)


if __name__ == "__main__":
    commands = {"write": write, "measure": measure}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    parser.add_argument("questions", metavar="QUESTIONS.json")
    asked = parser.parse_args()
    commands[asked.command](asked.questions)
