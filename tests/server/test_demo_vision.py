"""The bundled model that reads pictures: over HTTP, in the command line's chat, and how often it is right."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

import models.demo_vision
from runtime.commands.chat_session import ChatSession
from runtime.llm import LLM
from server.config import ServerConfig
from tests.server.pictures.test_fetching import OK, says, web
from tests.server.real_server import Real, serving_real
from tools.demo_model import evaluation, picture_tasks, tasks

FOLDER = Path(models.demo_vision.__file__).parent
CHART = FOLDER / "chart.png"
URI = f"data:image/png;base64,{base64.b64encode(CHART.read_bytes()).decode()}"
QUESTION, ANSWER = "Which bar is the largest?", "The blue bar is the largest."
NUM_TOKENS = 24
NOTHING = "I see no picture. Send me one: shapes, a number or a bar chart."
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_model_len": 512, "num_blocks": 256}


@pytest.fixture(scope="module")
def web_place() -> Iterator[str]:
    file = CHART.read_bytes()
    with web(says(f"{OK}\nContent-Length: {len(file)}", file)) as place:
        yield place


@pytest.fixture(scope="module")
def real(web_place: str) -> Iterator[Real]:
    config = ServerConfig(allow_image_urls=True, allow_image_hosts=(web_place,))
    with serving_real(FOLDER, config=config, **OPTIONS) as served:
        yield served


def content(url: str, question: str) -> Any:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]


def test_it_answers_by_uri_and_by_url_whole_and_streamed(real: Real, web_place: str) -> None:
    for url in (URI, f"http://{web_place}/chart.png"):
        messages: Any = [{"role": "user", "content": content(url, QUESTION)}]
        whole = real.openai.chat.completions.create(model=real.model, messages=messages, temperature=0)
        assert whole.choices[0].message.content == ANSWER
        stream = real.openai.chat.completions.create(model=real.model, messages=messages, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


def test_a_conversation_goes_on_about_the_picture(real: Real) -> None:
    messages: list[Any] = [{"role": "user", "content": content(URI, QUESTION)}]
    for answer, question in ((ANSWER, "How many bars are there?"), ("There are three bars.", "")):
        whole = real.openai.chat.completions.create(model=real.model, messages=messages, temperature=0)
        assert whole.choices[0].message.content == answer
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def test_without_a_picture_it_says_so(real: Real) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    whole = real.openai.chat.completions.create(model=real.model, messages=messages, temperature=0)
    assert whole.choices[0].message.content == NOTHING


def test_the_chat_of_the_command_line_and_how_often_it_is_right() -> None:
    """Of 90 held-out questions, ten of a kind, 95 %."""
    with LLM(str(FOLDER), device="cpu", max_model_len=512, num_blocks=256, use_tqdm_on_load=False) as llm:
        session = ChatSession(llm)
        session.attach(CHART)
        assert "".join(session.answer(QUESTION)) == ANSWER
        scores, wrong = evaluation.evaluate_vision(llm, 10, seed=1)
    assert sum(score.num_questions for score in scores) == 90
    assert sum(score.num_right for score in scores) >= 86, "\n".join(wrong)


@pytest.mark.exhaustive
def test_two_hundred_questions_of_each_kind() -> None:
    with LLM(str(FOLDER), device="cpu", use_tqdm_on_load=False) as llm:
        scores, _ = evaluation.evaluate_vision(llm, 200, seed=0)
    assert [(score.task, score.num_questions) for score in scores] == [(task, 200) for task in picture_tasks.TASKS]
    assert tasks.missed_goals(scores, evaluation.VISION_GOALS) == []


def test_questions_about_one_picture(real: Real) -> None:
    """The picture is part of the prefix that all share; a question's own one is read for it alone. `LLM.decide` answers
    the same."""
    image: Any = {"type": "input_image", "image_url": URI, "detail": "auto"}
    given: Any = [{"role": "user", "content": [image]}]
    questions: list[Any] = [
        {"type": "predicate", "instructions": f"Is the {colour} bar the largest?", "name": colour}
        for colour in ("blue", "red", "green", "yellow")
    ]
    decision = real.openai.decisions.create(model=real.model, input=given, questions=questions)
    details = decision.usage.input_tokens_details
    assert details.cached_tokens >= 3 * NUM_TOKENS
    alone = [
        real.openai.decisions.create(model=real.model, input=given, questions=[each]).answers[0] for each in questions
    ]
    assert decision.answers == alone
    mixed = [
        {**questions[0], "instructions": [image, {"type": "input_text", "text": "Is this a chart?"}]},
        questions[1],
    ]
    own = real.openai.decisions.create(model=real.model, input="Look.", questions=mixed).answers
    assert own[0] == real.openai.decisions.create(model=real.model, input="Look.", questions=mixed[:1]).answers[0]
    assert own[1] == real.openai.decisions.create(model=real.model, input="Look.", questions=mixed[1:]).answers[0]
    with LLM(FOLDER, use_tqdm_on_load=False, **OPTIONS) as llm:
        (found,) = llm.decide([{"role": "user", "content": [image]}], questions, use_tqdm=False)
    assert [each.probability for each in found.answers] == [each.probability for each in decision.answers]  # type: ignore[union-attr]
