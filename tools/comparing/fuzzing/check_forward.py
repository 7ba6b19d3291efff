"""The check of `fuzz_models.py --forward`: a model's forward pass alone, in float32, on each device of a case's runs.

Prompts' logits are within 1e-4 of transformers'. The same batches hold each prompt three times: whole; without its last
tokens, which follow one at a time; in chunks of random lengths. Pages lie anywhere; those outside a window are freed.
A picture whose tokens see each other is not cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from models.base import Model
from models.families.pictures.gemma4_pictures import Gemma4PictureModel
from models.picture_decoder import AxesDecoder
from models.registry import load_model
from runtime import ops
from runtime.batch import Batch, EncodedTokens
from runtime.tensor.tensor import Tensor
from tests.models.driver import ModelDriver
from tests.models.vision.gemma4_pixels import drawn_pictures, our_patches
from tools.comparing.fuzzing.cases import Case
from tools.comparing.fuzzing.check import TOLERANCES, Findings
from tools.comparing.fuzzing.draw import Fields
from tools.comparing.fuzzing.errors import Array, relative_error

WAYS = ("whole", "stepwise", "in chunks")
NUM_STEPS = 4
"""Tokens computed one at a time."""


def check_forward(case: Case, folder: Path, noise: float) -> Findings:
    """Checks every device of a case's runs over the oracle's folder; `noise` is transformers' own error."""
    findings = Findings(worst={"transformers": noise})
    with np.load(folder / "oracle.npz") as stored:
        expected = [stored[f"logits_{index}"][: len(prompt)] for index, prompt in enumerate(case["prompts"])]
    for run in case["runs"]:
        device = run["device"]
        try:
            for place, ours in enumerate(_logits(case, run, folder)):
                index, way = divmod(place, len(WAYS))
                error = relative_error(ours, expected[index])
                findings.worst[device] = max(findings.worst.get(device, 0.0), error)
                if not error <= TOLERANCES[case["dtype"]]:
                    findings.failures.append(f"{device}: prompt {index} {WAYS[way]}: logits differ by {error:.2e}")
        except Exception as error:  # any fault of the product is a finding
            findings.failures.append(f"{device}: {type(error).__name__}: {str(error)[:600]}")
        findings.covered[f"{case['family']} on {device}"] += 1
    return findings


def _logits(case: Case, run: Fields, folder: Path) -> list[Array]:
    """`[tokens, vocabulary]` of each prompt, in each way."""
    is_exact, block_size = run.get("exact", False), run["block_size"]
    model = load_model(folder, device=run["device"], dtype=case["dtype"], exact=is_exact)
    pictures = _Pictures(model, case)
    prompts = [prompt for prompt in case["prompts"] for _ in WAYS]
    cuts = list(_cuts(case, pictures.whole))
    rows: list[list[Array]] = [[] for _ in prompts]
    driver = ModelDriver(
        model, len(prompts), block_size=block_size, max_tokens=max(2 * block_size, *map(len, prompts)),
        seed=case["weights"], in_groups=True, exact=is_exact, complete=pictures.complete,
    )  # fmt: skip
    for step in range(max(map(len, cuts)) - 1):
        pictures.chunks = {n: (cut[step], cut[step + 1]) for n, cut in enumerate(cuts) if step + 1 < len(cut)}
        made = driver.step({n: prompts[n][start:end] for n, (start, end) in pictures.chunks.items()})
        for n, logits in made.items():
            rows[n].append(logits)
    return [np.concatenate(each) for each in rows]


def _cuts(case: Case, whole: Sequence[range]) -> Iterator[list[int]]:
    """The first tokens of each prompt's chunks, and its length, in each way. No chunk begins within a part of the first
    prompt that is `whole`."""
    rng = np.random.default_rng(case["weights"])
    for index, prompt in enumerate(case["prompts"]):
        length = len(prompt)
        chosen = rng.choice(np.arange(1, length), min(2, length - 1), replace=False).tolist()
        for cuts in ([], range(max(1, length - NUM_STEPS), length), sorted(chosen)):
            yield [0, *(cut for cut in cuts if index or not any(cut in part[1:] for part in whole)), length]


class _Pictures:
    """The pictures of a case's first prompt, if it has any, and the rotations of positions on three axes.

    Attributes:
        whole: the tokens of each picture, if they see each other.
        chunks: first token, and the one after the last, of each sequence of the next batch.
    """

    def __init__(self, model: Model, case: Case) -> None:
        self._model = model
        self._rows: list[tuple[Tensor, ...]] = []
        self._spans: list[range] = []
        self.whole: list[range] = []
        self.chunks: dict[int, tuple[int, int]] = {}
        if given := case.get("pictures"):
            assert isinstance(model, Gemma4PictureModel)
            vision = case["fields"]["vision_config"]
            made = our_patches(vision, drawn_pictures(vision, given["grids"], case["weights"]))
            self._rows = [model.tower(*each) for each in made]
            self._spans = [range(first, first + rows[0].shape[0]) for first, rows in zip(given["firsts"], self._rows)]
            self.whole = self._spans if model.whole_picture_tokens is not None else []

    def complete(self, batch: Batch, _: int) -> None:
        """Adds them to a batch (`ModelDriver`)."""
        positions, origin, encoded = batch.positions.to("cpu").numpy(), 0, []
        if isinstance(self._model, AxesDecoder):
            batch.rope = self._model.rotations(np.stack([positions] * 3))
            (batch.positions,) = ops.place([np.arange(len(positions), dtype=np.int32)], self._model.device)
        until = positions + np.int32(1)
        for sequence, (start, end) in self.chunks.items():
            for span, rows in zip(self._spans, self._rows) if sequence < len(WAYS) else ():
                low, high = max(start, span.start), min(end, span.stop)
                if low < high:
                    at = origin + low - start
                    part = slice(low - span.start, high - span.start)
                    encoded.append(EncodedTokens(at, tuple(each[part] for each in rows)))
                    until[at : at + high - low] = span.stop
            origin += end - start
        batch.encoded = tuple(encoded)
        if encoded and self.whole:
            (batch.bidirectional_until,) = ops.place([until], self._model.device)
