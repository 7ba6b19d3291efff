"""`train_demo_model --vision`: trains the demo model with a tower, and writes it as a Qwen3-VL checkpoint.

All pictures of a step have one grid, so that the tower is a plain batch. The tower is trained first, alone: each token
of a picture must classify the object there (`Mark`), on sheets full of shapes or digits, on charts and on drawings,
which is quick. Then the language model is trained on conversations about drawings, with only the tower's mergers.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from runtime.images.patches import PatchRule, make_patches, normalised
from tools.demo_model import harmony_tokenizer, picture_tasks, training
from tools.demo_model.data import SYSTEM_MESSAGES
from tools.demo_model.drawing import NUM_MARKS, Drawing, draw_sheet, sample_facts
from tools.demo_model.picture_tasks import Seen, held_out, near, sample_drawing, sample_size
from tools.demo_model.tokenizer import ASSISTANT, END, PAD, SYSTEM, USER
from tools.demo_model.vision_model import VisionModel, VisionShape

START, IMAGE, STOP = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, SYSTEM, PAD, START, IMAGE, STOP)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('the demo model knows system, user and assistant messages, not ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}
{{- part['text'] | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

MIN_PIXELS, MAX_PIXELS = 64 * 64, 80 * 80
MOST_TOKENS = 120
_NOTHING_HERE = 0.4  # weight of empty places
_IGNORED = -100


def rule_of(shape: VisionShape) -> PatchRule:
    half = (0.5, 0.5, 0.5)
    return PatchRule(
        patch_size=shape.patch_size, merge_size=shape.spatial_merge_size, num_frames=1, min_pixels=MIN_PIXELS,
        max_pixels=MAX_PIXELS, mean=half, std=half,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation's tokens, masks of the model's and of pictures' tokens, and positions."""

    ids: list[int]
    said: list[bool]
    is_picture: list[bool]
    positions: list[tuple[int, int, int]]


