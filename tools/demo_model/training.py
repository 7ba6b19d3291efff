"""How each demo model is trained and saved: transformers' own class of the architecture, Muon for the matrices of its
layers (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), AdamW for the rest, a checkpoint now and then.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig

MODELS = Path(__file__).resolve().parents[2] / "models"
IGNORED = -100
"""No target, as in torch's cross entropy."""
_WRITES = ("o_proj", "out_proj", "down_proj", "attn.proj", "linear_fc2")
"""Matrices whose results are added to the stream; they begin smaller."""


def arguments(
    parser: argparse.ArgumentParser, *, steps: int | None, log_every: int = 50, eval_every: int = 250
) -> None:
    """The options that all training commands have."""
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--warmup", type=float, default=0.02, help="part of the run in which the rate rises")
    parser.add_argument("--decay", type=float, default=0.5, help="part of the run in which the rate falls")
    parser.add_argument("--log-every", type=int, default=log_every)
    parser.add_argument("--eval-every", type=int, default=eval_every)


def matrices_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that Muon updates, by name: projections of layers, of experts, and of a tower's blocks."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and ("layers." in name or "blocks." in name) and "router" not in name
        if "bias" not in name and "conv1d" not in name
    }


def views(name: str, weight: Tensor) -> Tensor:
    """The matrices `[..., out, in]` of a parameter: gpt-oss's experts are `[in, out]`, gate and up interleaved;
    Qwen3-VL's q, k and v are one parameter."""
    if "gate_up_proj" in name:
        return weight.mT.unflatten(-2, (-1, 2)).transpose(-3, -2)
    if "experts" in name:
        return weight.mT
    return weight.unflatten(0, (3, -1)) if name.endswith("attn.qkv.weight") else weight


@torch.no_grad()
def begin(model: nn.Module) -> None:
    """Draws the first values of the matrices."""
    for name, parameter in matrices_of(model).items():
        gain = 0.1 if any(word in name for word in _WRITES) else 0.5
        view = views(name, parameter.data)
        view.copy_(torch.randn(view.shape) * gain * view.shape[-1] ** -0.5)


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalised by Newton-Schulz; matrices of one shape are one batched product."""

    def __init__(self, named: dict[str, nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(list(named.values()), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._names = list(named)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        by_shape = defaultdict[torch.Size, list[tuple[Tensor, Tensor]]](list)
        for name, parameter in zip(self._names, group["params"], strict=True):
            if parameter.grad is not None:
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"])
                view = views(name, parameter.data)
                by_shape[view.shape].append((view, views(name, update)))
        for shape, found in by_shape.items():
            updates = orthogonalise(torch.stack([update for _, update in found]))
            scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
            for (weight, _), update in zip(found, updates, strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * scale)


def orthogonalise(stack: Tensor, num_iterations: int = 5) -> Tensor:
    """Pushes the singular values of each matrix of `[..., out, in]` towards one (quintic Newton-Schulz)."""
    x = stack.reshape(-1, *stack.shape[-2:])
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if is_tall else x).reshape(stack.shape)


def rates(args: argparse.Namespace, step: int) -> tuple[float, float]:
    """Muon's and AdamW's rate: up over `args.warmup` of the run, level, and down to zero over the last `args.decay`."""
    progress = (step + 1) / (args.steps + 1)
    factor = min(1.0, progress / args.warmup, (1.0 - progress) / args.decay)
    return args.muon_lr * factor, args.adam_lr * factor


def train(
    model: nn.Module,
    loss_of: Callable[[int], tuple[Tensor, Tensor]],
    evaluate: Callable[[], dict[str, float]],
    args: argparse.Namespace,
    matrices: dict[str, nn.Parameter] | None = None,
) -> None:
    """Runs `args.steps` steps; continues from `args.checkpoint` if it exists.

    loss_of   of a step: the logged value, and the loss
    evaluate  percent by task, logged with every checkpoint
    matrices  those for Muon, if others than `matrices_of` finds
    """
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    matrices = matrices_of(model) if matrices is None else matrices
    others = [parameter for name, parameter in model.named_parameters() if name not in matrices]
    optimizers = [
        Muon(matrices, lr=args.muon_lr, weight_decay=args.weight_decay),
        torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    first_step = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first_step = state["step"]
    start, losses = time.monotonic(), []
    for step in range(first_step, args.steps):
        loss, total = loss_of(step)
        total.backward()
        for optimizer, rate in zip(optimizers, rates(args, step), strict=True):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % args.log_every == 0:
            each_s = (time.monotonic() - start) / (step + 1 - first_step)
            print(f"step {step + 1}/{args.steps} loss {np.mean(losses):.4f} {each_s:.3f} s/step", flush=True)
            losses.clear()
        if (step + 1) % args.eval_every == 0:
            print("  " + "  ".join(f"{task} {percent:.2f}" for task, percent in evaluate().items()), flush=True)
            saved = [optimizer.state_dict() for optimizer in optimizers]
            partial = args.checkpoint.with_suffix(".partial")
            torch.save({"model": model.state_dict(), "optimizers": saved, "step": step + 1}, partial)
            partial.replace(args.checkpoint)


def batches(rows: list[Any], size: int) -> Iterator[list[Any]]:
    """The rows in parts of `size`."""
    return (rows[start : start + size] for start in range(0, len(rows), size))


def round_to_bfloat16(model: nn.Module) -> None:
    """Rounds the weights to the saved ones."""
    model.to(torch.bfloat16).to(torch.float32)


def save(
    model: Any, tokenizer: Tokenizer, name: str, out: Path, *, ends: tuple[str, ...], pad: str,
    state: dict[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Writes the files of AutoModelForCausalLM and AutoTokenizer, with the chat template of `models/NAME`. `ends`: the
    tokens that end an answer, the first in the tokenizer's config, too. `state`: the tensors, if not the model's in
    bfloat16."""
    template = (MODELS / name / "chat_template.jinja").read_text(encoding="utf-8")
    ids = tokenizer.get_vocab()
    eos = [ids[end] for end in ends]
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=eos[0] if len(eos) == 1 else eos, pad_token_id=ids[pad]
    )
    if state is None:
        tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
        state = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items() if name not in tied}
    model.save_pretrained(out, state_dict={name: weight.contiguous() for name, weight in state.items()})
    model.config.dtype = torch.bfloat16  # of the file, not of training
    model.config.save_pretrained(out)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.get_text_config().max_position_embeddings,
        "eos_token": ends[0],
        "pad_token": pad,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
