"""Train the bundled demo model: a small Qwen3 for sums, differences, words, counting, capitals, small talk.

    python -m tools.train_demo_model            # the committed model: seeded, under an hour on two cores
    python -m tools.train_demo_model --experts  # models/demo_moe, a small gpt-oss (`demo_model/experts_training.py`)

Writes `models/demo`: config, weights in bf16, tokenizer, chat template. What makes it learn in little time:

- rows are whole conversations: no padding, and later turns are learnt with a history before them;
- short rows for most steps, long ones (up to the model's 2,048 positions) for some;
- the loss is on the answers only, and the head runs only where there is a loss;
- Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for matrices, AdamW for the rest;
- the same matrix of all layers lies in one stacked parameter: Muon's iteration is one batched product.

The model here is a lean restatement of Qwen3; at the end, transformers' own Qwen3ForCausalLM must load what
was saved and agree with it. Needs the `reference` extra (torch, transformers).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.demo_model import tasks
from tools.demo_model import tokenizer as demo_tokenizer
from tools.demo_model.muon import Muon, learning_rate_factor

# Tokens a row: share of the steps. Every step sees as many tokens, in fewer rows where rows are long.
ROW_LENGTHS = {64: 0.45, 128: 0.30, 512: 0.15, 1024: 0.07, 2048: 0.03}


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's dimensions, named as in Qwen3's config."""

    vocab_size: int = 640
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class DemoModel(nn.Module):
    """Qwen3 with each kind of weight stacked over layers: `[num_layers, ...]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        layers, hidden, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim

        def matrix(*size: int, gain: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(layers, *size) * gain * size[-1] ** -0.5)

        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, hidden) * 0.02)
        self.query = matrix(query_size, hidden, gain=0.5)
        self.key_value = matrix(2, kv_size, hidden, gain=0.5)
        self.output = matrix(hidden, query_size, gain=0.1)
        self.gate_up = matrix(2, inner, hidden, gain=0.5)
        self.down = matrix(hidden, inner, gain=0.1)
        self.query_norm = nn.Parameter(torch.ones(layers, shape.head_dim))
        self.key_norm = nn.Parameter(torch.ones(layers, shape.head_dim))
        self.attention_norm = nn.Parameter(torch.ones(layers, hidden))
        self.mlp_norm = nn.Parameter(torch.ones(layers, hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)  # [max_positions, head_dim]
        self.register_buffer("sin", angles.sin(), persistent=False)

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon updates."""
        return [self.query, self.key_value, self.output, self.gate_up, self.down]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps) * weight

    def _rope(self, x: Tensor) -> Tensor:
        """`x` is [rows, heads, tokens, head_dim]."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos[: x.shape[2]] + turned * self.sin[: x.shape[2]]

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids [rows, tokens] to final hidden states [rows, tokens, hidden_size]."""
        shape, (rows, tokens) = self.shape, token_ids.shape
        groups = shape.num_attention_heads // shape.num_key_value_heads
        x = F.embedding(token_ids, self.embedding)
        for query, key_value, output, gate_up, down, query_norm, key_norm, attention_norm, mlp_norm in zip(
            *(
                parameter.unbind(0)
                for parameter in (
                    *self.matrices(),
                    self.query_norm,
                    self.key_norm,
                    self.attention_norm,
                    self.mlp_norm,
                )
            ),
            strict=True,
        ):
            normed = self._norm(x, attention_norm)
            q, kv = F.linear(normed, query), F.linear(normed, key_value.flatten(0, 1))
            # [rows, heads, tokens, head_dim]
            q, kv = (heads.view(rows, tokens, -1, shape.head_dim).transpose(1, 2) for heads in (q, kv))
            k, v = kv.chunk(2, dim=1)
            q, k = self._rope(self._norm(q, query_norm)), self._rope(self._norm(k, key_norm))
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(attended.transpose(1, 2).flatten(2), output)
            gate, up = F.linear(self._norm(x, mlp_norm), gate_up.flatten(0, 1)).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return self._norm(x, self.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding)

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights in bf16 under Hugging Face's names."""
        state = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        for layer in range(self.shape.num_hidden_layers):
            state |= {
                f"model.layers.{layer}.{name}.weight": weight[layer]
                for name, weight in {
                    "self_attn.q_proj": self.query,
                    "self_attn.k_proj": self.key_value[:, 0],
                    "self_attn.v_proj": self.key_value[:, 1],
                    "self_attn.o_proj": self.output,
                    "self_attn.q_norm": self.query_norm,
                    "self_attn.k_norm": self.key_norm,
                    "mlp.gate_proj": self.gate_up[:, 0],
                    "mlp.up_proj": self.gate_up[:, 1],
                    "mlp.down_proj": self.down,
                    "input_layernorm": self.attention_norm,
                    "post_attention_layernorm": self.mlp_norm,
                }.items()
            }
        return {name: weight.detach().to(torch.bfloat16).contiguous().clone() for name, weight in state.items()}

    def round_to_bf16(self) -> None:
        """Make the weights those that are saved."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)


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
    """What greedy decoding gives, as far as it is right: each token is guessed after right ones."""
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
    """Exact match on `num` held-out questions a task, each asked alone."""
    turns = [turn for task in tasks.TASKS for turn in tasks.held_out_questions(task, num, seed)]
    return tasks.score(turns, predicted_answers(model, tokenizer, turns))


def train(model: DemoModel, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Run `args.steps` steps, logging and checkpointing; continues from `args.checkpoint` where one is."""
    matrices = model.matrices()
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
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
    base_rates = [args.muon_lr, args.adam_lr]
    assistant_id, end_id = (_id_of(tokenizer, name) for name in (demo_tokenizer.ASSISTANT, demo_tokenizer.END))
    compiled = torch.compile(model, dynamic=False)  # once for each row length
    start, losses = time.monotonic(), []
    for step in range(first_step, args.steps):
        rng = random.Random(f"{args.seed}/{step}")
        tokens = rng.choices(list(ROW_LENGTHS), weights=list(ROW_LENGTHS.values()))[0]
        ids = make_batch(tokenizer, rng, args.batch_tokens // tokens, tokens)
        inputs, mask = ids[:, :-1], answer_mask(ids[:, :-1], assistant_id, end_id)
        loss = F.cross_entropy(model.logits(compiled(inputs)[mask]), ids[:, 1:][mask])
        loss.backward()
        factor = learning_rate_factor((step + 1) / (args.steps + 1), args.warmup, args.decay)
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
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
            scores = evaluate(model, tokenizer, 50, seed=1)
            print("  " + "  ".join(f"{score.task} {score.percent:.0f}" for score in scores), flush=True)
            saved = [optimizer.state_dict() for optimizer in optimizers]
            partial = args.checkpoint.with_suffix(".partial")
            torch.save({"model": model.state_dict(), "optimizers": saved, "step": step + 1}, partial)
            partial.replace(args.checkpoint)


def save(model: DemoModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write everything that AutoModelForCausalLM and AutoTokenizer need."""
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
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(demo_tokenizer.CHAT_TEMPLATE)
    tokenizer.save(str(out / "tokenizer.json"))
    save_file(model.checkpoint(), out / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def check_against_transformers(model: DemoModel, tokenizer: Tokenizer, out: Path) -> float:
    """The largest difference of the saved model's logits from ours, over the largest; 1e-4 is refused."""
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
    parser.add_argument("--out", type=Path, help="default: models/demo or models/demo_moe")
    parser.add_argument("--checkpoint", type=Path, help="default: scratch/demo_checkpoint.pt or demo_moe_checkpoint.pt")
    parser.add_argument("--steps", type=int, help="default: 3300, with experts 1600")
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
    name = "demo_moe" if args.experts else "demo"
    args.out = args.out or Path(f"models/{name}")
    args.checkpoint = args.checkpoint or Path(f"scratch/{name}_checkpoint.pt")
    args.steps = args.steps or (1600 if args.experts else 3300)
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if args.experts:
        from tools.demo_model import experts_training

        experts_training.run(args)
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
