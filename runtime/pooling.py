"""How the hidden states of a prompt's tokens become one vector, and what a folder says of it: plain data.

The names of modules and fields are sentence-transformers' (https://sbert.net/docs/package_reference/sentence_transformer/models.html).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Pooling = Literal["cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len"]
"""The first token's hidden state, the last token's, the mean of all, the largest number of each column, the mean with
weights 1, 2, 3 ..., or the sum over the square root of the number of tokens; after the final norm."""

POOLINGS: tuple[Pooling, ...] = ("cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len")


def poolings_of(name: str) -> tuple[str, ...]:
    """The poolings of a name such as "cls+mean", whose rows are concatenated."""
    return tuple(name.split("+"))


PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""The result for a pooled row: a vector, or the labels' scores before an activation; or those of each token's row."""

POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify")

SPAN_LABELS = ("start", "end")
"""The labels of a model that answers questions: whether the answer starts, or ends, with a token."""

ScoreActivation = Literal["sigmoid", "softmax", "identity"]


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a model embeds and scores by default.

    generates       the model also generates text, as a decoder with an output head
    pooling         of hidden states, for a vector, or several ("cls+mean"); head_pooling: for the classifier
    normalize       whether a vector's length becomes one
    size            numbers of a vector
    prompts         texts that stand before an input, by name, such as "query"
    default_prompt  the name of the one that is used if a request names none; "" for none
    pools_prompt    whether a prompt's tokens are pooled like the text's
    labels          names of the classifier's labels; none for a model that does not classify
    token_labels    names of the labels of each token; none for a model that has no classifier of tokens
    activation      of the labels' scores
    reads_types     whether the model tells the second of two texts by its tokens' types
    pair_template   the text of a pair in three parts, the second with {query} and {document}, which are encoded one
                    by one; none for the tokenizer's own way
    pair_chat       arguments of the chat template, which makes a pair's prompt of messages whose roles are "query" and
                    "document"; None for the above
    """

    generates: bool = True
    pooling: str = "last"
    head_pooling: Pooling = "last"
    normalize: bool = True
    size: int = 0
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    pools_prompt: bool = True
    labels: tuple[str, ...] = ()
    token_labels: tuple[str, ...] = ()
    activation: ScoreActivation = "identity"
    reads_types: bool = False
    pair_template: tuple[str, ...] = ()
    pair_chat: dict[str, Any] | None = None

    @property
    def scores_pairs(self) -> bool:
        """Whether the one label's score is the relevance of a document to a query."""
        return len(self.labels) == 1

    @property
    def why_no_classes(self) -> str:
        """The reason why a model has no labels of texts."""
        return "it labels tokens (task token_classify), not texts" if self.token_labels else "it has no classifier"

    def why_not(self, task: PoolingTask) -> str:
        """The reason why a model cannot do a task; "" if it can."""
        if task == "classify" and not self.labels:
            return self.why_no_classes
        if task == "token_classify" and not self.token_labels:
            return "its classifier labels texts, not tokens" if self.labels else "it has no classifier"
        return ""

    @property
    def why_no_scores(self) -> str:
        """The reason why a model cannot rank, and the kinds of models that can."""
        has = f"its classifier has {len(self.labels)} labels" if self.labels else self.why_no_classes
        return (
            f"{has}, and a score needs one label. Rerankers can: cross-encoders (...ForSequenceClassification with one"
            " label, such as BAAI/bge-reranker-v2-m3) and Qwen3-Reranker"
        )


def activated(scores: NDArray[np.float32], activation: ScoreActivation) -> NDArray[np.float32]:
    """The labels' probabilities, or whatever the activation makes of ``scores [num_labels]``, or of rows of them."""
    x: NDArray[Any] = scores.astype(np.float64)
    if activation == "sigmoid":
        x = 1.0 / (1.0 + np.exp(-x))
    elif activation == "softmax":
        x = np.exp(x - x.max(axis=-1, keepdims=True))
        x /= x.sum(axis=-1, keepdims=True)
    return x.astype(np.float32)


def normalized(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """The vector, or each of several rows, at length one; a zero vector stays."""
    if vector.ndim == 2:
        return np.stack([normalized(row) for row in vector])
    wide = vector.astype(np.float64)
    length = math.sqrt(wide @ wide)
    return np.asarray(vector / length if length > 0 else vector, np.float32)
