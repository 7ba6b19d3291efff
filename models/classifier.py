"""Decoders with a classifier instead of an output head: transformers' `...ForSequenceClassification`, which reads the
last token's hidden state through `score.weight [labels, hidden_size]`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

from models.base import Architecture, Model
from models.configuration.config import ModelConfig
from models.configuration.json_fields import Fields
from models.head import Dense
from models.makers.maker import Maker

CAUSAL, CLASSIFYING = "ForCausalLM", "ForSequenceClassification"


class Classifier(Model):
    """Stands before a decoder's class, whose token table is its head, so that no other is stored."""

    generates = False

    def __init__(self, config: ModelConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.classifier = (Dense(maker.table("score.weight", len(config.labels), config.hidden_size)),)


def base_of(name: str) -> str:
    """The name of the decoder that a classifier is made of. Gemma 3's classifier has "Text" in its name, its decoder
    not."""
    if name == f"GPT2{CLASSIFYING}":
        return "GPT2LMHeadModel"
    return name.replace(f"Text{CLASSIFYING}", CLASSIFYING).replace(CLASSIFYING, CAUSAL)


@cache
def classifier_of(base: Architecture, name: str) -> Architecture:
    """The architecture of a decoder's classifier, by its name."""
    kind: Any = type(f"{base.model_class.__name__}Classifier", (Classifier, base.model_class), {})
    return Architecture(name, base.model_type, partial(_read, base), kind)


def _read(base: Architecture, fields: Fields) -> ModelConfig:
    return replace(base.read_config(fields), tie_word_embeddings=True, labels=read_labels(fields))


def read_labels(fields: Fields) -> tuple[str, ...]:
    """The names of a classifier's labels, by their numbers: `id2label`, or `num_labels` (2) without names."""
    listed = fields.raw("id2label")
    if isinstance(listed, dict) and listed:
        try:
            by_number = {int(number): str(name) for number, name in listed.items()}
        except ValueError:
            raise fields.error("id2label", f"= {listed!r:.80} must name each label by its number") from None
        if sorted(by_number) != list(range(len(by_number))):
            numbers = f"has the numbers {sorted(by_number)!r:.80}"
            raise fields.error("id2label", f"{numbers}, must have 0 to {len(by_number) - 1}")
        return tuple(by_number[number] for number in range(len(by_number)))
    return tuple(f"LABEL_{number}" for number in range(fields.integer("num_labels", 2, most=1 << 20)))
