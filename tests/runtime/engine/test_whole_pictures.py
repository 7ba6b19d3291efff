"""Requests with pictures whose tokens see each other (Gemma 3 and 4): no step and no cached prefix ends within one, and
all schedules draw what the model alone draws.

What the models draw is held against transformers by `tests/models/vision`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from models.configuration.preprocessing import read_patch_rule
from models.registry import load_model
from runtime import ops
from runtime.batch import Batch, EncodedTokens
from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.pictures import Picture, PictureKeys, Pictures, runs_of
from runtime.images.patches import make_patches, normalised
from runtime.llm import LLM
from tests.models.driver import ModelDriver
from tests.models.vision.cases import IMAGE, write_golden
from tests.models.vision.chat_model import write_chat_model
from tests.models.vision.square_cases import GEMMA3
from tests.runtime.engine.test_pictures import Sampled, asked, continued, greedy, opened, picture, sampled_of

PICTURES = [picture(1), picture(2, 16, 24), picture(3, 64, 8), picture(4)]
PROMPT = [IMAGE, 3, 17, 20, IMAGE, 5, 81, 44, 46, 7, IMAGE, IMAGE]
"""Pictures first, between text, beside each other, and last. Each has 9 tokens, and layers have windows of 7."""

TEXT = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_golden(tmp_path_factory.mktemp("gemma"), "gemma3_window", GEMMA3["gemma3_window"])


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return model_alone(folder)


def model_alone(folder: Path) -> Any:
    """Draws greedily with the model alone: the whole prompt at once, then token by token."""
    model: Any = load_model(folder)
    rule = read_patch_rule(folder, model.patch_rule)

    def sample(prompt: Sequence[int], pictures: Sequence[Any], num_new: int) -> Sampled:
        ids: list[int] = []
        items, made, left = [], [], list(pictures)
        for token in prompt:
            if token != IMAGE:
                ids.append(token)
                continue
            patches = make_patches(left.pop(0), rule)
            rows = model.tower(normalised(patches.pixels, rule), patches.grid)
            items.append(Picture(b"", len(ids), *rule.token_grid(*patches.grid)))
            made.append(EncodedTokens(len(ids), rows))
            ids += [IMAGE] * items[-1].num_tokens

        def complete(batch: Batch, start: int) -> None:
            if start == 0 and items:
                batch.encoded = tuple(made)
                until = np.arange(1, len(ids) + 1, dtype=np.int32)
                for first, end in runs_of(items):
                    until[first:end] = end
                (batch.bidirectional_until,) = ops.place([until], model.device)

        return continued(ModelDriver(model, max_tokens=256, complete=complete), ids, num_new)

    return sample


REQUESTS: list[tuple[list[int], list[Any]]] = [
    (PROMPT, PICTURES),
    ([8, IMAGE, 8, 8], [PICTURES[1]]),
    (TEXT, []),
    ([8, IMAGE], [PICTURES[2]]),
    (PROMPT, PICTURES),
    ([IMAGE, 3], [PICTURES[0]]),
]


def answers(llm: LLM, requests: Sequence[tuple[list[int], list[Any]]], num_new: int) -> list[Sampled]:
    prompts = [asked(pictures, prompt) if pictures else list(prompt) for prompt, pictures in requests]
    outputs = llm.generate(prompts, greedy(num_new), use_tqdm=False)
    return [sampled_of(choice) for output in outputs for choice in output.outputs]


@pytest.fixture(scope="module")
def expected(alone: Any) -> list[Sampled]:
    return [alone(prompt, pictures, 12) for prompt, pictures in REQUESTS]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 21},
        {"max_num_batched_tokens": 64, "prefill_chunk": 5, "overlap": "on"},
        {"max_num_batched_tokens": 24, "speculation": "ngram", "num_blocks": 44, "preemption": "recompute"},
        {"enable_prefix_caching": False, "decode_graphs": "off", "batching": "orca"},
        {"max_num_batched_tokens": 21, "num_blocks": 34, "preemption": "swap", "swap_space_bytes": 1 << 20},
    ],
    ids=str,
)
def test_any_schedule_draws_what_the_model_draws(
    folder: Path, expected: list[Sampled], options: dict[str, Any]
) -> None:
    with opened(folder, **options) as llm:
        first = answers(llm, REQUESTS, 12)
        assert first == expected
        again = answers(llm, REQUESTS, 12)  # from cached pages
        assert [(each.token_ids, each.logprobs) for each in again] == [
            (each.token_ids, each.logprobs) for each in first
        ]


@pytest.mark.parametrize("case", ["gemma4_whole", "gemma4_unified"])
def test_pictures_that_see_each_other_in_some_layers(tmp_path: Path, case: str) -> None:
    """Gemma 4's pictures of 63 tokens in layers with windows of 7: chunks of 5, drafts, preemption, cached prefixes."""
    folder = write_chat_model(tmp_path, case)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 256
    (folder / "config.json").write_text(json.dumps(config))
    begun = [3, 17, IMAGE, 5, 81, 44, 5, 81, 44]
    both = [*begun, IMAGE, 9]  # pictures from 2 to 65, and from 71 to 134
    requests = [(both, PICTURES[::3]), (begun, PICTURES[:1]), (TEXT, []), ([IMAGE], PICTURES[3:])]
    alone = model_alone(folder)
    expected = [alone(*request, 24) for request in requests]
    small = {"prefill_chunk": 5, "max_num_batched_tokens": 80, "max_model_len": 176}
    for options in (
        {"speculation": "ngram", "preemption": "recompute"},
        {"preemption": "swap", "swap_space_bytes": 1 << 20},
    ):
        with opened(folder, num_blocks=52, **small, **options) as llm:
            for _ in range(5):  # pictures take their time: those that are encoded start together
                assert answers(llm, requests, 24) == expected
            assert llm.client.stats().num_preemptions > 0
    with opened(folder, **small, overlap="on") as llm:
        assert answers(llm, requests, 24) == expected
        for prompt, pictures, num_cached in ((both, PICTURES[::3], 134), (both, [PICTURES[0], picture(9)], 71)):
            (output,) = llm.generate([asked(pictures, prompt)], greedy(24), use_tqdm=False)
            assert sampled_of(output.outputs[0]) == alone(prompt, pictures, 24)
            assert output.num_cached_tokens == num_cached
    file = folder / "preprocessor_config.json"
    file.write_text(file.read_text().replace("70", "1120"))
    with pytest.raises(RequestError, match="is below 1123: one step computes a picture's 1120 tokens beside"):
        opened(folder, **small)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(12))
