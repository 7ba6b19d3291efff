"""Writes small matrices in the packings of the `auto-round` library, with the weights that they stand for.

    python -m tools.references.make_auto_round     # needs auto-round and torch

Weights are integers times scales, so that the library's packing rounds nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from auto_round import __version__
from auto_round.export.export_to_awq.utils import WQLinear_GEMM
from auto_round_extension.torch.qlinear_torch import QuantLinear as Plain
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "models" / "quantized" / "fixtures" / "auto_round"
WIDTH, DEPTH = 32, 128
CASES = [
    (packing, bits, size, is_symmetric)
    for packing in ("auto_round:auto_gptq", "auto_round", "auto_round:auto_awq")
    for bits in ((4,) if "awq" in packing else (2, 3, 4, 8))
    for size in (32, 128)
    for is_symmetric in (True, False)
]


def main() -> None:
    torch.manual_seed(3)
    tensors, configs = {}, {}
    for i, (packing, bits, size, is_symmetric) in enumerate(CASES):
        groups, middle = DEPTH // size, 1 << (bits - 1)
        scales = (torch.rand(WIDTH, groups) + 0.5).half()
        zeros = torch.full((WIDTH, groups), middle)
        if not is_symmetric:
            zeros = torch.randint(1, 1 << bits, (WIDTH, groups))
        numbers = torch.randint(0, 1 << bits, (WIDTH, DEPTH))
        weight = (numbers - zeros.repeat_interleave(size, 1)).float() * scales.float().repeat_interleave(size, 1)
        linear = torch.nn.Linear(DEPTH, WIDTH, bias=False)
        linear.weight.data = weight
        if "awq" in packing:
            layer = WQLinear_GEMM.from_linear(
                linear, bits, size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous(), device="cpu"
            )
        else:
            kind = LessOne if "gptq" in packing else Plain
            layer = kind(bits, size, DEPTH, WIDTH, False)
            layer.device = torch.device("cpu")
            layer.pack(linear, scales.float(), zeros.float(), None, device="cpu")
        for name in ("qweight", "qzeros", "scales"):
            tensors[f"{i}.{name}"] = getattr(layer, name).contiguous()
        tensors[f"{i}.expected"] = weight
        configs[str(i)] = {"packing_format": packing, "bits": bits, "group_size": size, "sym": is_symmetric}
    FOLDER.mkdir(exist_ok=True)
    save_file(tensors, FOLDER / "model.safetensors", {"cases": json.dumps(configs), "auto_round": __version__})


if __name__ == "__main__":
    main()
