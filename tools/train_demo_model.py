"""Train the bundled demo model: a small Qwen3 for sums, differences, words, counting, capitals, small talk.

    python -m tools.train_demo_model            # the committed model: seeded, about an hour on two cores
    python -m tools.train_demo_model --experts  # models/demo_moe, a small gpt-oss (`demo_model/experts_training.py`)
    python -m tools.train_demo_model --hybrid   # models/demo_hybrid, a small Qwen3.5 (`demo_model/hybrid.py`)
    python -m tools.train_demo_model --vision   # models/demo_vision, a small Qwen3-VL (`demo_model/vision_training.py`)

Writes `models/demo`: config, weights in bf16, tokenizer, chat template. It learns fast by:

- rows are whole conversations: no padding, and later turns are learnt with a history before them;
- short rows for most steps, long ones (up to the model's 2,048 positions) for some;
- the loss is on the answers only, and the head runs only where there is a loss;
- Muon for matrices, AdamW for the rest (`demo_model/training.py`).

Needs the `reference` extra (torch, transformers).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tools.demo_model import experts_training, hybrid, tasks, training, vision_training
from tools.demo_model import tokenizer as demo_tokenizer

# Tokens a row: share of the steps. Every step has as many tokens, in fewer rows if they are long.
ROW_LENGTHS = {64: 0.45, 128: 0.30, 512: 0.15, 1024: 0.07, 2048: 0.03}
SIZES: dict[str, Any] = {
    "vocab_size": 640, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def sample_ids(tokenizer: Tokenizer, rng: random.Random, batch_tokens: int, longer: int) -> Tensor:
    """Conversations of one length, each cut at so many ids and `longer`. [rows, tokens]"""
    tokens = rng.choices(list(ROW_LENGTHS), weights=list(ROW_LENGTHS.values()))[0]
    texts = []
    for _ in range(batch_tokens // tokens):
        system, turns = tasks.sample_conversation(rng, tokens // 13 + 1)
        texts.append(demo_tokenizer.render(tasks.to_messages(system, turns)))
    batch = np.full((len(texts), tokens + longer), tokenizer.token_to_id(demo_tokenizer.PAD), dtype=np.int64)
    for row, encoding in zip(batch, tokenizer.encode_batch_fast(texts), strict=True):
        ids = encoding.ids[: len(row)]
        row[: len(ids)] = ids
    return torch.from_numpy(batch)


class Trial:
    """A model with its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, *, is_hybrid: bool) -> None:
        ids = tokenizer.get_vocab()
        self.tokenizer, self.pad_id = tokenizer, ids[demo_tokenizer.PAD]
        self.assistant_id, self.end_id = ids[demo_tokenizer.ASSISTANT], ids[demo_tokenizer.END]
        self.model: Any = (
            hybrid.make_model(self.end_id, self.pad_id)
            if is_hybrid
            else Qwen3ForCausalLM(
                Qwen3Config(**SIZES, eos_token_id=self.end_id, pad_token_id=self.pad_id, bos_token_id=None)
            )
        )
        training.begin(self.model)

    def answer_mask(self, token_ids: Tensor) -> Tensor:
        """True where the next token belongs to an answer, its end token included. [rows, tokens]"""
        return (token_ids == self.assistant_id).cumsum(-1) - (token_ids == self.end_id).cumsum(-1) == 1

    def loss(self, rng: random.Random, batch_tokens: int) -> Tensor:
        ids = sample_ids(self.tokenizer, rng, batch_tokens, 1)
        inputs, mask = ids[:, :-1], self.answer_mask(ids[:, :-1])
        hidden = self.model.model(inputs, use_cache=False).last_hidden_state
        return F.cross_entropy(self.model.lm_head(hidden[mask]), ids[:, 1:][mask])

    @torch.no_grad()
    def evaluate(self, num: int, seed: int) -> list[tasks.Score]:
        """Exact match on `num` held-out questions a task, each on its own: greedy, given the right tokens before."""
        turns = [turn for task in tasks.TASKS for turn in tasks.held_out_questions(task, num, seed)]
        answers = []
        for part in training.batches(turns, 100):
            texts = [demo_tokenizer.render(tasks.to_messages(None, [turn])) for turn in part]
            encoded = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
            width = max(map(len, encoded))
            ids = torch.tensor([row + [self.pad_id] * (width - len(row)) for row in encoded])
            guesses = self.model(ids, use_cache=False).logits.argmax(-1)
            mask = self.answer_mask(ids)
            answers += [self.tokenizer.decode(guess[at].tolist()) for guess, at in zip(guesses, mask, strict=True)]
        return tasks.score(turns, answers)