class Writer:
    """Writes conversations as tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.get_vocab()
        self.tokenizer, self.special = tokenizer, {name: vocab[name] for name in SPECIAL_TOKENS}

    def row(self, system: str | None, seen: list[Seen], grid: tuple[int, int]) -> Row:
        """`grid`: of tokens. A turn that does not fit `MOST_TOKENS` is left out, with all after it."""
        row, place = Row([], [], [], []), 0

        def say(*words: int | str, said: bool = False) -> None:
            nonlocal place
            for word in words:
                ids = [word] if isinstance(word, int) else self.tokenizer.encode(word).ids
                row.ids.extend(ids)
                row.said.extend([said] * len(ids))
                row.is_picture.extend([False] * len(ids))
                row.positions.extend((at, at, at) for at in range(place, place + len(ids)))
                place += len(ids)

        special = self.special
        if system is not None:
            say(special[SYSTEM], system)
        for each in seen:
            for index, turn in enumerate(each.turns):
                question, answer = (self.tokenizer.encode(text).ids for text in (turn.question, turn.answer))
                if index and len(row.ids) + len(question) + len(answer) + 3 > MOST_TOKENS:
                    break
                say(special[USER])
                if each.drawing is not None and index == 0:
                    say(special[START])
                    cells = [(place, place + y, place + x) for y in range(grid[0]) for x in range(grid[1])]
                    row.ids.extend([special[IMAGE]] * len(cells))
                    row.said.extend([False] * len(cells))
                    row.is_picture.extend([True] * len(cells))
                    row.positions.extend(cells)
                    place += max(grid)
                    say(special[STOP])
                say(*question, special[ASSISTANT])
                say(*answer, special[END], said=True)
        return row


@dataclass(frozen=True, slots=True)
class Batch:
    """The model's input and targets: `targets` [rows, tokens], of the next token, and `marks`
    [pictures, picture tokens]."""

    token_ids: Tensor
    is_picture: Tensor
    positions: Tensor
    patches: Tensor
    grid: tuple[int, int]
    targets: Tensor
    marks: Tensor


def make_batch(writer: Writer, rows: list[tuple[str | None, list[Seen]]], size: tuple[int, int]) -> Batch:
    """Pictures are resized to `size`, width and height."""
    rule = rule_of(VisionShape())
    grid = size[1] // rule.patch_size, size[0] // rule.patch_size
    cells = grid[0] // rule.merge_size, grid[1] // rule.merge_size
    written = [writer.row(system, seen, cells) for system, seen in rows]
    width = max(len(row.ids) for row in written)
    ids = np.full((len(rows), width), writer.special[PAD])
    targets = np.full((len(rows), width), _IGNORED)
    is_picture, positions = np.zeros((len(rows), width), bool), np.zeros((3, len(rows), width), np.float32)
    for index, row in enumerate(written):
        count = len(row.ids)
        ids[index, :count], is_picture[index, :count] = row.ids, row.is_picture
        positions[:, index, :count] = np.array(row.positions).T
        targets[index, : count - 1] = np.where(row.said[1:], row.ids[1:], _IGNORED)
    drawings = [each.drawing for _, seen in rows for each in seen if each.drawing is not None]
    patches = np.stack([patches_of(drawing.image, rule, size) for drawing in drawings])
    marks = np.stack([marks_of(drawing, cells) for drawing in drawings])
    return Batch(
        torch.from_numpy(ids), torch.from_numpy(is_picture), torch.from_numpy(positions), torch.from_numpy(patches),
        grid, torch.from_numpy(targets), torch.from_numpy(marks),
    )  # fmt: skip


def patches_of(image: Image.Image, rule: PatchRule, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Normalised patches of the picture, resized."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return normalised(make_patches(np.array(image), rule).pixels, rule)


def marks_of(drawing: Drawing, cells: tuple[int, int]) -> np.ndarray[Any, Any]:
    """The kind of object in each token's part of the picture."""
    found = np.zeros(cells, np.int64)
    for mark in drawing.marks:
        y, x = min(int(mark.y * cells[0]), cells[0] - 1), min(int(mark.x * cells[1]), cells[1] - 1)
        found[y, x] = mark.kind
    return found.ravel()


