"""Train an EAGLE-3 drafter for the bundled demo model, so that `--speculation eagle3` has one.

    python -m tools.train_drafter        # writes models/demo/drafter: under an hour on one core

The model runs over the conversations that it was trained on (`demo_model/tasks.py`), with the hidden states of some of
its layers kept; the drafter (`demo_model/drafter.py`) learns to predict the model's tokens: the loss is the cross
entropy to the model's own distribution, only at tokens of answers, over several steps ahead of each.

The mean accepted length is a step's accepted tokens plus the model's own one: over all decode steps of held-out
questions, each on its own, decoded greedily. Needs the `reference` extra (torch).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from tools.demo_model import tasks, training
from tools.demo_model import tokenizer as demo_tokenizer
from tools.demo_model.drafter import Drafter, DrafterShape
from tools.train_demo_model import sample_ids

MODEL = Path("models/demo")


def answer_tokens(token_ids: Tensor, assistant_id: int, end_id: int) -> Tensor:
    """True for tokens of answers, their end tokens included. [rows, tokens]"""
    is_end, is_begin = (token_ids == end_id).int(), (token_ids == assistant_id).int()
    return is_begin.cumsum(-1) - (is_end.cumsum(-1) - is_end) - is_begin == 1


def columns_of(is_answer: Tensor) -> tuple[Tensor, Tensor]:
    """The columns to draft from, those before two tokens of an answer, row by row: `[rows, most]`, and a mask of the
    used ones."""
    here = is_answer[:, 1:-1] & is_answer[:, 2:]  # column i: tokens i + 1 and i + 2
    most = max(1, int(here.sum(-1).max()))
    order = here.int().argsort(dim=-1, descending=True, stable=True)[:, :most]
    return order, here.gather(1, order)


@torch.no_grad()
def run_model(model: Any, token_ids: Tensor, layers: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """The hidden states after `layers`, and the final ones."""
    kept: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[layer - 1].register_forward_hook(lambda *found, layer=layer: kept.update({layer: found[-1]}))
        for layer in layers
    ]
    final = model.model(token_ids, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    return [kept[layer] for layer in layers], final


class Trial:
    """A model, its drafter, and the steps ahead that it is trained for."""

    def __init__(self, model: Any, drafter: Drafter, tokenizer: Tokenizer, num_steps: int, decay: float) -> None:
        self.model, self.drafter, self.tokenizer = model, drafter, tokenizer
        self.embedding = model.model.embed_tokens.weight
        self.num_steps, self.decay = num_steps, decay
        self.assistant_id = cast(int, tokenizer.token_to_id(demo_tokenizer.ASSISTANT))
        self.end_id = cast(int, tokenizer.token_to_id(demo_tokenizer.END))

    def loss(self, token_ids: Tensor) -> Tensor:
        """`token_ids` [rows, tokens]"""
        is_answer = answer_tokens(token_ids, self.assistant_id, self.end_id)
        columns, is_there = columns_of(is_answer)
        kept, final = run_model(self.model, token_ids, self.drafter.shape.layers)
        total, last = torch.zeros(()), token_ids.shape[1] - 1
        steps = self.drafter.steps(token_ids, kept, self.embedding, columns, self.num_steps)
        for step, hidden in enumerate(steps):
            drawn_at = columns + 2 + step
            is_there = is_there & (drawn_at <= last) & is_answer.gather(1, drawn_at.clamp(max=last))
            if not is_there.any():
                break
            behind = (drawn_at - 1).clamp(max=last).unsqueeze(-1).expand(-1, -1, final.shape[-1])
            with torch.no_grad():
                wanted = self.model.lm_head(final.gather(1, behind)[is_there]).softmax(-1)
            given = self.model.lm_head(hidden[is_there])
            total = total + self.decay**step * F.cross_entropy(given, wanted)
        return total

    @torch.no_grad()
    def accepted(self, turns: list[tasks.Turn], most: int) -> dict[str, tuple[int, int]]:
        """By task: tokens of the greedy answers after their first, and their steps, with `most` proposals a step. Wrong
        answers of the model are left out."""
        found: dict[str, tuple[int, int]] = {}
        for turn in turns:
            text = demo_tokenizer.render(tasks.to_messages(None, [turn]))
            ids = torch.tensor([self.tokenizer.encode(text).ids])
            is_answer = answer_tokens(ids, self.assistant_id, self.end_id)
            kept, final = run_model(self.model, ids, self.drafter.shape.layers)
            said = self.model.lm_head(final).argmax(-1)[0]  # after each token
            places = is_answer[0].nonzero()[:, 0].tolist()
            if said[places[0] - 1 : -1].tolist() != ids[0, places[0] :].tolist():
                continue
            columns = torch.tensor([[place - 1 for place in places[:-1]]])
            if not columns.numel():
                continue
            right = []
            for step, hidden in enumerate(self.drafter.steps(ids, kept, self.embedding, columns, most)):
                guessed = self.model.lm_head(hidden).argmax(-1)[0]
                ahead = columns[0] + 2 + step
                right.append((ahead < ids.shape[1]) & (guessed == ids[0, ahead.clamp(max=ids.shape[1] - 1)]))
            lengths = torch.stack(right).int().cumprod(0).sum(0).tolist()
            tokens, steps = found.get(turn.task, (0, 0))
            known = 1
            while known < len(places):
                kept_now = min(lengths[known - 1] + 1, len(places) - known)
                tokens, steps, known = tokens + kept_now, steps + 1, known + kept_now
            found[turn.task] = tokens, steps
        return found


def mean_lengths(found: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Mean lengths by task, and over all."""
    total = [sum(each) for each in zip(*found.values(), strict=True)]
    return {task: tokens / steps for task, (tokens, steps) in found.items()} | {"all": total[0] / total[1]}


def save(drafter: Drafter, out: Path) -> None:
    """Writes a folder in the plain layout of EAGLE-3 checkpoints, without the model's token table and head."""
    shape = drafter.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(shape, name) for name in shape.__slots__ if name != "layers"},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": shape.hidden_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(drafter.checkpoint(), out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL / "drafter")
    parser.add_argument("--checkpoint", type=Path, default=Path("scratch/drafter_checkpoint.pt"))
    parser.add_argument("--unrolled", type=int, default=7, help="tokens ahead that are trained")
    parser.add_argument("--step-decay", type=float, default=0.9, help="weight of each further token")
    parser.add_argument("--num", type=int, default=100, help="questions of a task at the end")
    training.arguments(parser, steps=1200, log_every=20, eval_every=100)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    model: Any = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).requires_grad_(False)
    drafter = Drafter(DrafterShape())
    trial = Trial(model, drafter, Tokenizer.from_file(str(MODEL / "tokenizer.json")), args.unrolled, args.step_decay)

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        rng = random.Random(f"drafter/{args.seed}/{step}")
        loss = trial.loss(sample_ids(trial.tokenizer, rng, args.batch_tokens, 0))
        return loss, loss

    def lengths(num: int, seed: int) -> dict[str, float]:
        turns = [turn for task in tasks.TASKS for turn in tasks.held_out_questions(task, num, seed)]
        return mean_lengths(trial.accepted(turns, 7))

    training.train(drafter, loss_of, lambda: lengths(10, 1), args, drafter.matrices())
    training.round_to_bfloat16(drafter)
    save(drafter, args.out)
    print(f"saved to {args.out}")
    for task, length in lengths(args.num, 0).items():
        print(f"{task}: {length:.2f} tokens a step")


if __name__ == "__main__":
    main()
