"""What the KV cache holds for one sequence of a model that mixes windows and full attention, beside all-full layers.

    python -m tools.measuring.measure_kv_groups --output-json docs/measurements/DATE-kv-groups.json

Models with the layers and windows of Gemma 3 (but narrow Qwen3s with dummy weights: the shares do not depend on that)
serve one request each on the cpu; in every step the blocks that the pool has lent are counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams

MODELS = {"Gemma 3 1B": (26, 512), "Gemma 3 4B": (34, 1024), "Gemma 3 12B": (48, 1024)}
"""Layers, of which every sixth sees all, and the window of the others."""

WIDTH = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "torch_dtype": "bfloat16",
    "use_sliding_window": True,
}  # fmt: skip
NUM_DECODES = 64


def measure(name: str, num_tokens: int, chunk: int) -> dict[str, Any]:
    """Bytes that a sequence of so many tokens holds: the most while its prompt is computed ``chunk`` tokens at a time,
    and the most while it decodes its last tokens."""
    num_layers, window = MODELS[name]
    kinds = ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(num_layers)]
    config: dict[str, Any] = {
        **WIDTH, "num_hidden_layers": num_layers, "layer_types": kinds, "sliding_window": window,
        "max_position_embeddings": num_tokens,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        engine = build_engine(
            folder, device="cpu", load_format="dummy", max_model_len=num_tokens, max_num_seqs=1,
            max_num_batched_tokens=chunk, enable_prefix_caching=False,
        )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NUM_DECODES, ignore_eos=True, detokenize=False)
    prompt = [index % 60 for index in range(num_tokens - NUM_DECODES)]
    engine.add(EngineRequest(request_id="one", prompt_token_ids=prompt, params=params))
    (sequence,) = engine.requests["one"].sequences
    info, held, schedule = engine.info, {"prompt": 0, "decode": 0}, engine.scheduler.schedule

    def count() -> Any:
        step = schedule()
        if step.chunks:
            phase = "decode" if sequence.num_output_tokens else "prompt"
            held[phase] = max(held[phase], engine.pool.num_blocks - engine.pool.num_free)
        return step

    engine.scheduler.schedule = count  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    engine.close()
    groups, block_bytes = info.cache_groups, info.kv_cache_bytes // info.num_blocks
    layer_bytes = block_bytes // (groups[0].num_layers + groups[0].num_padding)
    all_full = -(-num_tokens // info.block_size) * num_layers * layer_bytes
    return {
        "model": name,
        "layers": num_layers,
        "window": window,
        "num_tokens": num_tokens,
        "chunk": chunk,
        "block_size": info.block_size,
        "groups": [
            {"window": group.window, "layers": group.num_layers, "padding": group.num_padding} for group in groups
        ],
        "all_full_bytes": all_full,
        **{f"{phase}_bytes": blocks * block_bytes for phase, blocks in held.items()},
        **{f"{phase}_share": round(blocks * block_bytes / all_full, 4) for phase, blocks in held.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    logging.disable()
    rows = [measure(name, options.num_tokens, chunk) for name in MODELS for chunk in options.chunks]
    print("| model | window | chunk | groups, padded layers | while its prompt is computed | while it decodes |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        padding = sum(group["padding"] for group in row["groups"])
        print(
            f"| {row['model']} | {row['window']} | {row['chunk']:,} | {len(row['groups'])}, {padding} | "
            f"{row['prompt_share']:.1%} | {row['decode_share']:.1%} |"
        )
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