def sample_batch(rng: random.Random, writer: Writer, num_pictures: int) -> Batch:
    """The batch of one training step."""
    size = sample_size(rng)
    each = 2 if rng.random() < 0.15 else 1
    rows = []
    for _ in range(num_pictures // each):
        system = rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.1 else None
        seen = [picture_tasks.sample_seen(rng, "train", *near(rng, size)) for _ in range(each)]
        if each > 1:
            seen = [Seen(one.drawing, one.turns[:2]) for one in seen]
        if rng.random() < 0.25:
            seen.insert(0, picture_tasks.sample_unseen(rng))
        rows.append((system, seen))
    return make_batch(writer, rows, size)


@torch.no_grad()
def evaluate(model: VisionModel, writer: Writer, num: int, seed: int) -> dict[str, float]:
    """Percent of held-out questions with every token predicted, each given the right ones before."""
    found = {}
    for task, asked in held_out(num, seed).items():
        right = 0
        for size in {size for _, size in asked}:
            batch = make_batch(writer, [(None, [seen]) for seen, its in asked if its == size], size)
            hidden = model(batch.token_ids, batch.is_picture, batch.positions, batch.patches, batch.grid)
            said = batch.targets != _IGNORED
            guessed = model.text.logits(hidden).argmax(-1)
            right += int(((guessed == batch.targets) | ~said).all(-1).sum())
        found[task] = 100 * right / num
    return found


def train(model: VisionModel, writer: Writer, args: argparse.Namespace) -> None:
    """`args.tower_steps` steps of the tower, then `args.steps` of the language model; continues from a checkpoint of
    either, if there is one."""
    train_tower(model, argparse.Namespace(**{**vars(args), "steps": args.tower_steps}))
    for parameter in (*model.tower.parameters(), *model.marks.parameters()):
        parameter.requires_grad_(False)
    for parameter in (*model.tower.merger.parameters(), *model.tower.deepstack.parameters()):
        parameter.requires_grad_(True)

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        batch = sample_batch(random.Random(f"{args.seed}/{step}"), writer, args.pictures)
        hidden = model(batch.token_ids, batch.is_picture, batch.positions, batch.patches, batch.grid)
        said = batch.targets != _IGNORED
        loss = F.cross_entropy(model.text.logits(hidden[said]), batch.targets[said])
        return loss, loss

    training.train(model, model.text.matrices(), loss_of, lambda: evaluate(model, writer, 60, seed=1), args)


def train_tower(model: VisionModel, args: argparse.Namespace) -> None:
    args.checkpoint = args.checkpoint.with_suffix(".tower.pt")
    weights = torch.ones(NUM_MARKS)
    weights[0] = _NOTHING_HERE

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        patches, grid, wanted = sample_sheets(random.Random(f"{args.seed}/tower/{step}"), args.pictures)
        told = model.marks(model.tower(patches, grid)[0])
        loss = F.cross_entropy(told.flatten(0, 1), wanted.flatten(), weights)
        return loss, loss

    training.train(model, model.tower.matrices(), loss_of, lambda: {"marks": marks_seen(model, args.pictures)}, args)


def sample_sheets(rng: random.Random, num: int) -> tuple[Tensor, tuple[int, int], Tensor]:
    """Patches of sheets, and of charts, their grid, and the marks of their tokens."""
    rule, size = rule_of(VisionShape()), sample_size(rng)
    grid = size[1] // rule.patch_size, size[0] // rule.patch_size
    cells = grid[0] // rule.merge_size, grid[1] // rule.merge_size
    drawings = []
    for _ in range(num):
        kind = rng.choices(("sheet", "bars", None), (0.5, 0.25, 0.25))[0]
        drawn = draw_sheet(rng, *size) if kind == "sheet" else sample_drawing(rng, "train", *near(rng, size), kind=kind)
        drawings.append(drawn)
    patches = np.stack([patches_of(drawing.image, rule, size) for drawing in drawings])
    marks = np.stack([marks_of(drawing, cells) for drawing in drawings])
    return torch.from_numpy(patches), grid, torch.from_numpy(marks)


@torch.no_grad()
def marks_seen(model: VisionModel, num: int) -> float:
    """Percent of the marks that the tower classifies, on held-out pictures."""
    patches, grid, wanted = sample_sheets(random.Random("marks"), 4 * num)
    is_mark = wanted > 0
    told = model.marks(model.tower(patches, grid)[0]).argmax(-1)
    return 100 * (told == wanted)[is_mark].float().mean().item()


def texts(seed: int, num: int) -> list[str]:
    """Questions and answers, for training the tokenizer."""
    rng = random.Random(f"texts/{seed}")
    found = list(SYSTEM_MESSAGES)
    for index in range(num):
        if index % 4 == 0:
            turns: Any = picture_tasks.sample_unseen(rng).turns
        else:
            turns = picture_tasks.turns_of(rng, sample_facts(rng))
        found += [text for turn in turns for text in (turn.question, turn.answer)]
    return found


def make_tokenizer(shape: VisionShape, seed: int, kept: Path) -> Tokenizer:
    """The tokenizer beside a checkpoint, or a new one, which is saved there."""
    if kept.exists():
        return Tokenizer.from_file(str(kept))
    tokenizer = harmony_tokenizer.build_tokenizer(texts(seed, 4000), shape.text.vocab_size, SPECIAL_TOKENS)
    tokenizer.save(str(kept))
    return tokenizer


def save(model: VisionModel, tokenizer: Tokenizer, out: Path) -> None:
    """Writes a model's folder."""
    out.mkdir(parents=True, exist_ok=True)
    shape, ids = model.shape, tokenizer.get_vocab()
    text = shape.text
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    tower = (
        "hidden_size", "intermediate_size", "depth", "num_heads", "patch_size", "temporal_patch_size",
        "spatial_merge_size", "num_position_embeddings",
    )  # fmt: skip
    config: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            "model_type": "qwen3_vl_text",
            **{name: getattr(text, name) for name in names},
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": text.rope_theta, "mrope_interleaved": True,
                "mrope_section": list(shape.mrope_section),
            },
            "eos_token_id": ids[END],
            "pad_token_id": ids[PAD],
            "dtype": "bfloat16",
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            **{name: getattr(shape, name) for name in tower},
            "deepstack_visual_indexes": list(shape.deepstack_visual_indexes),
            "in_channels": 3,
            "out_hidden_size": text.hidden_size,
            "hidden_act": "gelu_pytorch_tanh",
        },
        "image_token_id": ids[IMAGE],
        "video_token_id": ids[PAD],
        "vision_start_token_id": ids[START],
        "vision_end_token_id": ids[STOP],
        "tie_word_embeddings": True,
    }  # fmt: skip
    generation = {"do_sample": False, "eos_token_id": ids[END], "pad_token_id": ids[PAD]}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": text.max_position_embeddings,
        "eos_token": END,
        "pad_token": PAD,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": shape.patch_size,
        "merge_size": shape.spatial_merge_size,
        "temporal_patch_size": shape.temporal_patch_size,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    for name, content in (
        ("config.json", config), ("generation_config.json", generation), ("tokenizer_config.json", tokenizer_config),
        ("preprocessor_config.json", preprocessor),
    ):  # fmt: skip
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    state = model.text.checkpoint("model.language_model") | model.tower.checkpoint("model.visual")
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def check_against_transformers(model: VisionModel, writer: Writer, out: Path) -> float:
    """The largest difference of the saved model's logits from ours, over the largest logit; 1e-3 is refused."""
    from transformers import AutoModelForImageTextToText

    reference: Any = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    error = 0.0
    for seed in range(4):
        rng = random.Random(seed)
        batch = sample_batch(rng, writer, 2)
        ids = batch.token_ids[:1]
        num_tokens = int((ids[0] != writer.special[PAD]).sum())
        ids, pictures = ids[:, :num_tokens], int(batch.is_picture[0].sum()) // batch.marks.shape[1]
        patches = batch.patches[:pictures].unflatten(-1, (3, 1, -1)).expand(-1, -1, -1, 2, -1).flatten(0, 1).flatten(1)
        is_picture, positions = batch.is_picture[:1, :num_tokens], batch.positions[:, :1, :num_tokens]
        ours = model.text.logits(model(ids, is_picture, positions, batch.patches[:pictures], batch.grid))
        theirs = reference(
            input_ids=ids, pixel_values=patches, image_grid_thw=torch.tensor([[1, *batch.grid]] * pictures),
            mm_token_type_ids=(ids == writer.special[IMAGE]).int(),
        ).logits  # fmt: skip
        error = max(error, ((ours - theirs).abs().max() / theirs.abs().max()).item())
    if not error <= 1e-3:
        raise RuntimeError(f"logits differ from transformers' by {error:.2e} of the largest")
    return error


def run(args: argparse.Namespace) -> None:
    """Trains and saves."""
    shape = VisionShape()
    tokenizer = make_tokenizer(shape, args.seed, args.checkpoint.with_suffix(".tokenizer.json"))
    writer, model = Writer(tokenizer), VisionModel(shape)
    kept = [*model.text.parameters(), *model.tower.parameters()]
    print(f"{sum(parameter.numel() for parameter in kept):,} parameters", flush=True)
    train(model, writer, args)
    for parameter in kept:
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    save(model, tokenizer, args.out)
    error = check_against_transformers(model, writer, args.out)
    print(f"saved to {args.out}; logits within {error:.1e} of transformers'", flush=True)
    print(evaluate(model, writer, 400, seed=0), flush=True)
