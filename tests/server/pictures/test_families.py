"""Each family that reads pictures, once through `LLM.chat` and once over HTTP: the same tokens."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from PIL import Image

from runtime.engine.messages import ImageSupport
from runtime.engine.sampling_params import SamplingParams
from runtime.images.patches import FixedRule, Rule, SideRule, TokenRule
from runtime.llm import LLM
from server.config import ServerConfig
from server.errors import ApiError
from server.pictures.reader import PictureReader, PictureSource
from tests.models.vision.cases import IMAGE
from tests.models.vision.chat_model import BEGIN, write_chat_model
from tests.server.real_server import serving_real

PIXELS = np.random.RandomState(4).randint(0, 256, (40, 56, 3)).astype(np.uint8)
OPTIONS: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "max_model_len": 128}

EXPECTED = {
    "qwen3_vl_moe": ["[user]Look:\n", *[IMAGE] * 35, "What?[a]"],
    "qwen2_5_vl": ["[user]Look:\n", *[IMAGE] * 35, "What?[a]"],
    "mistral3": ["[user]Look:\n", *([*[IMAGE] * 5, 92] * 4)[:-1], 91, "What?[a]"],
    "mistral4": ["[user]Look:\n", *([*[IMAGE] * 5, 92] * 4)[:-1], 91, "What?[a]"],
    "gemma4_whole": ["[user]Look:\n", 92, *[IMAGE] * 63, 93, "What?[a]"],
    "gemma4_unified": ["[user]Look:\n", 92, *[IMAGE] * 63, 93, "What?[a]"],
    "gemma3_window": ["[user]Look:\n\n\n", 92, *[IMAGE] * 9, 93, "\n\nWhat?[a]"],
}
"""The prompt: texts, and ids that are none. Gemma's line end and its frame's two are one token."""


@pytest.mark.parametrize("case", EXPECTED)
def test_a_chat_over_http_is_that_of_the_library(tmp_path: Path, case: str) -> None:
    folder = write_chat_model(tmp_path, case)
    look, what = ({"type": "text", "text": words} for words in ("Look:\n", "What?"))
    question: list[Any] = [look, {"type": "image", "image": PIXELS}, what]
    with LLM(folder, compile_ahead=False, **OPTIONS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        (output,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
        encode = llm.get_tokenizer().encode
        expected = [
            token for part in EXPECTED[case] for token in (encode(part, False) if isinstance(part, str) else [part])
        ]
        assert output.prompt_token_ids == expected
        if case.startswith("gemma3"):
            assert encode("\n\n\n", False) == [4]
            written = {"prompt": f"[user]Look:\n{BEGIN}What?[a]", "images": [PIXELS]}
            (again,) = llm.generate(written, params, use_tqdm=False)
            assert again.prompt_token_ids == output.prompt_token_ids
            typed = [{"type": "text", "text": f"{BEGIN}Look:\n"}, *question[1:]]
            (text,) = llm.chat([{"role": "user", "content": typed}], params, use_tqdm=False)
            assert text.prompt_token_ids.count(92) == 1  # what a user types is text
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    sent = [look, {"type": "image_url", "image_url": {"url": uri}}, what]
    body = {
        "messages": [{"role": "user", "content": sent}], "return_token_ids": True, "ignore_eos": True, "temperature": 0,
        "max_tokens": 6,
    }  # fmt: skip
    with serving_real(folder, **OPTIONS) as real:
        answer = real.http.post("/v1/chat/completions", json=body).json()
        for other, words in {"input_audio": "audio", "video_url": "videos"}.items():
            asked = [{"role": "user", "content": [look, {"type": other, other: {"url": uri}}]}]
            refused = real.http.post("/v1/chat/completions", json={**body, "messages": asked})
            assert refused.status_code == 400
            why = f"messages[0].content[1].type ('{other}': {words}; the model reads text and images only)."
            assert refused.json()["error"]["message"] == f"Unsupported parameter: {why}"
    assert answer["prompt_token_ids"] == output.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids
    assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids)


@pytest.mark.parametrize(
    ("rule", "sides"),
    [
        (SideRule(most_height=1540, most_width=1024, patch_size=14), "at most 1540 x 1024"),
        (FixedRule(height=336, width=280, patch_size=14, num_tokens=480), "336 x 280"),
    ],
)
def test_limits_of_pixels_are_refused_with_the_sides(rule: Rule, sides: str) -> None:
    reader = object.__new__(PictureReader)
    reader.support = ImageSupport(token_id=IMAGE, rule=rule, max_tokens=99, has_axes=False)
    assert reader.rule(None) == rule
    why = f"mm_processor_kwargs.max_pixels (the model's images have {sides} pixels)"
    with pytest.raises(ApiError, match=re.escape(why)):
        reader.rule({"max_pixels": 50_000})


def test_a_request_for_more_tokens_than_the_models_own() -> None:
    """Gemma 4's `max_soft_tokens`: at most what one step computes; the shared memory has room for it."""
    own = TokenRule(max_tokens=70, patch_size=16, merge_size=3)
    support = ImageSupport(token_id=IMAGE, rule=own, max_tokens=2000, has_axes=False, most_whole=600)
    reader = PictureReader(support, ServerConfig(num_image_processes=1))
    try:
        file = io.BytesIO()
        Image.fromarray(PIXELS).save(file, "PNG")
        source = PictureSource("x", f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}", is_low=False)
        assert reader.rule(None) == own
        for asked, grid in ((None, (21, 27)), ({"max_soft_tokens": 560}, (60, 84))):
            made = reader.read(source, reader.rule(asked), (None, None))
            assert (made.rows, made.columns) == grid
        for wrong in (1120, 71, "70", True):
            with pytest.raises(ApiError, match="max_soft_tokens must be one of 70, 140, 280, 560, got"):
                reader.rule({"max_soft_tokens": wrong})
        with pytest.raises(ApiError, match=r"Unknown parameter: mm_processor_kwargs\.max_pixels"):
            reader.rule({"max_soft_tokens": 70, "max_pixels": 9})
    finally:
        reader.close()


def test_the_longest_side_of_pixtrals_pictures() -> None:
    """`size` is what PixtralImageProcessor takes."""
    own = SideRule(most_height=1540, most_width=1024, patch_size=14)
    reader = object.__new__(PictureReader)
    reader.support = ImageSupport(token_id=IMAGE, rule=own, max_tokens=99, has_axes=False)
    assert reader.rule({"size": {"longest_edge": 1100}}) == own.at_most(1100)
    for wrong in ({"longest_edge": 9}, {"longest_edge": 1541}, {"longest_edge": "x"}, {"height": 99}, {}):
        with pytest.raises(ApiError, match=r'mm_processor_kwargs.size must be \{"longest_edge": 14 … 1540\}'):
            reader.rule({"size": wrong})
    with pytest.raises(ApiError, match=r"mm_processor_kwargs.max_pixels \(the model's images have at most 700 x 700"):
        reader.rule({"size": {"longest_edge": 700}, "max_pixels": 9})
