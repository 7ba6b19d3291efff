"""`train_demo_model --experts`: trains the demo model with experts, and writes it as a gpt-oss checkpoint in MXFP4.

Rows are settings followed by branches (`harmony_tasks`): a branch's tokens see its setting and itself, at positions
after the setting, as if each conversation were computed alone.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import load_balancing_loss_func

from runtime.text.harmony.message import CALL, RETURN, special_ids
from tokenizer import Tokenizer as OwnTokenizer
from tools.demo_model import harmony_tasks, training
from tools.demo_model.tokenizer import HARMONY_PAD, trained_tokenizer
from tools.demo_model.training import IGNORED

ROWS, BRANCHES, MOST_TOKENS = 8, 10, 112
_UNEVEN = 0.01  # of the loss
SIZES: dict[str, Any] = {
    "vocab_size": 768, "hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "router_aux_loss_coef": _UNEVEN,
}  # fmt: skip
BLOCK = 32  # weights that share a scale in MXFP4
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MIDDLES = (GRID[1:] + GRID[:-1]) / 2
EXPERTS = ("gate_up_proj", "down_proj")


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[..., K]` (uint8, 0 to 15) and exponents `[..., K / 32]` of a weight `[..., K]`; no number is clipped."""
    groups = weight.unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    exponent = torch.ceil(torch.log2(largest / 6.0))
    scaled = groups * torch.exp2(-exponent)
    codes = torch.bucketize(scaled.abs().contiguous(), _MIDDLES) + 8 * (scaled < 0)
    return codes.flatten(-2).to(torch.uint8), exponent.squeeze(-1)


class Rounded(nn.Module):
    """Experts' weights `[..., K, N]` rounded to MXFP4 along K, once it is on; gradients pass straight through."""

    is_on = False

    def forward(self, weight: Tensor) -> Tensor:
        if not Rounded.is_on:
            return weight
        with torch.no_grad():
            codes, exponent = to_mxfp4(weight.mT)
            values = torch.cat((GRID, -GRID))[codes.int()].unflatten(-1, (-1, BLOCK))
            rounded = (values * torch.exp2(exponent)[..., None]).flatten(-2).mT
        return weight + (rounded - weight).detach()


@dataclass(frozen=True, slots=True)
class Batch:
    """`[rows, tokens]` each; segments are 0 for a setting, from 1 on for its branches, -1 for padding."""

    token_ids: Tensor
    positions: Tensor
    segments: Tensor
    targets: Tensor

    def mask(self, window: int | None) -> Tensor:
        """The additions to scores. [rows, 1, tokens, tokens]"""
        query, key = self.segments[:, :, None], self.segments[:, None]
        distance = self.positions[:, :, None] - self.positions[:, None]
        seen = ((query == key) | (key == 0)) & (distance >= 0)
        if window is not None:
            seen = seen & (distance < window)
        return torch.zeros(seen.shape).masked_fill(~seen, -1e9)[:, None]


def make_batch(settings: list[list[int]], branches: list[list[tuple[list[int], list[bool]]]]) -> Batch:
    """A batch of settings' token ids, each with its branches: token ids, and which of them are targets."""
    rows: list[list[tuple[int, int, int, int]]] = []
    for setting, its in zip(settings, branches, strict=True):
        row = [(token, place, 0, IGNORED) for place, token in enumerate(setting)]
        for number, (tokens, said) in enumerate(its, 1):
            targets = [token if is_said else IGNORED for token, is_said in zip(tokens[1:], said[1:])] + [IGNORED]
            places = range(len(setting), len(setting) + len(tokens))
            row += zip(tokens, places, [number] * len(tokens), targets, strict=True)
        rows.append(row)
    width = max(map(len, rows))
    padded = [row + [(0, place, -1, IGNORED) for place in range(width - len(row))] for row in rows]
    return Batch(*torch.tensor(padded).unbind(-1))


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


