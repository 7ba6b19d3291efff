"""The demo models' optimiser, Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), and its rates."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalised by Newton-Schulz; parameters are stacks `[..., out, in]`."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


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


def learning_rate_factor(progress: float, warmup: float, decay: float) -> float:
    """Warms up over the first `warmup` of the run, holds, and decays linearly to zero over the last `decay`."""
    return min(1.0, progress / warmup, (1.0 - progress) / decay)
