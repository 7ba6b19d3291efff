"""Pictures in the chat: with the first message, with the next, asked again, and where the model reads none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from PIL import Image

from runtime.commands.chat_session import ChatSession, run_slash
from runtime.errors import InvalidArgumentError
from runtime.images.decoding import ImageError
from runtime.llm import LLM
from tests.models.vision.chat_model import IMAGE, write_chat_model
from tests.runtime.commands.fakes import FakeLLM
from tests.runtime.commands.running import run

PIXELS = np.random.RandomState(4).randint(0, 256, (40, 56, 3)).astype(np.uint8)
NUM_TOKENS = 5 * 7
GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_chat_model(tmp_path_factory.mktemp("vl"))
    Image.fromarray(PIXELS).save(made / "picture.png")
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, block_size=8, max_num_seqs=2, max_model_len=128, compile_ahead=False) as opened:
        yield opened


def test_a_picture_goes_with_the_next_message(llm: LLM, folder: Path) -> None:
    session = ChatSession(llm, given=GREEDY)
    alone = "".join(session.answer("What?"))
    assert session.stats.num_prompt_tokens == len("[user]What?[a]")
    session.conversation.reset()
    assert "next message" in run_slash(session, f"/image {folder / 'picture.png'}").text
    assert run_slash(session, "/image").text.startswith("1 pictures")
    seen = "".join(session.answer("What?"))
    assert session.stats.num_prompt_tokens == len("[user]What?[a]") + NUM_TOKENS
    assert session.attached == []
    assert seen != alone, "the random model sees it"
    assert session.encode(session.conversation.messages()).count(IMAGE) == NUM_TOKENS, "it stays in the conversation"
    assert run_slash(session, "/retry").message == "What?"
    assert "".join(session.answer("What?")) == seen


def test_files_that_are_none(llm: LLM, folder: Path) -> None:
    session = ChatSession(llm, given=GREEDY)
    with pytest.raises(ImageError, match="cannot be read"):
        run_slash(session, "/image nowhere.png")
    with pytest.raises(ImageError, match="cannot be read as one of"):
        session.attach(folder / "config.json")
    assert session.attached == []


def test_a_model_that_reads_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    session = ChatSession(FakeLLM(tmp_path, reply=lambda prompt: "yes"))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="reads no images"):
        session.attach("a.png")


@pytest.mark.exhaustive
def test_the_command(folder: Path) -> None:
    arguments = ["chat", "--model", str(folder), "--max-model-len", "128", "--max-tokens", "4", "--temperature", "0"]
    plain, seen = (run(*arguments, *more, stdin="What?\n") for more in ([], ["--image", str(folder / "picture.png")]))
    assert (plain.returncode, seen.returncode) == (0, 0), plain.stderr + seen.stderr
    assert plain.stdout != seen.stdout
    refused = run(*arguments, "--image", str(folder / "config.json"), stdin="What?\n")
    assert refused.returncode in (1, 2)
    assert "cannot be read as one of" in refused.stderr
