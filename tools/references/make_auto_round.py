"""Writes small matrices in the packings of the `auto-round` library, with the weights that they stand for.

    python -m tools.references.make_auto_round     # needs auto-round, compressed-tensors and torch

Weights of integers are integers times scales, so that the library's packing rounds nothing. Those of floats are random
bits, which the library's inference modules make into floats. compressed-tensors packs `llm_compressor`'s integers.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from auto_round import __version__
from auto_round.experimental.qmodules.fp8_static import WeightFP8ActFP8StaticQuantLinear
from auto_round.experimental.qmodules.mx import MXFP4QuantLinear, MXFP8QuantLinear, MXINT4QuantLinear
from auto_round.experimental.qmodules.nvfp4 import NVFP4QuantLinear
from auto_round.experimental.qmodules.nvfp4_e5m3 import NVFP4E5M3QuantLinear
from auto_round.export.export_to_awq.utils import WQLinear_GEMM
from auto_round_extension.torch.qlinear_torch import QuantLinear as Plain
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
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
    write(FOLDER, tensors, configs)
    write(FOLDER / "floats", *floats())
    write(FOLDER / "packed", *packed_integers())


def write(folder: Path, tensors: dict[str, torch.Tensor], configs: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"cases": json.dumps(configs), "auto_round": __version__})


FLOATS = {
    "mx_fp": (4, 32, "llm_compressor", MXFP4QuantLinear, torch.float32),
    "mx_fp8": (8, 32, "llm_compressor", MXFP8QuantLinear, torch.float32),
    "mx_int": (4, 32, "", MXINT4QuantLinear, torch.float32),
    "nv_fp": (4, 16, "llm_compressor", NVFP4QuantLinear, torch.float32),
    "nvfp4_v2": (4, 16, "llm_compressor_nvfp4_e5m3", NVFP4E5M3QuantLinear, torch.float32),
    "fp": (8, -1, "fp8_static", WeightFP8ActFP8StaticQuantLinear, torch.bfloat16),
}
"""Data types: bits, the size of a group, packing, the library's module, and the type of its weights."""


def floats() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, configs = {}, {}
    for i, (data_type, (bits, size, packing, kind, dtype)) in enumerate(FLOATS.items()):
        sizes = SimpleNamespace(group_size=size, act_group_size=size)
        layer = kind(DEPTH, WIDTH) if size < 0 else kind(DEPTH, WIDTH, sizes)
        if bits == 4:
            layer.weight_packed = torch.randint(0, 256, (WIDTH, DEPTH // 2), dtype=torch.uint8)
        else:
            numbers = torch.nn.Parameter(torch.randn(WIDTH, DEPTH).to(torch.float8_e4m3fn), requires_grad=False)
            layer.weight = numbers
        if layer.weight_scale.dtype == torch.uint8:
            low, high = (0, 255) if "v2" in data_type else (90, 150)
            layer.weight_scale = torch.randint(low, high, layer.weight_scale.shape, dtype=torch.uint8)
        else:
            layer.weight_scale = (torch.rand(layer.weight_scale.shape) + 0.5).to(layer.weight_scale.dtype)
        for name in ("input_scale", "weight_global_scale", "input_global_scale"):
            if hasattr(layer, name):
                setattr(layer, name, (torch.rand(1) + 0.5).to(getattr(layer, name).dtype))
        for name, tensor in layer.state_dict().items():
            tensors[f"{i}.{name}"] = tensor.contiguous()
        tensors[f"{i}.expected"] = layer.dequant_weight_online().to(dtype).contiguous()
        configs[str(i)] = {
            "packing_format": f"auto_round:{packing}".removesuffix(":"), "bits": bits, "group_size": size, "sym": True,
            "data_type": data_type.removesuffix("8"), "act_bits": bits, "act_data_type": data_type,
            "act_dynamic": size > 0, "act_group_size": max(0, size),
        }  # fmt: skip
    return tensors, configs


def packed_integers() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors: dict[str, torch.Tensor] = {}
    configs: dict[str, Any] = {}
    depth = DEPTH - 3  # the last word of a row is not full
    for bits in range(2, 9):
        for is_symmetric in (True, False):
            i, middle = str(len(configs)), 1 << (bits - 1)
            groups = -(-depth // 32)
            numbers = torch.randint(-middle, middle, (WIDTH, depth), dtype=torch.int8)
            zeros = torch.zeros((WIDTH, groups), dtype=torch.int8)
            if not is_symmetric:
                zeros = torch.randint(-middle, middle, (WIDTH, groups), dtype=torch.int8)
                tensors[f"{i}.weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0)
            scales = torch.rand(WIDTH, groups) + 0.5
            tensors[f"{i}.weight_packed"] = pack_to_int32(numbers, bits)
            tensors[f"{i}.weight_shape"] = torch.tensor([WIDTH, depth])
            tensors[f"{i}.weight_scale"] = scales
            wide = [each.repeat_interleave(32, 1)[:, :depth] for each in (zeros.float(), scales)]
            tensors[f"{i}.expected"] = (numbers.float() - wide[0]) * wide[1]
            configs[i] = {"num_bits": bits, "group_size": 32, "symmetric": is_symmetric, "strategy": "group"}
    return tensors, configs


if __name__ == "__main__":
    main()
