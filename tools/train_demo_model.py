"""Train the bundled demo model: a small Qwen3 for sums, differences, words, counting, capitals, small talk.

    python -m tools.train_demo_model            # the committed model: seeded, under an hour on two cores
    python -m tools.train_demo_model --experts  # models/demo_moe, a small gpt-oss (`demo_model/experts_training.py`)
    python -m tools.train_demo_model --vision   # models/demo_vision, a small Qwen3-VL (`demo_model/vision_training.py`)

Writes `models/demo`: config, weights in bf16, tokenizer, chat template. It learns fast by:

- rows are whole conversations: no padding, and later turns are learnt with a history before them;
- short rows for most steps, long ones (up to the model's 2,048 positions) for some;
- the loss is on the answers only, and the head runs only where there is a loss;
- Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for matrices, AdamW for the rest;
- the same matrix of all layers lies in one stacked parameter: Muon's iteration is one batched product.

The model here is a small reimplementation of Qwen3; at the end, transformers' own Qwen3ForCausalLM must load the saved
model and agree with it. Needs the `reference` extra (torch, transformers).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model import tasks, training
from tools.demo_model import tokenizer as demo_tokenizer
from tools.demo_model.model import DemoModel, Shape

# Tokens a row: share of the steps. Every step has as many tokens, in fewer rows if they are long.
ROW_LENGTHS = {64: 0.45, 128: 0.30, 512: 0.15, 1024: 0.07, 2048: 0.03}


def answer_mask(token_ids: Tensor, assistant_id: int, end_id: int) -> Tensor:
    """True where the next token belongs to an answer, its end token included. [rows, tokens]"""
    return (token_ids == assistant_id).cumsum(-1) - (token_ids == end_id).cumsum(-1) == 1


def make_batch(tokenizer: Tokenizer, rng: random.Random, rows: int, tokens: int) -> Tensor:
    """`rows` conversations, each cut at `tokens` + 1 ids. [rows, tokens + 1]"""
    pad_id = tokenizer.token_to_id(demo_tokenizer.PAD)
    texts = []
    for _ in range(rows):
        system, turns = tasks.sample_conversation(rng, tokens // 13 + 1)
        texts.append(demo_tokenizer.render(tasks.to_messages(system, turns)))
    batch = np.full((rows, tokens + 1), pad_id, dtype=np.int64)
    for row, encoding in zip(batch, tokenizer.encode_batch_fast(texts), strict=True):
        ids = encoding.ids[: tokens + 1]
        row[: len(ids)] = ids
    return torch.from_numpy(batch)


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    number: int | None = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return number


@torch.no_grad()
def predicted_answers(model: DemoModel, tokenizer: Tokenizer, turns: list[tasks.Turn]) -> list[str]:
    """Greedy predictions, each given the right tokens before it."""
    special = {name: _id_of(tokenizer, name) for name in demo_tokenizer.SPECIAL_TOKENS}
    texts = [demo_tokenizer.render(tasks.to_messages(None, [turn])) for turn in turns]
    answers = []
    for start in range(0, len(texts), 100):
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts[start : start + 100])]
        width = max(map(len, encoded))
        ids = torch.tensor([row + [special[demo_tokenizer.PAD]] * (width - len(row)) for row in encoded])
        mask = answer_mask(ids, special[demo_tokenizer.ASSISTANT], special[demo_tokenizer.END])
        guesses = model.logits(model(ids)).argmax(-1)
        answers += [tokenizer.decode(guess[where].tolist()) for guess, where in zip(guesses, mask, strict=True)]
    return answers


def evaluate(model: DemoModel, tokenizer: Tokenizer, num: int, seed: int) -> list[tasks.Score]:
    """Exact match on `num` held-out questions a task, each on its own."""
    turns = [turn for task in tasks.TASKS for turn in tasks.held_out_questions(task, num, seed)]
    return tasks.score(turns, predicted_answers(model, tokenizer, turns))


def train(model: DemoModel, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Run `args.steps` steps on the answers of sampled conversations."""
    assistant_id, end_id = (_id_of(tokenizer, name) for name in (demo_tokenizer.ASSISTANT, demo_tokenizer.END))
    compiled = torch.compile(model, dynamic=False)  # once for each row length

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        rng = random.Random(f"{args.seed}/{step}")
        tokens = rng.choices(list(ROW_LENGTHS), weights=list(ROW_LENGTHS.values()))[0]
        ids = make_batch(tokenizer, rng, args.batch_tokens // tokens, tokens)
        inputs, mask = ids[:, :-1], answer_mask(ids[:, :-1], assistant_id, end_id)
        loss = F.cross_entropy(model.logits(compiled(inputs)[mask]), ids[:, 1:][mask])
        return loss, loss

    def percents() -> dict[str, float]:
        return {score.task: score.percent for score in evaluate(model, tokenizer, 50, seed=1)}

    training.train(model, model.matrices(), loss_of, percents, args)


def save(model: DemoModel, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the files of AutoModelForCausalLM and AutoTokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    token_ids = {name: tokenizer.token_to_id(name) for name in (demo_tokenizer.END, demo_tokenizer.PAD)}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{name: getattr(shape, name) for name in shape.__slots__},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": token_ids[demo_tokenizer.END],
        "pad_token_id": token_ids[demo_tokenizer.PAD],
    }
    generation = {
        "do_sample": False,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "eos_token": demo_tokenizer.END,
        "pad_token": demo_tokenizer.PAD,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(demo_tokenizer.CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    save_file(model.checkpoint(), out / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def check_against_transformers(model: DemoModel, tokenizer: Tokenizer, out: Path) -> float:
    """The largest difference of the saved model's logits from ours, over the largest logit; 1e-4 is refused."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    reference_tokenizer = AutoTokenizer.from_pretrained(out)
    system, turns = tasks.sample_conversation(random.Random(0), 30)
    messages = tasks.to_messages(system or "You are a helpful assistant.", turns)
    rendered = reference_tokenizer.apply_chat_template(messages, tokenize=False)
    if rendered != demo_tokenizer.render(messages):
        raise RuntimeError(f"the chat template gives {rendered!r}")
    ids = tokenizer.encode(rendered).ids
    if reference_tokenizer.encode(rendered) != ids or reference_tokenizer.decode(ids) != rendered:
        raise RuntimeError("AutoTokenizer's ids or text differ from the tokenizer's")
    ours, theirs = model.logits(model(torch.tensor([ids]))), reference(torch.tensor([ids])).logits
    error: float = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not error <= 1e-4:
        raise RuntimeError(f"logits differ from transformers' by {error:.2e} of the largest")
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", action="store_true", help="the model with experts, models/demo_moe")
    parser.add_argument("--vision", action="store_true", help="the model with a tower, models/demo_vision")
    parser.add_argument("--pictures", type=int, default=32, help="of a step, with --vision")
    parser.add_argument("--tower-steps", type=int, default=1000, help="of the tower alone, with --vision")
    parser.add_argument("--out", type=Path, help="default: models/demo, demo_moe or demo_vision")
    parser.add_argument("--checkpoint", type=Path, help="default: scratch/NAME_checkpoint.pt")
    parser.add_argument("--steps", type=int, help="default: 3300, with experts 1600, with a tower 1000")
    parser.add_argument("--bfloat16", action="store_true", help="of experts' training: products in bfloat16")
    parser.add_argument("--rounded-from", type=float, default=0.7, help="share of the run before experts are rounded")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--warmup", type=float, default=0.02, help="part of the run in which the rate rises")
    parser.add_argument("--decay", type=float, default=0.5, help="part of the run in which the rate falls")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=250)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    name = "demo_moe" if args.experts else "demo_vision" if args.vision else "demo"
    args.out = args.out or Path(f"models/{name}")
    args.checkpoint = args.checkpoint or Path(f"scratch/{name}_checkpoint.pt")
    args.steps = args.steps or {"demo": 3300, "demo_moe": 1600, "demo_vision": 1000}[name]
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if args.experts:
        from tools.demo_model import experts_training

        experts_training.run(args)
        return
    if args.vision:
        from tools.demo_model import vision_training

        vision_training.run(args)
        return
    shape = Shape()
    tokenizer = demo_tokenizer.build_tokenizer(shape.vocab_size)
    model = DemoModel(shape)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, args)
    model.round_to_bf16()
    save(model, tokenizer, args.out)
    error = check_against_transformers(model, tokenizer, args.out)
    print(f"saved to {args.out}; logits within {error:.1e} of transformers'", flush=True)
    print(tasks.format_scores(evaluate(model, tokenizer, 200, seed=0)), flush=True)


if __name__ == "__main__":
    main()