def test_random_schedules(folder: Path, alone: Any, seed: int) -> None:
    sample = np.random.RandomState(seed)
    requests = []
    for _ in range(7):
        prompt: list[int] = []
        for _ in range(sample.randint(1, 5)):
            prompt += [IMAGE] * sample.randint(0, 3) + sample.randint(3, 80, sample.randint(1, 9)).tolist()
        count = prompt.count(IMAGE)
        requests.append((prompt or [4], [PICTURES[each] for each in sample.randint(0, 2, count)]))
    expected = [alone(prompt, pictures, 9) for prompt, pictures in requests]
    options: dict[str, Any] = {
        "block_size": int(sample.choice([8, 16])), "max_num_seqs": int(sample.randint(1, 6)),
        "overlap": str(sample.choice(["on", "off"])), "speculation": str(sample.choice(["off", "ngram"])),
        "preemption": "recompute", "enable_prefix_caching": bool(sample.randint(2)),
    }  # fmt: skip
    options["max_num_batched_tokens"] = 18 + options["max_num_seqs"] - 1 + int(sample.randint(0, 9))
    options["num_blocks"] = int(sample.randint(48, 70))
    if sample.randint(2):
        options |= {"preemption": "swap", "swap_space_bytes": 1 << 20}
    if sample.randint(2):
        options["prefill_chunk"] = int(sample.randint(1, 30))
    with opened(folder, **options) as llm:
        fitting = llm.client.info.images
        assert fitting is not None
        assert (fitting.most_whole or 0) >= 18
        for _ in range(2):
            assert answers(llm, requests, 9) == expected


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
def test_on_emulated_gpus(folder: Path, alone: Any, device: str) -> None:
    requests = REQUESTS[:3]
    expected = [alone(prompt, pictures, 4) for prompt, pictures in requests]
    with opened(folder, device=device, dtype="float32", max_num_batched_tokens=24, exact=True) as llm:
        assert answers(llm, requests, 4) == expected
        assert answers(llm, requests, 4) == expected


