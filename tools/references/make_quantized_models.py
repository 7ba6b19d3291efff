"""Makes the quantised checkpoints of tests/models/quantized by the libraries of their formats.

    # in a Python with compressed_tensors >= 0.20
    python tools/references/make_quantized_models.py compressed-tensors
    # with compressed_tensors 0.12, the last to write g_idx
    python tools/references/make_quantized_models.py reordered
    # with gptqmodel (installed with BUILD_CUDA_EXT=0)
    python tools/references/make_quantized_models.py gptq
    # FOLDER: of autoawq's unpacked source
    python tools/references/make_quantized_models.py awq FOLDER
    # with transformers >= 5.20
    python tools/references/make_quantized_models.py fp8
    # with transformers >= 5.20: a gpt-oss, and its logits
    python tools/references/make_quantized_models.py mxfp4
    # with nvidia-modelopt >= 0.47
    python tools/references/make_quantized_models.py modelopt
    # with compressed_tensors: folders of `xserv quantize`
    python tools/references/make_quantized_models.py read FOLDER ...

Each case is a Llama of one layer, whose matrices the library quantises and packs: `config.json`, `model.safetensors`,
and `dequantised.json`: for each matrix the type and the SHA-256 of the floats that the library unpacks again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "models" / "quantized" / "fixtures"
Tensors = dict[str, torch.Tensor]


class Case:
    """One checkpoint under construction: a Llama whose matrices are quantised one after another."""

    def __init__(self, name: str, dtype: torch.dtype = torch.bfloat16, head_dim: int = 16, inner: int = 64) -> None:
        self.name, self.dtype = name, dtype
        self.config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": inner,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim,
            "vocab_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": str(dtype).removeprefix("torch."),
        }  # fmt: skip
        heads, kv_heads = 2 * head_dim, head_dim
        rows = {
            "self_attn.q_proj": (heads, 64), "self_attn.k_proj": (kv_heads, 64), "self_attn.v_proj": (kv_heads, 64),
            "self_attn.o_proj": (64, heads), "mlp.gate_proj": (inner, 64), "mlp.up_proj": (inner, 64),
            "mlp.down_proj": (64, inner),
        }  # fmt: skip
        random = np.random.default_rng(sum(name.encode()))
        self.matrices = {
            f"model.layers.0.{module}": torch.tensor(random.normal(0, 0.05, shape), dtype=torch.float32).to(dtype)
            for module, shape in rows.items()
        }
        floats = {"model.embed_tokens": (16, 64), "lm_head": (16, 64), "model.norm": (64,)}
        floats |= {f"model.layers.0.{norm}_layernorm": (64,) for norm in ("input", "post_attention")}
        self.tensors: Tensors = {
            f"{module}.weight": torch.tensor(random.normal(0, 0.05, shape) + (len(shape) == 1), dtype=torch.float32).to(
                dtype
            )
            for module, shape in floats.items()
        }
        self.dequantised: dict[str, dict[str, str]] = {}

    def add(self, module: str, stored: Tensors, dequantised: torch.Tensor) -> None:
        """Stores a matrix, and the library's floats of it, `[N, K]`."""
        self.tensors |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
        self.dequantised[f"{module}.weight"] = {
            "dtype": str(dequantised.dtype).removeprefix("torch."),
            "sha256": digest(dequantised),
        }

    def keep(self, module: str) -> None:
        """Stores a matrix in floats."""
        self.tensors[f"{module}.weight"] = self.matrices[module]

    def write(self, quantization_config: dict[str, Any] | None) -> None:
        """Writes the folder; with None the config does not mention quantisation."""
        folder = FIXTURES / self.name
        folder.mkdir(parents=True, exist_ok=True)
        config = {**self.config, **({"quantization_config": quantization_config} if quantization_config else {})}
        (folder / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n", encoding="utf-8")
        tensors = {name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "dequantised.json").write_text(json.dumps(self.dequantised, indent=1) + "\n", encoding="utf-8")
        print(self.name, sum(tensor.nbytes for tensor in self.tensors.values()), "bytes")


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the elements' bytes."""
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest elements that share a scale."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        parts = weight.reshape(1, 1, -1)
    elif args.strategy == "channel":
        parts = weight.reshape(rows, 1, columns)
    elif args.strategy == "block":
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        parts = blocks.transpose(1, 2).flatten(2)
    else:
        parts = weight.reshape(rows, columns // args.group_size, args.group_size)
    low, high_end = parts.amin(-1), parts.amax(-1)
    return (low.reshape(1), high_end.reshape(1)) if args.strategy == "tensor" else (low, high_end)


def compressed(case: Case, module: str, scheme: Any, extra: Tensors | None = None) -> None:
    """Quantises, packs and unpacks a matrix by compressed_tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight, args = case.matrices[module], scheme.weights
    low, high = extremes(weight, args)
    state: Tensors = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
    scale, zero = calculate_qparams(low, high, args, state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, scheme).value)
    stored = compressor.compress(state, scheme)
    unpacked = compressor.decompress(stored, scheme)["weight"]
    case.add(module, {**stored, **(extra or {})}, unpacked)


def compressed_tensors_cases() -> None:
    """One case for each preset and format."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    def case_of(
        name: str, scheme: Any, *, dtype: torch.dtype = torch.bfloat16, extra: Tensors | None = None,
        head_dim: int = 16, change: Callable[[Case, dict[str, Any]], None] = lambda case, config: None, inner: int = 64,
    ) -> None:  # fmt: skip
        from compressed_tensors.compressors.format import infer_module_format

        case = Case(name, dtype, head_dim, inner)
        for module in case.matrices:
            compressed(case, module, scheme, extra)
        format = infer_module_format(torch.nn.Linear, scheme).value
        scheme.format = format
        config = QuantizationConfig(
            config_groups={"group_0": scheme}, format=format, ignore=["lm_head"], quantization_status="compressed"
        )
        written = json.loads(json.dumps(config.model_dump(), default=str))
        change(case, written)
        case.write(written)

    def preset(name: str, **changes: Any) -> Any:
        scheme = preset_name_to_scheme(name, ["Linear"])
        for field, value in changes.items():
            setattr(scheme.weights, field, value)
        return scheme

    static = {"input_scale": torch.tensor([0.03], dtype=torch.bfloat16)}
    case_of("ct_fp8_tensor", preset("FP8"), extra=static)
    case_of("ct_fp8_block", preset("FP8_BLOCK", block_structure=[32, 32]), head_dim=12, inner=72)
    case_of("ct_int8_channel", preset("INT8"), dtype=torch.float16)
    asymmetric = preset("INT8", symmetric=False)
    case_of("ct_int8_asymmetric", asymmetric)
    case_of("ct_w4_group", preset("W4A16", group_size=32))
    case_of("ct_w4_asymmetric", preset("W4A16_ASYM", group_size=32, actorder="weight"), dtype=torch.float16)
    case_of("ct_w4_channel", preset("W4A16", group_size=None, strategy="channel"), head_dim=6, inner=70)
    case_of("ct_w8_group", preset("W8A16", group_size=32))
    case_of("ct_nvfp4", preset("NVFP4"), extra={"input_global_scale": torch.tensor([20.0])})
    case_of("ct_mxfp4", preset("MXFP4A16"))
    case_of("ct_mxfp8", preset("MXFP8"))

    def with_pages(case: Case, config: dict[str, Any]) -> None:
        config["kv_cache_scheme"] = json.loads(
            QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False).model_dump_json()
        )
        for part in ("k_scale", "v_scale"):
            case.tensors[f"model.layers.0.self_attn.{part}"] = torch.tensor([0.5], dtype=torch.bfloat16)

    case_of("ct_fp8_channel", preset("FP8_DYNAMIC"), change=with_pages)

    case = Case("ct_mixed")
    attention = preset_name_to_scheme("FP8_DYNAMIC", ["re:.*self_attn.*"])
    down = preset_name_to_scheme("W8A16", ["model.layers.0.mlp.down_proj"])
    rest = preset_name_to_scheme("W4A16", ["Linear"])
    down.weights.group_size = rest.weights.group_size = 32
    attention.format, down.format, rest.format = "float-quantized", "pack-quantized", "pack-quantized"
    for module in case.matrices:
        if module.endswith("up_proj"):
            case.keep(module)
        else:
            compressed(case, module, attention if "self_attn" in module else down if "down" in module else rest)
    groups: dict[str, QuantizationScheme] = {"group_0": rest, "group_1": attention, "group_2": down}
    config = QuantizationConfig(
        config_groups=groups, format="mixed-precision", ignore=["lm_head", "re:.*up_proj$"],
        quantization_status="compressed",
    )  # fmt: skip
    case.write(json.loads(json.dumps(config.model_dump(), default=str)))


