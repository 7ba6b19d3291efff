"""Decoders with a classifier instead of an output head, `score.weight [labels, hidden_size]`: transformers'
`...ForSequenceClassification`, which reads the last token's hidden state, and `...ForTokenClassification` and
`...ForQuestionAnswering`, which read each token's and have a bias, too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

from models.base import Architecture, Model
from models.configuration.config import ModelConfig
from models.configuration.json_fields import Fields
from models.head import Dense
from models.makers.maker import Maker
from runtime.pooling import SPAN_LABELS

CAUSAL, CLASSIFYING, OF_TOKENS = "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"
OF_SPANS = "ForQuestionAnswering"
_PREFIX_OF_SPANS = "transformer."
"""The beginning of such a model's tensor names, for most decoders."""
HEADS = (CLASSIFYING, OF_TOKENS, OF_SPANS)
"""The ends of classifiers' names."""
_OLDER = (f"GPT2{OF_TOKENS}", f"GPTNeoX{OF_TOKENS}")
"""Those whose map is named "classifier"."""


class Classifier(Model):
    """Stands before a decoder's class, whose token table is its head, so that no other is stored."""

    generates = False
    label_map: ClassVar[str] = "score"

    def __init__(self, config: ModelConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        head = maker.under(self.label_map)
        self.classifier = (Dense.of(head, len(config.labels), config.hidden_size, has_bias=config.labels_tokens),)


def base_of(name: str) -> str:
    """The name of the decoder that a classifier is made of. Gemma 3's classifier has "Text" in its name, its decoder
    not."""
    name = name.replace(OF_TOKENS, CLASSIFYING).replace(OF_SPANS, CLASSIFYING)
    if name == f"GPT2{CLASSIFYING}":
        return "GPT2LMHeadModel"
    return name.replace(f"Text{CLASSIFYING}", CLASSIFYING).replace(CLASSIFYING, CAUSAL)


@cache
def classifier_of(base: Architecture, name: str) -> Architecture:
    """The architecture of a decoder's classifier, by its name."""
    own: dict[str, Any] = {"label_map": "classifier"} if name in _OLDER else {}
    if name.endswith(OF_SPANS):
        own = {"label_map": "qa_outputs"}
        if (prefix := base.model_class.prefix) != _PREFIX_OF_SPANS:
            own["renames"] = {_PREFIX_OF_SPANS: prefix, **base.model_class.renames}
    kind: Any = type(f"{base.model_class.__name__}Classifier", (Classifier, base.model_class), own)
    return Architecture(name, base.model_type, partial(_read, base, name), kind)


def _read(base: Architecture, name: str, fields: Fields) -> ModelConfig:
    return replace(
        base.read_config(fields), tie_word_embeddings=True,
        labels=SPAN_LABELS if name.endswith(OF_SPANS) else read_labels(fields),
        labels_tokens=name.endswith((OF_TOKENS, OF_SPANS)),
    )  # fmt: skip


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