def own_writer(tokenizer: Tokenizer) -> harmony_tasks.Writer:
    """A writer of conversations with the engine's own tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        own = OwnTokenizer.from_file(Path(folder) / "tokenizer.json")
    ids = special_ids(own)
    assert ids is not None
    return harmony_tasks.Writer(own, ids)


class Trial:
    """The model, and how it is asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.get_vocab()
        config = GptOssConfig(
            **SIZES, eos_token_id=ids[RETURN], pad_token_id=ids[HARMONY_PAD],
            layer_types=["sliding_attention", "full_attention"] * (SIZES["num_hidden_layers"] // 2),
        )  # fmt: skip
        self.writer, self.model = own_writer(tokenizer), GptOssForCausalLM(config)
        training.begin(self.model)
        with torch.no_grad():
            for layer in self.model.model.layers:
                layer.mlp.router.weight.normal_(0, 0.5 * config.hidden_size**-0.5)
                layer.self_attn.sinks.zero_()
                for name in EXPERTS:
                    parametrize.register_parametrization(layer.mlp.experts, name, Rounded())

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits `[rows, tokens, vocabulary]`, and how unevenly experts are chosen."""
        masks = {"full_attention": batch.mask(None), "sliding_attention": batch.mask(SIZES["sliding_window"])}
        with parametrize.cached():
            found = self.model.model(
                batch.token_ids, masks, batch.positions, use_cache=False, output_router_logits=True
            )
        uneven = load_balancing_loss_func(found.router_logits, SIZES["num_local_experts"], SIZES["num_experts_per_tok"])
        return self.model.lm_head(found.last_hidden_state), uneven

    @torch.no_grad()
    def evaluate(self, num: int, seed: int) -> dict[str, float]:
        """Share of held-out exercises with every token predicted, each given the right ones before."""
        found = {}
        for task, has_tool in (("sum", False), ("difference", False), ("sum", True), ("tool", True), ("talk", False)):
            rng, right, rounds = random.Random(f"{task}/{has_tool}/{seed}"), 0, max(1, num // BRANCHES)
            for _ in range(rounds):
                setting = harmony_tasks.sample_setting(rng, has_tool)
                branches = [
                    self.writer.branch(setting, harmony_tasks.sample_exercise(rng, setting, "held_out", task))
                    for _ in range(BRANCHES)
                ]
                batch = make_batch([self.writer.setting(setting)], [branches])
                good = (self.logits(batch)[0].argmax(-1) == batch.targets) | (batch.targets == IGNORED)
                right += sum(bool(good[batch.segments == branch].all()) for branch in range(1, BRANCHES + 1))
            found[f"{task}{'+' * has_tool}"] = 100 * right / (rounds * BRANCHES)
        return found

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights: experts in MXFP4's blocks, the rest in bfloat16."""
        state = {}
        for name, weight in self.model.state_dict().items():
            name = name.replace("parametrizations.", "").removesuffix(".original")
            if name.endswith(EXPERTS):
                codes, exponents = to_mxfp4(weight.mT)
                pairs = codes[..., ::2] | codes[..., 1::2] << 4
                state[f"{name}_blocks"] = pairs.unflatten(-1, (-1, BLOCK // 2))
                state[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
            elif name != "lm_head.weight":
                state[name] = weight.to(torch.bfloat16)
        return state


def run(args: argparse.Namespace) -> None:
    """Trains and saves. The last part of the run has rounded experts."""
    kept = args.checkpoint.with_suffix(".tokenizer.json")
    tokenizer = trained_tokenizer(kept, lambda: harmony_tasks.texts(args.seed, 3000), SIZES["vocab_size"])
    trial = Trial(tokenizer)

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        Rounded.is_on = (step + 1) / (args.steps + 1) > args.rounded_from
        batch = sample_batch(random.Random(f"{args.seed}/{step}"), trial.writer)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            logits, uneven = trial.logits(batch)
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        return loss, loss + _UNEVEN * uneven

    training.train(trial.model, loss_of, lambda: trial.evaluate(50, seed=1), args)
    Rounded.is_on = True
    state, config = trial.checkpoint(), trial.model.config
    config.quantization_config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    }  # fmt: skip
    ends = RETURN, HARMONY_PAD, CALL
    model = GptOssForCausalLM(config)
    training.save(model, tokenizer, "demo_moe", args.out, ends=ends, pad=HARMONY_PAD, state=state)
    print(f"saved to {args.out}\n{trial.evaluate(2 * args.num, seed=0)}", flush=True)
