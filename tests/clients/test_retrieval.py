"""Clients of embeddings, rerankers and classifiers on small encoders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.environments import python_of
from tests.clients.test_clients import PROGRAMS, run_steps
from tests.models.encoder_cases import write_encoder
from tests.server.real_server import serving_real

MODELS = {"embeds": "bert", "ranks": "bert_pairs", "labels": "modernbert_labels"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MODELS)
def test_retrieval(kind: str, tmp_path: Path) -> None:
    python = str(python_of("retrieval"))
    home = tmp_path / "home"
    home.mkdir()
    with serving_real(write_encoder(tmp_path / "model", MODELS[kind])) as real:
        run_steps([python, str(PROGRAMS / "retrieval_tour.py")], (real.url, real.model, kind), home, cwd=home)