def test_a_cached_prefix_ends_before_a_picture_or_behind_it(folder: Path, alone: Any) -> None:
    other = [*PICTURES[:3], picture(9)]
    behind = [IMAGE, 3, 17, 20, IMAGE, 5, 81, 44, 46, 7, IMAGE, 30, IMAGE]
    with opened(folder) as llm:
        for prompt, pictures, num_cached in (
            (PROMPT, PICTURES, 0),
            (PROMPT, PICTURES, 26),  # not within the last two, which the last token belongs to
            ([*PROMPT, 4], PICTURES, 44),
            (PROMPT, other, 26),  # the third sees the fourth
            (behind, PICTURES, 26),  # and is alone here
            ([*PROMPT[:4], 30], PICTURES[:1], 12),
            ([IMAGE, IMAGE, 3], [PICTURES[0]] * 2, 0),
        ):
            (output,) = llm.generate([asked(pictures, prompt)], greedy(4), use_tqdm=False)
            assert sampled_of(output.outputs[0]) == alone(prompt, pictures, 4)
            assert output.num_cached_tokens == num_cached


def test_choices_share_no_part_of_a_picture(folder: Path, alone: Any) -> None:
    """The last token of the prompt, which each computes, is one of the last two pictures' tokens."""
    expected = alone(PROMPT, PICTURES, 6)
    for options in ({}, {"enable_prefix_caching": False}):
        with opened(folder, max_num_batched_tokens=24, **options) as llm:
            params = greedy(6, n=3)
            (output,) = llm.generate([asked(PICTURES, PROMPT)], params, use_tqdm=False)
            assert [sampled_of(choice) for choice in output.outputs] == [expected] * 3


def test_where_prompts_may_be_cut() -> None:
    items = [Picture(bytes([index]) * 16, first, 1, 4) for index, first in enumerate((2, 6, 12))]
    pictures = Pictures.of(items, 20, [], [], has_axes=False, are_whole=True)
    assert pictures.whole == ((2, 10), (12, 16))
    assert [pictures.cut(end) for end in range(18)] == [0, 1, *[2] * 8, 10, 11, *[12] * 4, 16, 17]
    assert [pictures.least_end(start) for start in (0, 1, 2, 10, 11, 12, 16)] == [1, 2, 10, 11, 12, 16, 17]
    assert [pictures.whole_chunk(0, count, 20) for count in (1, 2, 5, 10, 11)] == [1, 2, 2, 10, 11]
    assert [pictures.whole_chunk(2, 3, most) for most in (7, 8, 20)] == [0, 8, 8]
    ids = np.arange(20, dtype=np.int32)
    keys = PictureKeys()
    found = keys.prompt_keys(ids, pictures)
    assert set(found[2:10]) & set(found[12:16]) == set()
    assert found[2] == found[9] != keys.key_of(items[0].digest)
    assert found[12] == keys.key_of(items[2].digest)
    cut = Pictures.of(items, 20, [], [], has_axes=False, are_whole=False)
    assert (cut.whole, cut.cut(5), cut.least_end(5)) == ((), 5, 6)


def test_what_no_step_can_compute_is_refused(folder: Path) -> None:
    message = "max_num_batched_tokens=11 is below 12: one step computes a picture's 9 tokens beside the decodes of"
    with pytest.raises(RequestError, match=message):
        opened(folder, max_num_batched_tokens=11)
    with opened(folder, max_num_batched_tokens=20) as llm:
        assert llm.client.info.images is not None
        assert llm.client.info.images.most_whole == 17
        with pytest.raises(RequestError, match="images have 18 tokens side by side, from 1 on, limit 17: one step"):
            llm.generate([asked(PICTURES[:2], [4, IMAGE, IMAGE])], SamplingParams(max_tokens=2), use_tqdm=False)
    with opened(folder, max_num_batched_tokens=None) as llm:
        assert llm.client.info.max_num_batched_tokens >= 12
