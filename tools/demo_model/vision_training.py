"""`train_demo_model --vision`: trains the demo model with a tower, and writes it as a Qwen3-VL checkpoint.

All pictures of a step have one grid. The tower is trained first, alone: each token of a picture must classify the
object there (`Mark`), on sheets full of shapes or digits, on charts and on drawings, which is quick. Then the language
model is trained on conversations about drawings, with only the tower's mergers.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from runtime.images.patches import PatchRule, make_patches, normalised
from tools.demo_model import picture_tasks, training
from tools.demo_model.data import SYSTEM_MESSAGES
from tools.demo_model.drawing import NUM_MARKS, Drawing, draw_sheet, sample_facts
from tools.demo_model.picture_tasks import Seen, held_out, near, sample_drawing, sample_size
from tools.demo_model.tokenizer import ASSISTANT, END, PAD, SYSTEM, USER, trained_tokenizer
from tools.demo_model.training import IGNORED

START, IMAGE, STOP = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, SYSTEM, PAD, START, IMAGE, STOP)
MIN_PIXELS, MAX_PIXELS = 64 * 64, 80 * 80
MOST_TOKENS = 120
_NOTHING_HERE = 0.4  # weight of empty places
PATCH, MERGE, FRAMES = 8, 2, 2
RULE = PatchRule(
    patch_size=PATCH, merge_size=MERGE, num_frames=1, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS,
    mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
)  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": [6, 5, 5],
    },
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "depth": 3, "num_heads": 4, "patch_size": PATCH,
    "temporal_patch_size": FRAMES, "spatial_merge_size": MERGE, "num_position_embeddings": 100,
    "deepstack_visual_indexes": [1], "out_hidden_size": 128,
}  # fmt: skip


class Model(nn.Module):
    """Qwen3-VL; `marks` classifies the object at each of the tower's embeddings, for training only."""

    def __init__(self, special: dict[str, int]) -> None:
        super().__init__()
        config = Qwen3VLConfig(
            text_config={**TEXT, "eos_token_id": special[END], "pad_token_id": special[PAD]}, vision_config=TOWER,
            image_token_id=special[IMAGE], video_token_id=special[PAD], vision_start_token_id=special[START],
            vision_end_token_id=special[STOP], tie_word_embeddings=True,
        )  # fmt: skip
        self.whole: Any = Qwen3VLForConditionalGeneration(config)
        self.marks = nn.Linear(TEXT["hidden_size"], NUM_MARKS)
        training.begin(self)

    @property
    def tower(self) -> Any:
        return self.whole.model.visual

    def forward(self, batch: Batch) -> Tensor:
        """Final hidden states [rows, tokens, hidden_size]."""
        found = self.whole.model(
            input_ids=batch.token_ids, pixel_values=batch.pixels, image_grid_thw=batch.grids, use_cache=False,
            mm_token_type_ids=(batch.token_ids == self.whole.config.image_token_id).int(),
        )  # fmt: skip
        return found.last_hidden_state

    def told(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """Logits of the marks [tokens of all pictures, NUM_MARKS]."""
        return self.marks(self.tower(pixels, grids).pooler_output)


@dataclass(frozen=True, slots=True)
class Batch:
    """The model's input, and `targets` [rows, tokens], of the next token."""

    token_ids: Tensor
    targets: Tensor
    pixels: Tensor
    grids: Tensor


class Writer:
    """Writes conversations as tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.get_vocab()
        self.tokenizer, self.special = tokenizer, {name: vocab[name] for name in SPECIAL_TOKENS}

    def row(self, system: str | None, seen: list[Seen], num_cells: int) -> tuple[list[int], list[bool]]:
        """Tokens, and which are the model's. A turn that does not fit `MOST_TOKENS` is left out, with all after it."""
        special = self.special
        ids = [] if system is None else [special[SYSTEM], *self.tokenizer.encode(system).ids]
        said = [False] * len(ids)
        for each in seen:
            for index, turn in enumerate(each.turns):
                question, answer = (self.tokenizer.encode(text).ids for text in (turn.question, turn.answer))
                if index and len(ids) + len(question) + len(answer) + 3 > MOST_TOKENS:
                    break
                asked = [special[USER]]
                if each.drawing is not None and index == 0:
                    asked += [special[START], *[special[IMAGE]] * num_cells, special[STOP]]
                asked += [*question, special[ASSISTANT]]
                ids += [*asked, *answer, special[END]]
                said += [False] * len(asked) + [True] * (len(answer) + 1)
        return ids, said


def make_batch(writer: Writer, rows: list[tuple[str | None, list[Seen]]], size: tuple[int, int]) -> Batch:
    """Pictures are resized to `size`, width and height."""
    cells = size[0] * size[1] // (PATCH * MERGE) ** 2
    written = [writer.row(system, seen, cells) for system, seen in rows]
    width = max(len(ids) for ids, _ in written)
    token_ids = np.full((len(rows), width), writer.special[PAD])
    targets = np.full((len(rows), width), IGNORED)
    for index, (ids, said) in enumerate(written):
        token_ids[index, : len(ids)] = ids
        targets[index, : len(ids) - 1] = np.where(said[1:], ids[1:], IGNORED)
    drawings = [each.drawing for _, seen in rows for each in seen if each.drawing is not None]
    return Batch(torch.from_numpy(token_ids), torch.from_numpy(targets), *pixels_of(drawings, size))


def pixels_of(drawings: list[Drawing], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Normalised patches of the pictures [patches, channels * frames * pixels], both frames of each equal, and their
    grids."""
    patches = torch.from_numpy(np.concatenate([patches_of(drawing.image, size) for drawing in drawings]))
    frames = patches.unflatten(-1, (3, 1, -1)).expand(-1, -1, FRAMES, -1).flatten(1)
    return frames, torch.tensor([[1, size[1] // PATCH, size[0] // PATCH]] * len(drawings))


def patches_of(image: Image.Image, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Normalised patches of the picture, resized."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return normalised(make_patches(np.array(image), RULE).pixels, RULE)


def marks_of(drawing: Drawing, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """The kind of object in each token's part of the picture."""
    found = np.zeros((size[1] // (PATCH * MERGE), size[0] // (PATCH * MERGE)), np.int64)
    for mark in drawing.marks:
        y, x = (min(int(at * side), side - 1) for at, side in zip((mark.y, mark.x), found.shape))
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


def sample_sheets(rng: random.Random, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels of sheets, of charts and of drawings, their grids, and the marks of their tokens."""
    size, drawings = sample_size(rng), []
    for _ in range(num):
        kind = rng.choices(("sheet", "bars", None), (0.5, 0.25, 0.25))[0]
        drawn = draw_sheet(rng, *size) if kind == "sheet" else sample_drawing(rng, "train", *near(rng, size), kind=kind)
        drawings.append(drawn)
    marks = np.concatenate([marks_of(drawing, size) for drawing in drawings])
    return *pixels_of(drawings, size), torch.from_numpy(marks)


@torch.no_grad()
def evaluate(model: Model, writer: Writer, num: int, seed: int) -> dict[str, float]:
    """Percent of held-out questions with every token predicted, each given the right ones before."""
    found = {}
    for task, asked in held_out(num, seed).items():
        right = 0
        for size in {size for _, size in asked}:
            batch = make_batch(writer, [(None, [seen]) for seen, its in asked if its == size], size)
            guessed = model.whole.lm_head(model(batch)).argmax(-1)
            right += int(((guessed == batch.targets) | (batch.targets == IGNORED)).all(-1).sum())
        found[task] = 100 * right / num
    return found


@torch.no_grad()
def marks_seen(model: Model, num: int) -> float:
    """Percent of the marks that the tower classifies, on other pictures than those of training."""
    pixels, grids, wanted = sample_sheets(random.Random("marks"), 4 * num)
    return 100 * (model.told(pixels, grids).argmax(-1) == wanted)[wanted > 0].float().mean().item()


def train_tower(model: Model, args: argparse.Namespace) -> None:
    weights = torch.ones(NUM_MARKS)
    weights[0] = _NOTHING_HERE

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        pixels, grids, wanted = sample_sheets(random.Random(f"{args.seed}/tower/{step}"), args.pictures)
        loss = F.cross_entropy(model.told(pixels, grids), wanted, weights)
        return loss, loss

    args = argparse.Namespace(**vars(args) | {"steps": args.tower_steps})
    args.checkpoint = args.checkpoint.with_suffix(".tower.pt")
    training.train(model, loss_of, lambda: {"marks": marks_seen(model, args.pictures)}, args)


def train_text(model: Model, writer: Writer, args: argparse.Namespace) -> None:
    """Trains the language model, with the tower's mergers."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("merger" in name or not (".visual." in name or name.startswith("marks")))

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        batch = sample_batch(random.Random(f"{args.seed}/{step}"), writer, args.pictures)
        said = batch.targets != IGNORED
        loss = F.cross_entropy(model.whole.lm_head(model(batch)[said]), batch.targets[said])
        return loss, loss

    training.train(model, loss_of, lambda: evaluate(model, writer, 60, seed=1), args)


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


def run(args: argparse.Namespace) -> None:
    """Trains and saves; continues from a checkpoint of the tower or of the language model, if there is one."""
    kept = args.checkpoint.with_suffix(".tokenizer.json")
    tokenizer = trained_tokenizer(kept, lambda: texts(args.seed, 4000), TEXT["vocab_size"], SPECIAL_TOKENS)
    writer = Writer(tokenizer)
    model = Model(writer.special)
    train_tower(model, args)
    train_text(model, writer, args)
    training.round_to_bfloat16(model)
    training.save(model.whole, tokenizer, "demo_vision", args.out, ends=(END,), pad=PAD)
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "image_mean": list(RULE.mean),
        "image_std": list(RULE.std),
    }
    (args.out / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2) + "\n", encoding="utf-8")
    print(f"saved to {args.out}\n{evaluate(model, writer, 2 * args.num, seed=0)}", flush=True)
