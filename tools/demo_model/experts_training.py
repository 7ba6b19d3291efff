"""`train_demo_model --experts`: trains the demo model with experts, and writes it as a gpt-oss checkpoint in MXFP4."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from runtime.text.harmony.message import CALL, RETURN, special_ids
from tokenizer import Tokenizer as OwnTokenizer
from tools.demo_model import harmony_tasks, harmony_tokenizer, training
from tools.demo_model.experts_model import IGNORED, Batch, ExpertsModel, ExpertsShape, make_batch, to_mxfp4

ROWS, BRANCHES, MOST_TOKENS = 8, 10, 112
_UNEVEN = 0.01  # of the loss


def make_tokenizer(shape: ExpertsShape, seed: int, kept: Path) -> Tokenizer:
    """The tokenizer beside a checkpoint, or a new one, which is saved there."""
    if kept.exists():
        return Tokenizer.from_file(str(kept))
    tokenizer = harmony_tokenizer.build_tokenizer(harmony_tasks.texts(seed, 3000), shape.vocab_size)
    tokenizer.save(str(kept))
    return tokenizer


def own_writer(tokenizer: Tokenizer) -> harmony_tasks.Writer:
    """A writer of conversations with the engine's own tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        own = OwnTokenizer.from_file(Path(folder) / "tokenizer.json")
    ids = special_ids(own)
    assert ids is not None
    return harmony_tasks.Writer(own, ids)


def sample_batch(rng: random.Random, writer: harmony_tasks.Writer) -> Batch:
    """The batch of one training step."""
    settings, rows = [], []
    for _ in range(ROWS):
        setting = harmony_tasks.sample_setting(rng)
        branches: list[tuple[list[int], list[bool]]] = []
        while len(branches) < BRANCHES:
            branch = harmony_tasks.sample_branch(rng, setting, writer)
            if len(branch[0]) <= MOST_TOKENS:
                branches.append(branch)
        settings.append(writer.setting(setting))
        rows.append(branches)
    return make_batch(settings, rows)


@torch.no_grad()
def evaluate(model: ExpertsModel, writer: harmony_tasks.Writer, num: int, seed: int) -> dict[str, float]:
    """Share of held-out exercises with every token predicted, each given the right ones before."""
    found = {}
    for task, has_tool in (("sum", False), ("difference", False), ("sum", True), ("tool", True), ("talk", False)):
        rng = random.Random(f"{task}/{has_tool}/{seed}")
        right = 0
        for _ in range(num // BRANCHES):
            setting = harmony_tasks.sample_setting(rng, has_tool)
            branches = [
                writer.branch(setting, harmony_tasks.sample_exercise(rng, setting, "held_out", task))
                for _ in range(BRANCHES)
            ]
            batch = make_batch([writer.setting(setting)], [branches])
            good = (model(batch)[0].argmax(-1) == batch.targets).tolist()
            for _, said in branches:
                count = sum(said)
                right += all(good[:count])
                good = good[count:]
        found[f"{task}{'+' * has_tool}"] = 100 * right / (num // BRANCHES * BRANCHES)
    return found


def train(model: ExpertsModel, writer: harmony_tasks.Writer, args: argparse.Namespace) -> None:
    """Runs `args.steps` steps, the last part with rounded experts."""

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        model.rounds = (step + 1) / (args.steps + 1) > args.rounded_from
        batch = sample_batch(random.Random(f"{args.seed}/{step}"), writer)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            logits, uneven = model(batch)
        loss = F.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORED)
        return loss, loss + _UNEVEN * uneven

    training.train(model, model.matrices(), loss_of, lambda: evaluate(model, writer, 50, seed=1), args)


def checkpoint(model: ExpertsModel) -> dict[str, Tensor]:
    """The weights: experts in MXFP4's blocks, the rest in bfloat16, under gpt-oss's names."""
    state: dict[str, Tensor] = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.final_norm}
    packed: dict[str, Tensor] = {}
    for layer in range(model.shape.num_hidden_layers):
        front = f"model.layers.{layer}."
        k, v = model.key_value[layer]
        k_bias, v_bias = model.key_value_bias[layer]
        gate_up = torch.stack((model.gate[layer], model.up[layer]), dim=2).flatten(1, 2)  # gate and up interleaved
        gate_up_bias = torch.stack((model.gate_bias[layer], model.up_bias[layer]), dim=2).flatten(1, 2)
        state |= {
            f"{front}{name}": weight
            for name, weight in {
                "self_attn.q_proj.weight": model.query[layer], "self_attn.q_proj.bias": model.query_bias[layer],
                "self_attn.k_proj.weight": k, "self_attn.k_proj.bias": k_bias,
                "self_attn.v_proj.weight": v, "self_attn.v_proj.bias": v_bias,
                "self_attn.o_proj.weight": model.output[layer], "self_attn.o_proj.bias": model.output_bias[layer],
                "self_attn.sinks": model.sinks[layer],
                "input_layernorm.weight": model.attention_norm[layer],
                "post_attention_layernorm.weight": model.mlp_norm[layer],
                "mlp.router.weight": model.router[layer], "mlp.router.bias": model.router_bias[layer],
                "mlp.experts.gate_up_proj_bias": gate_up_bias, "mlp.experts.down_proj_bias": model.down_bias[layer],
            }.items()
        }  # fmt: skip
        for name, weight in (("gate_up_proj", gate_up), ("down_proj", model.down[layer])):
            codes, exponents = to_mxfp4(weight.detach())
            pairs = codes[..., ::2] | codes[..., 1::2] << 4
            packed[f"{front}mlp.experts.{name}_blocks"] = pairs.unflatten(-1, (-1, 16)).contiguous()
            packed[f"{front}mlp.experts.{name}_scales"] = (exponents + 127).to(torch.uint8)
    rounded = {name: weight.detach().to(torch.bfloat16).contiguous().clone() for name, weight in state.items()}
    return rounded | packed