def check_template(tokenizer: Tokenizer, out: Path) -> None:
    """Raises RuntimeError if the saved tokenizer or its template differs from those of training."""
    saved = AutoTokenizer.from_pretrained(out)
    system, turns = tasks.sample_conversation(random.Random(0), 30)
    messages = tasks.to_messages(system or "You are a helpful assistant.", turns)
    rendered = saved.apply_chat_template(messages, tokenize=False)
    if rendered != demo_tokenizer.render(messages):
        raise RuntimeError(f"the chat template gives {rendered!r}")
    ids = tokenizer.encode(rendered).ids
    if saved.encode(rendered) != ids or saved.decode(ids) != rendered:
        raise RuntimeError("AutoTokenizer's ids or text differ from the tokenizer's")


def run(args: argparse.Namespace) -> None:
    """Trains and saves."""
    tokenizer = demo_tokenizer.build_tokenizer(SIZES["vocab_size"])
    trial = Trial(tokenizer, is_hybrid=args.hybrid)

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        loss = trial.loss(random.Random(f"{args.seed}/{step}"), args.batch_tokens)
        return loss, loss

    training.train(
        trial.model, loss_of, lambda: {score.task: score.percent for score in trial.evaluate(50, seed=1)}, args
    )
    training.round_to_bfloat16(trial.model)
    ends = (demo_tokenizer.END,)
    training.save(trial.model, tokenizer, "demo", args.out, ends=ends, pad=demo_tokenizer.PAD)
    check_template(tokenizer, args.out)
    print(f"saved to {args.out}\n{tasks.format_scores(trial.evaluate(args.num, seed=0))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", action="store_true", help="the model with experts, models/demo_moe")
    parser.add_argument("--hybrid", action="store_true", help="the model with recurrent states, models/demo_hybrid")
    parser.add_argument("--vision", action="store_true", help="the model with a tower, models/demo_vision")
    parser.add_argument("--pictures", type=int, default=32, help="of a step, with --vision")
    parser.add_argument("--tower-steps", type=int, default=1000, help="of the tower alone, with --vision")
    parser.add_argument("--out", type=Path, help="default: models/NAME")
    parser.add_argument("--checkpoint", type=Path, help="default: scratch/NAME_checkpoint.pt")
    parser.add_argument("--bfloat16", action="store_true", help="of experts' training: products in bfloat16")
    parser.add_argument("--rounded-from", type=float, default=0.7, help="share of the run before experts are rounded")
    parser.add_argument("--num", type=int, default=200, help="questions of a task at the end")
    training.arguments(parser, steps=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    name, steps, runs = "demo", 3300, run
    if args.experts:
        name, steps, runs = "demo_moe", 1600, experts_training.run
    elif args.vision:
        name, steps, runs = "demo_vision", 1000, vision_training.run
    elif args.hybrid:
        name, steps = "demo_hybrid", 2600
    args.out = args.out or Path(f"models/{name}")
    args.checkpoint = args.checkpoint or Path(f"scratch/{name}_checkpoint.pt")
    args.steps = args.steps or steps
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    runs(args)


if __name__ == "__main__":
    main()
