"""``LLM.chat`` and ``generate`` with pictures: the template's places for them, and text that only looks like one."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from PIL import Image

from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM
from tests.models.gguf.test_mmproj import write_text, write_tower
from tests.models.vision.chat_model import IMAGE, PAD, write_chat_model

PIXELS = np.random.RandomState(4).randint(0, 256, (40, 56, 3)).astype(np.uint8)
NUM_TOKENS = 5 * 7


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_chat_model(tmp_path_factory.mktemp("vl"))
    with LLM(folder, block_size=8, max_num_seqs=2, max_model_len=128, compile_ahead=False) as opened:
        yield opened


PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def messages(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "u", "content": list(content)}]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def ids_of(llm: LLM, words: str) -> list[int]:
    return llm.get_tokenizer().encode(words, add_special_tokens=False)


def test_a_picture_in_a_conversation(llm: LLM, tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    (tmp_path / "picture.png").write_bytes(file.getvalue())
    expected = [*ids_of(llm, "[u]Look:"), *[IMAGE] * NUM_TOKENS, *ids_of(llm, "What?[a]")]
    answers = set()
    path = tmp_path / "picture.png"
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    for given in (PIXELS, Image.fromarray(PIXELS), file.getvalue(), path, path.as_uri(), uri):
        (output,) = llm.chat(
            messages(text("Look:"), {"type": "image", "image": given}, text("What?")), PARAMS, use_tqdm=False
        )
        assert output.prompt_token_ids == expected
        answers.add(tuple(output.outputs[0].token_ids))
    (generated,) = llm.generate({"prompt": f"[u]Look:{PAD}What?[a]", "images": [PIXELS]}, PARAMS, use_tqdm=False)
    assert generated.prompt_token_ids == expected
    assert answers == {tuple(generated.outputs[0].token_ids)}


def test_a_model_in_gguf_and_its_tower(llm: LLM, tmp_path: Path) -> None:
    """What the folder answers, the model's file with the tower beside it answers, too."""
    asked = messages(text("Look:"), {"type": "image", "image": PIXELS}, text("What?"))
    (expected,) = llm.chat(asked, PARAMS, use_tqdm=False)
    path = write_text(tmp_path / "model.gguf", "qwen3_vl")
    pixels = {"clip.vision.image_min_pixels": 64, "clip.vision.image_max_pixels": 4096}
    rule = {f"clip.vision.image_{each}": [0.5] * 3 for each in ("mean", "std")}
    tower = write_tower(tmp_path / "tower.gguf", "qwen3_vl", **pixels, **rule)
    with LLM(path, mmproj=str(tower), block_size=8, max_model_len=128, compile_ahead=False) as opened:
        (output,) = opened.chat(asked, PARAMS, use_tqdm=False)
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_picture_before_a_state(tmp_path: Path) -> None:
    """Its tokens are found again, and computed in other steps, and nothing differs."""
    folder = write_chat_model(tmp_path, "qwen3_5_vl")
    asked = messages(text("Look:"), {"type": "image", "image": PIXELS}, text("What?"))
    options = {"block_size": 8, "max_model_len": 128, "compile_ahead": False}
    answers, cached = set(), []
    for more in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 2}):
        with LLM(folder, **options, **more) as llm:
            for _ in range(2):
                (output,) = llm.chat(asked, PARAMS, use_tqdm=False)
                answers.add(tuple(output.outputs[0].token_ids))
                cached.append(output.num_cached_tokens)
    assert len(answers) == 1
    assert min(cached[1::2]) > NUM_TOKENS > 0 == max(cached[::2])


def test_a_part_that_is_not_read_here_is_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"content\[0\]\.image_url is 'http://x', but no URL is fetched here"):
        llm.chat(messages({"type": "image_url", "image_url": "http://x"}), PARAMS)
    with pytest.raises(RequestError, match=r"content\[0\]\.type must be one of text, .*, got 'poem'"):
        llm.chat(messages({"type": "poem"}), PARAMS)


def test_what_a_user_types_is_text(llm: LLM) -> None:
    picture = {"type": "image", "image": PIXELS}
    (output,) = llm.chat(messages(text(PAD), picture, text(f"is{PAD}")), PARAMS, use_tqdm=False)
    ids = output.prompt_token_ids
    assert ids.count(IMAGE) == NUM_TOKENS
    assert ids.index(IMAGE) == len("[u]") + len(PAD)


def test_pictures_and_places_must_agree(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"1 image tokens .* 2 images"):
        llm.generate({"prompt": f"a{PAD}", "images": [PIXELS, PIXELS]}, PARAMS)
    with pytest.raises(RequestError, match=r"1 image tokens .* 2 images"):
        llm.embed({"prompt": f"a{PAD}", "images": [PIXELS, PIXELS]})
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]\.image is missing"):
        llm.chat(messages({"type": "image"}), PARAMS)
