"""The requests that docs/server.md shows on answers without generation, each on a small model of its kind."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.encoder_cases import write_encoder
from tests.server.real_server import serving_real

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"^## Answers without generation\n(.*?)^## ", re.M | re.S)
MODELS = {
    "/v1/embeddings": "bert", "/rerank": "bert_pairs", "/score": "bert_pairs", "/classify": "modernbert_labels",
    "/v1/decisions": "demo",
}  # fmt: skip


def requests() -> Iterator[tuple[str, str]]:
    """Path and body of each."""
    match = SECTION.search((ROOT / "docs" / "server.md").read_text(encoding="utf-8"))
    assert match is not None
    for block in re.findall(r"^```sh\n(.*?)^```", match[1], re.M | re.S):
        for command in re.findall(r"^curl .*?}'$", block, re.M | re.S):
            _, url, header, kind, data, body = shlex.split(command)
            assert (header, kind, data) == ("-H", "Content-Type: application/json", "-d")
            yield url.removeprefix("http://127.0.0.1:8000"), body


def test_every_api_has_one() -> None:
    assert [path for path, _ in requests()] == list(MODELS)


@pytest.mark.parametrize(("path", "body"), [*requests()])
def test_it_runs(path: str, body: str, tmp_path: Path) -> None:
    kind = MODELS[path]
    folder = ROOT / "models" / "demo" if kind == "demo" else write_encoder(tmp_path, kind)
    with serving_real(folder) as real:
        answer = real.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text
        found = answer.json()
    asked = json.loads(body)
    if path == "/v1/embeddings":
        assert len(found["data"]) == len(asked["input"])
    elif path == "/rerank":
        assert len(found["results"]) == asked["top_n"]
    elif path == "/v1/decisions":
        assert [each["type"] for each in found["answers"]] == [each["type"] for each in asked["questions"]]
    else:
        assert found["data"]
