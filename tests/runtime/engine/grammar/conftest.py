"""The bundled model's tokenizer, and its vocabulary as grammars see it."""

from __future__ import annotations

import pytest

import models.demo
from runtime.engine.grammar.matcher import Vocabulary
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(models.demo.__path__[0])


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size, (635,))