def save(model: ExpertsModel, tokenizer: Tokenizer, out: Path) -> None:
    """Writes a model's folder."""
    out.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    ids = tokenizer.get_vocab()
    windows = [shape.window_of(layer) for layer in range(shape.num_hidden_layers)]
    config: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **{name: getattr(shape, name) for name in shape.__slots__ if name != "rope_theta"},
        "experts_per_token": shape.num_experts_per_tok,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "router_aux_loss_coef": _UNEVEN,
        "use_cache": True,
        "dtype": "bfloat16",
        "eos_token_id": ids[RETURN],
        "pad_token_id": ids[harmony_tokenizer.PAD],
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    }  # fmt: skip
    generation = {
        "do_sample": False,
        "eos_token_id": [ids[RETURN], ids[harmony_tokenizer.PAD], ids[CALL]],
        "pad_token_id": ids[harmony_tokenizer.PAD],
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "eos_token": RETURN,
        "pad_token": harmony_tokenizer.PAD,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (
        ("config.json", config), ("generation_config.json", generation), ("tokenizer_config.json", tokenizer_config),
    ):  # fmt: skip
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(harmony_tokenizer.CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    save_file(checkpoint(model), out / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def check_against_transformers(model: ExpertsModel, writer: harmony_tasks.Writer, out: Path) -> float:
    """The saved model's largest difference of logits from ours, over the largest; 2e-2 (bfloat16's) is refused."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    quantization = Mxfp4Config(dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=quantization)
    rng, error = random.Random(0), 0.0
    for _ in range(8):
        setting = harmony_tasks.sample_setting(rng)
        front, (ids, said) = writer.setting(setting), harmony_tasks.sample_branch(rng, setting, writer)
        ours = model(make_batch([front], [[(ids, said)]]))[0][: sum(said)]
        theirs = reference(torch.tensor([front + ids])).logits[0, len(front) :]
        theirs = theirs[[i for i in range(len(ids) - 1) if said[i + 1]]]
        error = max(error, ((ours - theirs).abs().max() / theirs.abs().max()).item())
    if not error <= 2e-2:
        raise RuntimeError(f"logits differ from transformers' by {error:.2e} of the largest")
    return error


def run(args: argparse.Namespace) -> None:
    """Trains and saves."""
    shape = ExpertsShape()
    tokenizer = make_tokenizer(shape, args.seed, args.checkpoint.with_suffix(".tokenizer.json"))
    writer, model = own_writer(tokenizer), ExpertsModel(shape)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    train(model, writer, args)
    model.rounds = True
    for parameter in model.parameters():
        if not any(parameter is each for each in (model.gate, model.up, model.down)):
            parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    save(model, tokenizer, args.out)
    error = check_against_transformers(model, writer, args.out)
    print(f"saved to {args.out}; logits within {error:.1e} of transformers'", flush=True)
    print(evaluate(model, writer, 400, seed=0), flush=True)