def reordered_cases() -> None:
    """`actorder: group`, which newer versions neither write nor read."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    case = Case("ct_w4_reordered")
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True, actorder="group")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.load_from_registry("pack-quantized")
    for module, weight in case.matrices.items():
        order = torch.tensor(np.random.default_rng(len(module)).permutation(weight.shape[1]))
        g_idx = torch.empty(weight.shape[1], dtype=torch.int32)
        g_idx[order] = torch.arange(weight.shape[1], dtype=torch.int32) // 32
        scale, zero = calculate_qparams(*extremes(weight[:, order], args), args)
        state = {"weight_scale": scale, "weight_g_idx": g_idx}
        packed = compressor.compress_weight(
            weight=weight, scale=scale, zero_point=zero, g_idx=g_idx, quantization_args=args
        )
        unpacked = compressor.decompress_weight({**packed, **state}, quantization_args=args)
        case.add(module, {**packed, **state}, unpacked)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", ignore=["lm_head"], quantization_status="compressed"
    )
    case.write(json.loads(json.dumps(config.model_dump(), default=str)))


def gptq_cases() -> None:
    """Formats 1 and 2, with and without zeros, orders and other bits."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import FORMAT, QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    def add(case: Case, module: str, config: Any, bits: int, group_size: int) -> None:
        weight = case.matrices[module]
        width, depth = weight.shape
        size = depth if group_size == -1 else group_size
        g_idx = torch.arange(depth, dtype=torch.int32) // size
        order = torch.arange(depth)
        if config.desc_act:
            order = torch.tensor(np.random.default_rng(len(module)).permutation(depth))
            g_idx = torch.empty_like(g_idx)
            g_idx[order] = torch.arange(depth, dtype=torch.int32) // size
        parts = weight[:, order].float().reshape(width, -1, size)
        largest = (1 << bits) - 1
        if config.sym:
            scales = 2 * parts.abs().amax(-1) / largest
            zeros = torch.full_like(scales, (largest + 1) // 2)
        else:
            low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
            scales = (high - low) / largest
            zeros = torch.clamp(torch.round(-low / scales), 1, largest)
        linear = torch.nn.Linear(depth, width, bias=False, dtype=weight.dtype)
        linear.weight.data = weight
        packed = TorchLinear(
            bits=bits, group_size=group_size, sym=config.sym, desc_act=config.desc_act, in_features=depth,
            out_features=width, register_buffers=True,
        )  # fmt: skip
        packed.pack_original(linear, scales.half().float(), zeros, g_idx)
        packed.post_init()
        if config.format != FORMAT.GPTQ_V2:
            convert_gptq_v2_to_v1_format_module(packed, config)
        stored = {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
        if config.format != FORMAT.GPTQ_V2:
            convert_gptq_v1_to_v2_format_module(packed, bits, torch.int32)
        case.add(module, stored, packed.dequantize_weight().T.contiguous())

    cases = {
        "gptq_w4": {}, "gptq_w4_zeros": {"sym": False}, "gptq_w4_v2": {"sym": False, "format": FORMAT.GPTQ_V2},
        "gptq_w4_reordered": {"desc_act": True, "sym": False},
        "gptq_w8_reordered": {"bits": 8, "sym": False, "desc_act": True, "format": FORMAT.GPTQ_V2},
        "gptq_w4_channel": {"group_size": -1},
        "gptq_dynamic": {"dynamic": {r"+:.*down_proj": {"bits": 8, "group_size": 16}, r"-:.*\.o_proj": {}}},
    }  # fmt: skip
    for name, settings in cases.items():
        config = QuantizeConfig(**{"bits": 4, "group_size": 32, **settings})
        case = Case(name, torch.float16)
        for module in case.matrices:
            if config.dynamic and module.endswith("o_proj"):
                case.keep(module)
            elif config.dynamic and module.endswith("down_proj"):
                add(case, module, config, 8, 16)
            else:
                add(case, module, config, config.bits, config.group_size)
        case.write({**json.loads(json.dumps(config.to_dict(), default=str)), "meta": {"quantizer": ["gptqmodel:7"]}})


def awq_cases(source: str) -> None:
    """Random words, which `dequantize_gemm` dequantises."""
    path = Path(source) / "awq" / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    assert spec is not None
    assert spec.loader is not None
    packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packing)
    for name, group_size in (("awq_w4", 32), ("awq_w4_channel", -1)):
        case = Case(name, torch.float16)
        random = np.random.default_rng(group_size % 7)
        for module, weight in case.matrices.items():
            width, depth = weight.shape
            size = depth if group_size == -1 else group_size
            words = random.integers(-(1 << 31), 1 << 31, (depth + depth // size, width // 8), np.int64).astype(np.int32)
            qweight, qzeros = torch.tensor(words[:depth]), torch.tensor(words[depth:])
            scales = torch.tensor(random.uniform(0.002, 0.01, (depth // size, width))).half()
            unpacked = packing.dequantize_gemm(qweight, qzeros, scales, 4, size)
            case.add(module, {"qweight": qweight, "qzeros": qzeros, "scales": scales}, unpacked.T.contiguous())
        case.write({
            "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": None,
        })  # fmt: skip


def fp8_cases() -> None:
    """Blocks, exponents as scales, one scale for all with static activations."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    for name, block, scale_format, scheme in (
        ("fp8_block", [16, 32], "float", "dynamic"),
        ("fp8_block_exponents", [16, 16], "ue8m0", "dynamic"),
        ("fp8_tensor_static", None, "float", "static"),
    ):
        case = Case(name)
        owner = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt=scale_format))
        for module, weight in case.matrices.items():
            if module.endswith("v_proj"):
                case.keep(module)
                continue
            stored = Fp8Quantize(owner).convert({"weight": weight})
            unpacked = Fp8Dequantize(owner)._dequantize_one(stored["weight"], stored["weight_scale_inv"], case.dtype)
            if block is None:
                stored["weight_scale_inv"] = stored["weight_scale_inv"].reshape(())
                stored["activation_scale"] = torch.tensor(0.02)
            case.add(module, stored, unpacked)
        case.write({
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme, "weight_block_size": block,
            "scale_fmt": scale_format, "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.v_proj"],
        })  # fmt: skip


def mxfp4_case() -> None:
    """A gpt-oss whose experts are random blocks of FP4; transformers' floats of them, and its logits."""
    import transformers
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, random = FIXTURES.parent / "gpt_oss_mxfp4", np.random.default_rng(4)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]
    config = transformers.GptOssConfig(
        vocab_size=41, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=3, num_experts_per_tok=2, sliding_window=5,
        max_position_embeddings=128, dtype="bfloat16",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 8,
            "truncate": False,
        },
    )  # fmt: skip
    config.architectures = ["GptOssForCausalLM"]
    model = transformers.GptOssForCausalLM(config)
    tensors: Tensors = {}
    said: dict[str, dict[str, str]] = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            values = random.normal(0, 0.2, parameter.shape) + name.endswith("norm.weight")
            tensors[name] = torch.tensor(values, dtype=torch.bfloat16)
            continue
        experts, depth, width = parameter.shape
        blocks = torch.tensor(random.integers(0, 256, (experts, width, depth // 32, 16), np.uint8))
        scales = torch.tensor(random.integers(120, 125, (experts, width, depth // 32), np.uint8))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats = convert_moe_packed_tensors(blocks, scales)
        said[name] = {"dtype": "bfloat16", "sha256": digest(floats.transpose(1, 2))}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    }  # fmt: skip
    fields = {**json.loads(config.to_json_string(use_diff=False)), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    asked = transformers.Mxfp4Config(dequantize=True)
    read = transformers.GptOssForCausalLM.from_pretrained(
        folder, quantization_config=asked, dtype=torch.bfloat16, attn_implementation="eager"
    ).float()
    with torch.no_grad():
        logits = read(torch.tensor([prompt])).logits[0]
    assert torch.isfinite(logits).all()
    (folder / "said.json").write_text(
        json.dumps({"floats": said, "prompt": prompt, "logits": logits.tolist()}) + "\n", encoding="utf-8"
    )
    print(folder.name, sum(tensor.nbytes for tensor in tensors.values()), "bytes")


def modelopt_cases() -> None:
    """Whole folders of NVIDIA's exporter; one has its config only in hf_quant_config.json, like older ones."""
    import modelopt.torch.quantization as mtq
    import transformers
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file

    def floats_of(tensors: Tensors, module: str) -> torch.Tensor:
        """The library's own tensor of a matrix, dequantised to float32: its FP8 rounds scales to the type first."""
        weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
        if weight.dtype == torch.uint8:
            shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
            floats = NVFP4QTensor(shape, torch.float32, weight).dequantize(
                scale=scale, double_scale=tensors[f"{module}.weight_scale_2"], block_sizes={-1: 16}
            )
            codes = torch.stack([weight & 15, weight >> 4], -1).reshape(shape)
            return torch.where(codes == 8, -0.0, floats)  # the library's table has 0 for it
        if scale.dtype == torch.uint8:
            return MXFP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale)
        return FP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale.reshape(-1, 1))

    def rules(config: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
        return {**config, "quant_cfg": [*config["quant_cfg"], *others]}

    nvfp4 = next(each["cfg"] for each in mtq.NVFP4_DEFAULT_CFG["quant_cfg"] if each.get("cfg"))
    mixed = [{"quantizer_name": f"*mlp.*{kind}_quantizer", "cfg": nvfp4} for kind in ("weight", "input")]
    unconverted = {"quantizer_name": "*v_proj*", "enable": False}
    pages = next(each for each in mtq.FP8_KV_CFG["quant_cfg"] if each.get("cfg"))
    cases = {
        "modelopt_fp8": rules(mtq.FP8_DEFAULT_CFG, pages), "modelopt_fp8_rows": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
        "modelopt_nvfp4": rules(mtq.NVFP4_DEFAULT_CFG, unconverted), "modelopt_mxfp8": mtq.MXFP8_DEFAULT_CFG,
        "modelopt_mixed": rules(mtq.FP8_DEFAULT_CFG, *mixed),
    }  # fmt: skip
    for name, settings in cases.items():
        case = Case(name)
        config = transformers.LlamaConfig(**{**case.config, "dtype": torch.bfloat16})
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict({**case.tensors, **{f"{each}.weight": of for each, of in case.matrices.items()}})
        model = mtq.quantize(model, settings, lambda model: model(torch.arange(11)[None]))
        folder = FIXTURES / name
        export_hf_checkpoint(model, export_dir=folder)
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        tensors = load_file(folder / "model.safetensors")
        for module in case.matrices:
            if f"{module}.weight_scale" in tensors:
                case.add(module, {}, floats_of(tensors, module))
        case.tensors = tensors
        for path in folder.iterdir():
            if name != "modelopt_nvfp4" or path.name != "hf_quant_config.json":
                path.unlink()
        case.write(said if name != "modelopt_nvfp4" else None)


def read_folders(*folders: str) -> None:
    """Prints digests of folders dequantised by compressed_tensors, by the folder's and the tensor's name."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    found: dict[str, dict[str, dict[str, str]]] = {}
    for folder in map(Path, folders):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        parsed = QuantizationConfig.model_validate(config)
        scheme = parsed.config_groups["group_0"]
        compressor = BaseCompressor.get_value_from_registry(parsed.format)
        tensors = load_file(folder / "model.safetensors")
        modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
        for module in sorted(modules):
            assert module not in parsed.ignore, module
            state = {
                name.removeprefix(f"{module}."): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"{module}.weight")
            }
            assert set(state) == set(compressor.compression_param_names(scheme)), (module, set(state))
            floats = compressor.decompress(state, scheme)["weight"]
            said = {"dtype": str(floats.dtype).removeprefix("torch."), "sha256": digest(floats)}
            found.setdefault(folder.name, {})[f"{module}.weight"] = said
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    made: dict[str, Callable[..., None]] = {
        "compressed-tensors": compressed_tensors_cases, "reordered": reordered_cases, "gptq": gptq_cases,
        "awq": awq_cases, "fp8": fp8_cases, "mxfp4": mxfp4_case,
        "modelopt": modelopt_cases, "read": read_folders,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=made)
    parser.add_argument("folder", nargs="*")
    asked = parser.parse_args()
    made[asked.command](*asked.folder)
