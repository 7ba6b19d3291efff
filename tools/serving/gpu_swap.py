"""The time in which an 8B model takes another's place on a GPU, modelled without one.

    python -m tools.serving.gpu_swap [--json FILE]

Asleep its weights lie in pinned memory, from where they come at the rate that an H200 was measured at (`UPLOADS`). The
rest of a wake-up depends on the number of tensors and not on their sizes: it is timed on an emulated GPU with a model
of as many layers, which are narrow, the emulator's own time included. The first step, which captures its graph, takes
what a first request took there. The other model's sleep, its second or a later one, keeps the copy that it has; it is
timed likewise. Not counted: the driver's allocations, and the products of norms and maps, on the device."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.safetensors_file import write_tensors
from models.registry import declare
from runtime.bench.environment import describe_machine
from runtime.llm.llm import LLM

UPLOADS = {"pinned": 55.4, "pageable": 30.65}
"""10^9 bytes a second to an H200: "host to device", and the row "1024 MiB, not pinned", 0.553 of it, of
docs/measurements/2026-11-26-gpu-check-h200.json, "upload"."""
WEIGHT_BYTES, FIRST_REQUEST_S = 16_382_087_168, 0.23
"""Qwen3-8B in bfloat16: docs/measurements/2026-11-26-gpu-check-h200-first.json, "qwen3-8b", "load"."""
NARROW: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 256,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def swap_s(upload_gb_s: float, fixed_s: float, first_request_s: float = FIRST_REQUEST_S) -> float:
    """Seconds from a request for a sleeping 8B model to its first token."""
    return WEIGHT_BYTES / (1e9 * upload_gb_s) + fixed_s + first_request_s


def write_narrow(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(NARROW), encoding="utf-8")
    tensors = declare(folder, load_format="dummy").source.tensors
    arrays = {name: stored.array() for name, stored in tensors.items()}
    plan = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    write_tensors(folder / "model.safetensors", plan, (np.asarray(each) for each in arrays.values()))


def timed(rounds: int) -> dict[str, list[float]]:
    """Seconds of sleeps and wake-ups of the narrow model, but the first."""
    found: dict[str, list[float]] = {"sleep": [], "wake_up": []}
    with tempfile.TemporaryDirectory() as folder:
        write_narrow(Path(folder))
        llm = LLM(
            folder, device="emulated:sm_90a", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, num_blocks=64,
        )  # fmt: skip
        try:
            for _ in range(rounds + 1):
                for name, act in (("sleep", llm.sleep), ("wake_up", llm.wake_up)):
                    begun_s = time.perf_counter()
                    act()
                    found[name].append(time.perf_counter() - begun_s)
        finally:
            llm.close()
    return {name: times[1:] for name, times in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="File for the report.")
    given = parser.parse_args()
    times = timed(given.rounds)
    medians = {name: statistics.median(each) for name, each in times.items()}
    fixed_s = sum(medians.values())
    report = {
        "command": f"python -m tools.serving.gpu_swap --rounds {given.rounds}",
        "weight_bytes": WEIGHT_BYTES,
        "first_request_s": FIRST_REQUEST_S,
        "fixed_s": {name: round(each, 4) for name, each in medians.items()},
        "most_s": {name: round(max(each), 4) for name, each in times.items()},
        "swap_s": {kind: round(swap_s(rate, fixed_s), 3) for kind, rate in UPLOADS.items()},
        "upload_gb_per_s": UPLOADS,
        "environment": describe_machine(),
    }
    text = json.dumps(report, indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
