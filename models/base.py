"""What the engine knows of a model: its config, its bytes, the shape of its KV cache, one step forward."""

from __future__ import annotations

from abc import ABC, abstractmethod

from models.checkpoint import TensorLayout
from models.config import ModelConfig
from models.weights import Weights
from runtime import ops
from runtime.batch import Batch
from runtime.device.device import Device
from runtime.dtype import DType
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.ops import LinearWeight
from runtime.tensor.tensor import Tensor


class Model(ABC):
    """A causal language model with its weights loaded.

    Attributes:
        config: what `config.json` says.
        dtype: the type that the matrices are kept in; activations are float32 on cpu, of this type on a GPU.
        quantization: "none", or what the matrices of linear maps were made into: "int8". Tables that are
            nothing else, and the KV cache, are of `dtype` then too.
        device: where weights and activations lie.
        weight_bytes: bytes of all weights as they are kept.
        max_positions: tokens that a sequence may have, at most `config.max_position_embeddings`.
    """

    lm_head: LinearWeight  # [vocab_size, hidden_size]

    def __init__(self, config: ModelConfig, weights: Weights, device: Device, max_positions: int) -> None:
        self.config = config
        self.dtype: DType = weights.dtype
        self.quantization = weights.quantization
        self.device = device
        self.max_positions = max_positions
        self._build(weights)
        self.weight_bytes = weights.size_bytes

    @classmethod
    @abstractmethod
    def tensor_layout(cls, config: ModelConfig) -> TensorLayout:
        """The tensors that a checkpoint of this config must store."""

    @abstractmethod
    def _build(self, weights: Weights) -> None:
        """Take every tensor of the layout."""

    @abstractmethod
    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """One step over all tokens of a ragged batch, to just before the output head.

        Returns `[num_tokens, hidden_size]` in the activations' type, after the final norm. Writes the keys
        and values of the batch's tokens into `kv_cache` (group 0).
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result into the scores of every token id.

        `[n, hidden_size]` -> `[n, vocab_size]` float32.
        """
        return ops.logits_linear(hidden, self.lm_head)

    def kv_cache_spec(self, block_size: int, dtype: DType | None = None) -> KVCacheSpec:
        """The KV cache in pages of `block_size` tokens; `dtype` None means the type of the weights."""
        return KVCacheSpec(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=block_size,
            dtype=dtype or self.dtype,
            device=self.device,
        )
