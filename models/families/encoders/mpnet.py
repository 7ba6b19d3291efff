"""MPNet (Song et al. 2020, https://arxiv.org/abs/2004.09297): RoBERTa whose scores of attention get a bias by the
distance of key and query, one for all layers.

    bias[head, key - query] = table[bucket(key - query), head]

Half of the buckets are for later keys; in each half the first are single distances, the others wider and wider ones.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.configuration.json_fields import Fields
from models.errors import ModelLoadError
from models.families.encoders.bert import BertConfig, BertModel, LabelHead, architectures, read_bert
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor

BUCKETS, LONGEST = 32, 128
"""Buckets, as the code has it whatever the config says, and the distance from which on all share the last one."""


class MPNetModel(BertModel):
    prefix = "mpnet."
    root = "mpnet"
    renames = MappingProxyType({
        ".attention.LayerNorm.": ".attention.output.LayerNorm.", ".attention.attn.q.": ".attention.self.query.",
        ".attention.attn.k.": ".attention.self.key.", ".attention.attn.v.": ".attention.self.value.",
        ".attention.attn.o.": ".attention.output.dense.",
    })  # fmt: skip

    def __init__(self, config: BertConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        if self.device.kind != "cpu":
            raise ModelLoadError(f"MPNet runs on the cpu alone: {self.device} has no attention with a position bias")
        heads = config.shard("num_heads")
        self.biases = maker.under("mpnet.encoder").table("relative_attention_bias.weight", BUCKETS, heads)
        reach = self.max_positions + ops.BIAS_MARGIN
        self.buckets = Tensor.from_numpy(buckets_of(np.arange(-reach, reach)))

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        batch.position_bias = ops.embedding(self.buckets, self.biases)
        return super().run_layers(x, batch, kv_cache)


def buckets_of(distances: NDArray[Any]) -> NDArray[np.int32]:
    """The bucket of each distance, key minus query."""
    half, single = BUCKETS // 2, BUCKETS // 4
    far = np.abs(distances)
    wide = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(single)) / np.float32(math.log(LONGEST / single))
    steps = np.minimum(single + (wide * np.float32(half - single)).astype(np.int64), half - 1)
    found: NDArray[np.int32] = (np.where(distances > 0, half, 0) + np.where(far < single, far, steps)).astype(np.int32)
    return found


def _read(fields: Fields, label_head: LabelHead) -> BertConfig:
    fields.expect("relative_attention_num_buckets", BUCKETS)
    return read_bert(fields, label_head, 1e-12, has_types=False, first_position=2)


ARCHITECTURES = architectures(
    "mpnet", _read, MPNetModel, "dense", "MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification",
    "MPNetForTokenClassification", "MPNetForQuestionAnswering",
)  # fmt: skip
