"""Qwen3-VL's tower on the cpu beside transformers': the same seeded weights, compared, then timed in turns.

    python -m tools.comparing.compare_towers --reference .venv-reference/bin/python

The peer runs in a process of the Python that `--reference` names, which needs torch and transformers; each side waits
while the other computes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from models.checkpoints.dummy import DummyCheckpoint
from models.registry import load_config, load_model, tensor_layout
from numba_kernels.cpu.running.pool import NUM_THREADS
from runtime.bench.environment import describe_machine
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.child_process import ChildProcess, answering_program
from runtime.dtype import bfloat16
from tools.comparing.qwen3_vl_shapes import write_qwen3_vl

MOST_ERROR = 1e-3
"""Of the largest embedding: weights are seeded and stored in bfloat16, and both sides compute in float32."""

PEER = answering_program(
    """
import time
import numpy as np, torch
from safetensors.torch import load_file
import transformers
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

def load(folder, threads, side):
    torch.set_num_threads(threads)
    config = Qwen3VLVisionConfig(**json.load(open(folder + "/config.json"))["vision_config"])
    config._attn_implementation = "sdpa"
    global model, patches, grid
    model = Qwen3VLVisionModel(config).eval()
    state = {k.removeprefix("model.visual."): v.float() for k, v in load_file(folder + "/tower.safetensors").items()}
    model.load_state_dict(state)
    patches = torch.from_numpy(np.load(folder + "/patches.npy"))
    grid = torch.tensor([[1, side, side]])
    return {"torch": torch.__version__, "transformers": transformers.__version__}

@torch.no_grad()
def run(path=None):
    begin = time.perf_counter()
    made = model(patches, grid)
    seconds = time.perf_counter() - begin
    if path:
        found = made.pooler_output if hasattr(made, "pooler_output") else made[0]
        np.save(path, found.numpy())
    return {"seconds": seconds}
"""
)


def compare(reference: str, *, side: int, num_layers: int, num_rounds: int) -> dict[str, Any]:
    """`side`: patches of a square picture's side. Raises BenchmarkError where the embeddings differ."""
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as place:
        folder = write_qwen3_vl(Path(place), tower_layers=num_layers, text_layers=4)
        model: Any = load_model(folder, load_format="dummy", device="cpu")
        patches = np.random.default_rng(0).uniform(-1, 1, (side * side, 3 * 2 * 16**2)).astype(np.float32)
        np.save(folder / "patches.npy", patches)
        save_file(stored_tower(folder), folder / "tower.safetensors")
        ours = model.tower(patches, (side, side))[0].numpy().astype(np.float32)
        with ChildProcess([reference, "-c", PEER], "transformers") as peer:
            versions = peer.ask("load", folder=str(folder), threads=NUM_THREADS, side=side)
            peer.ask("run", path=str(folder / "theirs.npy"))
            theirs = np.load(folder / "theirs.npy")
            error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
            if not error <= MOST_ERROR:
                raise BenchmarkError(f"the embeddings differ by {error:.1e} of the largest, limit {MOST_ERROR}")
            times: list[tuple[float, float]] = []
            for _ in range(num_rounds):
                start = time.perf_counter()
                model.tower(patches, (side, side))
                mine = time.perf_counter() - start
                times.append((mine, peer.ask("run")["seconds"]))
    return {
        "environment": {**describe_machine(), **versions, "num_threads": NUM_THREADS},
        "num_layers": num_layers, "num_patches": side * side, "largest_difference": error,
        "xserv_s": round(median(mine for mine, _ in times), 4),
        "transformers_s": round(median(theirs for _, theirs in times), 4),
        "times_faster": round(median(theirs / mine for mine, theirs in times), 2),
        "rounds": [[round(each, 4) for each in pair] for pair in times],
    }  # fmt: skip


def stored_tower(folder: Path) -> dict[str, Any]:
    """The tower's seeded weights under their names, as a checkpoint would have them."""
    layout = tensor_layout(load_config(folder))
    checkpoint = DummyCheckpoint(layout, 0, bfloat16)
    return {name: checkpoint.array(name) for name in layout.shapes if name.startswith("model.visual.")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", required=True, help="a Python with torch and transformers")
    parser.add_argument("--side", type=int, default=24, help="patches of the picture's side")
    parser.add_argument("--num-layers", type=int, default=6, help="of the tower's 24")
    parser.add_argument("--num-rounds", type=int, default=7)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    report = compare(args.reference, side=args.side, num_layers=args.num_layers, num_rounds=args.num_rounds)
    print(json.dumps(report, indent=2))
    if args.output_json:
        args.output_json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
