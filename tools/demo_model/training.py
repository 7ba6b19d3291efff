"""The loop that trains each demo model: Muon for matrices, AdamW for the rest, a checkpoint now and then."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from tools.demo_model.muon import Muon, learning_rate_factor


def train(
    model: nn.Module,
    matrices: list[nn.Parameter],
    loss_of: Callable[[int], tuple[Tensor, Tensor]],
    evaluate: Callable[[], dict[str, float]],
    args: argparse.Namespace,
) -> None:
    """Runs `args.steps` steps; continues from `args.checkpoint` if it exists.

    loss_of   of a step: the logged values, and the loss
    evaluate  percent by task, logged with every checkpoint
    """
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    optimizers = [
        Muon(matrices, lr=args.muon_lr, weight_decay=args.weight_decay),
        torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [args.muon_lr, args.adam_lr]
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
        factor = learning_rate_factor((step + 1) / (args.steps + 1), args.warmup, args.decay)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % args.log_every == 0:
            elapsed = time.monotonic() - start
            print(
                f"step {step + 1}/{args.steps} loss {np.mean(losses):.4f} {elapsed:.0f} s "
                f"{elapsed / (step + 1 - first_step):.3f} s/step",
                flush=True,
            )
            losses.clear()
        if (step + 1) % args.eval_every == 0:
            print("  " + "  ".join(f"{task} {percent:.2f}" for task, percent in evaluate().items()), flush=True)
            saved = [optimizer.state_dict() for optimizer in optimizers]
            partial = args.checkpoint.with_suffix(".partial")
            torch.save({"model": model.state_dict(), "optimizers": saved, "step": step + 1}, partial)
            partial.replace(args.checkpoint)
