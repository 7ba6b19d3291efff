"""The interface between the engine and a model: its config, its bytes, the shape of its KV cache, one step forward; and
the description of an architecture that a family's file gives to the registry."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from models.configuration.config import ModelConfig
from models.configuration.json_fields import Fields
from models.head import Stage
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.communicator import begins_here, ends_here
from runtime.device.host_copies import HostCopies
from runtime.dtype import STORED, DType, float32
from runtime.errors import InvalidArgumentError
from runtime.kv.cache import KVCache, KVCacheSpec, LayerCache
from runtime.kv.forms import KeyValues, PageForm, Recurrent
from runtime.kv.kinds import State
from runtime.linear.linear import Linear
from runtime.linear.table_adapters import TableSource
from runtime.pooling import PoolingTask
from runtime.tensor.tensor import Tensor


class Model(ABC):
    """A causal language model. Its constructor runs over a maker, which gives it its weights.

    Attributes:
        prefix: starts the names of all stored tensors but the output head's, in some checkpoints and not in others.
        renames: parts of tensor names as other files spell them (`TensorLayout`), and their names here.
        harmless: stored tensors whose names match are buffers that the model computes (see `harmless_tensors`).
        generates: False for an encoder or a classifier: it has no logits.
        classifier: the stages from a pooled row to the labels' scores; None without a classifying head.
        embedding_stages: those from a pooled row to a vector, which sentence-transformers' folders have.
        max_text_tokens: of the longest text to embed, by such a folder.
        score_token_ids: of a decoder that ranks: a pair's score is the logit of the last of them less that of the
            first, if there are two.
        config: the fields of `config.json`, typed.
        dtype: the type that the matrices are kept in; activations are float32 on cpu, of this type on a GPU.
        quantization: "none", or the format of the linear maps' matrices: "int8", "int4" ... Tables that are
            nothing else are of `dtype` then too, and so is the KV cache.
        kv_dtype: the type that the user asks of the KV cache, or None for that of the weights.
        pending_tokens: the most draft tokens of a step, which pages of recurrent states have room for.
        state_dtype: of recurrent states.
        device: where weights and activations lie.
        weight_bytes: bytes of all weights as they are kept; set by the loader.
        layer_bytes: those of each layer.
        mapped_bytes: of tables that are read a row a token and not loaded: they stay in their files, or in the host's
            memory beside a GPU.
        rounded_activations: of a declared model, how products round rows of x to bytes, by how weights are stored.
        least_first_layers, least_last_layers: layers that the first and the last of several stages have to have.
        carried_columns: of `Batch.carried`, which stages hand on beside the residual stream; 0 if there is none.
        logits_scale, logits_softcap: factor of `compute_logits`' logits, and the bound of its tanh.
        gives_last_rows: whether `forward` gives the rows of last tokens alone where no others are wanted.
        host_copies: on a GPU, of the parts of its files that were uploaded as they are; set by the loader.
        suppressed_ids: ids that are never sampled, int32 on the device; None if there are none.
        addends: the source of the addends of its maps, or None.
        stacks: tensors that a checkpoint may store for several maps together, by name.
        pipeline: the stage of the model that this is, or None if it is whole.
        stages: the numbers of the layers that each stage has; empty if it is whole.
        own_layers: of those that it has.
        max_positions: tokens that a sequence may have, at most `config.max_position_embeddings`.
        longrope_threshold: sequences of more tokens than this have all of them rotated as if at positions greater by
            this number. None if positions are places in the sequence.
    """

    prefix: ClassVar[str]
    harmless: ClassVar[re.Pattern[str]]
    renames: ClassVar[Mapping[str, str]] = MappingProxyType({})
    lm_head: Linear  # [vocab_size, hidden_size]
    generates = True
    classifier: tuple[Stage, ...] | None = None
    embedding_stages: tuple[Stage, ...] = ()
    max_text_tokens: int | None = None
    score_token_ids: tuple[int, ...] = ()
    weight_bytes: int
    mapped_bytes = 0
    layer_bytes: list[int]
    rounded_activations: Mapping[str, str] = MappingProxyType({})
    least_first_layers = least_last_layers = 1
    carried_columns = 0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    gives_last_rows = False
    host_copies: HostCopies | None = None
    suppressed_ids: Tensor | None = None
    longrope_threshold: int | None = None

    def __init__(self, config: ModelConfig, maker: Maker) -> None:
        self.config = config
        self.dtype: DType = maker.dtype
        self.quantization = maker.options.quantization
        self.kv_dtype = maker.options.kv_dtype
        self.kv_skip_layers = maker.options.kv_skip_layers
        self.pending_tokens, self.state_dtype = maker.options.pending_tokens, maker.options.state_dtype
        self.device = maker.options.device
        # A GPU's products scale rows by sums that the previous product left; they are added up as in one piece.
        self._hands_over_squares = maker.options.exact and maker.options.device.kind != "cpu"
        self.addends, self.stacks = maker.options.addends, maker.stacks
        self._tables = self.addends if isinstance(self.addends, TableSource) else None
        self.pipeline, self.stages = maker.options.pipeline, maker.options.stages
        self.own_layers = maker.own_layers(config.num_layers)
        self.max_positions = maker.max_positions
        if self.device.kind != "cpu" and self.kv_dtype in STORED and self.kv_dtype is not self.dtype:
            raise InvalidArgumentError(
                f"kv_cache_dtype is {self.kv_dtype}: on {self.device} it must be auto, int8, fp8 or "
                f"the weights' {self.dtype}",
                param="kv_cache_dtype",
            )

    @classmethod
    def harmless_tensors(cls, config: ModelConfig) -> re.Pattern[str]:
        """Patterns of stored tensors that are skipped: the model computes them, or does without."""
        return cls.harmless

    @classmethod
    def contradiction(cls, config: ModelConfig, names: Collection[str]) -> str:
        """A sentence if the config names other kinds of layers than the stored tensors have; else ""."""
        return ""

    def own_order(self, module: str) -> tuple[NDArray[np.intp] | None, NDArray[np.intp] | None]:
        """The places of the rows, and of the columns, of a map of this model in the map as it was trained. None means
        the same order. A GGUF file may have another one."""
        return None, None

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """One step over all tokens of a ragged batch, to just before the output head.

        Returns `[num_tokens, hidden_size]` in the activations' type, after the final norm; if `batch.is_last_wanted`,
        perhaps the rows of chunks' last tokens alone. Writes the keys and values of the batch's tokens into `kv_cache`,
        each layer by the batch's entry for its group.

        A stage starts from the previous stage's residual stream; it returns its own and sends it on.
        """
        pipeline = self.pipeline
        if begins_here(pipeline):
            x = self.embed(batch)
            batch.carried = self.carry(x, batch)
        else:
            assert pipeline is not None, "a model in one piece begins here"
            x = pipeline.receive((batch.num_tokens, self.config.hidden_size), self.activations)
            if self._hands_over_squares:
                x.deferred_norm = pipeline.receive((batch.num_tokens, self._square_parts), float32)
            if self.carried_columns:
                batch.carried = pipeline.receive((batch.num_tokens, self.carried_columns), self.activations)
        x = self.run_layers(x, batch, kv_cache)
        if ends_here(pipeline):
            return self.finish(x)
        assert pipeline is not None, "a model in one piece ends here"
        pipeline.send(x)
        if self._hands_over_squares:
            pipeline.send(ops.deferred_norm(x, self._square_parts))
        if batch.carried is not None:
            pipeline.send(batch.carried)
        return x

    @property
    def _square_parts(self) -> int:
        """Partial sums of squares that stages exchange per row: as many as any product leaves at most."""
        return -(-self.config.hidden_size // 16) * 4

    @abstractmethod
    def embed(self, batch: Batch) -> Tensor:
        """The residual stream before the first layer, `[num_tokens, hidden_size]`."""

    def carry(self, x: Tensor, batch: Batch) -> Tensor | None:
        """The input of all layers beside the residual stream, `[num_tokens, carried_columns]`, given the embeddings."""
        return None

    @abstractmethod
    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        """The residual stream after this stage's layers."""

    @abstractmethod
    def finish(self, x: Tensor) -> Tensor:
        """The computation between the last layer and the output head."""

    @property
    def activations(self) -> DType:
        """The type of the residual stream."""
        return float32 if self.device.kind == "cpu" else self.dtype

    def compute_logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Rows of `forward`'s result into the scores of every token id.

        `[n, hidden_size]` -> `[n, vocab_size]` float32; `adapters [n]` as in `Batch`.
        """
        return self.lm_head.logits(hidden, scale=self.logits_scale, softcap=self.logits_softcap, adapters=adapters)

    def look_up(self, batch: Batch, table: Any, scale: float = 1.0) -> Tensor:
        """The embeddings of a batch's tokens, times `scale`, with what adapters change of the table."""
        x = ops.embedding(batch.token_ids, table, scale=scale)
        if batch.adapters is None or self._tables is None or self._tables.table is None:
            return x
        return self._tables.table.add_to(x, batch, scale)

    def head(self, task: PoolingTask, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        """The result of a task for a pooled row ``[hidden_size]``, or for each token's: a vector by the modules of
        `embedding_stages`, or the labels' scores by the `classifier`, which the model has."""
        stages = self.embedding_stages
        if task == "classify" and self.score_token_ids:
            (row,) = ops.place([pooled[None]], self.device)
            logits = self.compute_logits(row.to(self.activations)).to("cpu").array[0]
            *others, last = (logits[token_id] for token_id in self.score_token_ids)
            return np.array([last - sum(others)], np.float32)
        if task in ("classify", "token_classify"):
            assert self.classifier is not None, "the task was checked"
            stages = self.classifier
        for stage in stages:
            pooled = stage(pooled)
        return pooled

    def _layer_dtypes(self, dtype: DType) -> tuple[DType, ...]:
        """The type of each layer's pages where some are left out; else none."""
        count, windows = self.config.num_layers, self.config.layer_windows
        skipped: set[int] = set()
        for word in self.kv_skip_layers:
            if word == "sliding_window":
                found = {layer for layer, window in enumerate(windows) if window is not None}
            else:
                found = {int(word)} & set(range(count))
            if not found:
                limit = "no layer has a window" if word == "sliding_window" else f"layers are 0 to {count - 1}"
                raise InvalidArgumentError(
                    f"kv_cache_dtype_skip_layers has {word}: {limit}", param="kv_cache_dtype_skip_layers"
                )
            skipped |= found
        return tuple(self.dtype if layer in skipped else dtype for layer in range(count)) if skipped else ()

    def state_form(self, index: int) -> PageForm | None:
        """The form of a layer's recurrent state, without pending tokens; None for a layer with keys and values."""
        return None

    def source_of(self, index: int) -> int:
        """The layer whose pages a layer uses, mostly its own; asked of layers of all stages."""
        return index

    def has_pages(self, index: int) -> bool:
        """False for a layer that keeps nothing, such as one of an MLP alone; asked of layers of all stages."""
        return True

    def kv_cache_spec(self, block_size: int, dtype: DType | None = None) -> KVCacheSpec:
        """The KV cache in pages of `block_size` tokens; `dtype` None means the user's choice, or else the weights'
        type."""
        spec = KVCacheSpec.uniform(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=block_size,
            dtype=dtype or self.kv_dtype or self.dtype,
            device=self.device,
            layer_windows=self.config.layer_windows,
            layer_dtypes=self._layer_dtypes(dtype or self.kv_dtype or self.dtype),
            latent_values=self.config.latent_values,
            own_layers=None if self.pipeline is None else self.own_layers,
        )
        states = {index: form for index in range(self.config.num_layers) if (form := self.state_form(index))}
        states = {
            index: replace(form, pending=self.pending_tokens, state_dtype=self.state_dtype)
            if isinstance(form, Recurrent)
            else form
            for index, form in states.items()
        }
        if self.state_dtype != float32 and not any(getattr(form, "heads", 0) for form in states.values()):
            raise InvalidArgumentError(
                f"state_dtype is {self.state_dtype}, but no layer of this model keeps a matrix as its state: leave it "
                "at float32",
                param="state_dtype",
            )

        def pages_of(index: int, own: Any) -> LayerCache | int | None:
            config = self.config.of_layer(index)
            if index in states:
                return LayerCache(states[index], State())
            if not self.has_pages(index):
                return None
            if (source := self.source_of(index)) != index:
                return source
            is_alike = config is self.config
            return own if is_alike else own._replace(form=KeyValues(config.num_kv_heads, config.head_dim))  # type: ignore[no-any-return]

        kept = tuple(pages_of(index, own) for index, own in enumerate(spec.layers))
        if kept != spec.layers:
            spec = replace(spec, layers=kept)
        if not self.kv_skip_layers:
            return spec
        layers = tuple(each._replace(dtype=None) if isinstance(each, LayerCache) else each for each in spec.layers)
        plain = replace(spec, dtype=self.dtype, layers=layers)
        num_dtypes = len({spec.of_layer(layer).dtype for layer in spec.layers_with_pages})
        if num_dtypes > 1 and spec.bytes_per_token >= plain.bytes_per_token:
            raise InvalidArgumentError(
                f"kv_cache_dtype_skip_layers is {','.join(self.kv_skip_layers)}: these layers share the pages' memory "
                f"with others, so that a token takes {spec.bytes_per_token} bytes, and {plain.bytes_per_token} with "
                "kv_cache_dtype auto",
                param="kv_cache_dtype_skip_layers",
            )
        return spec


@dataclass(frozen=True, slots=True)
class Architecture:
    """One name that `architectures` in `config.json` may hold.

    Attributes:
        name: such as "LlamaForCausalLM".
        model_type: such as "llama"; a config without `architectures` is known by it.
        read_config: makes the config of the file's fields. It reads every field that the arithmetic depends on;
            a field left unread is refused by name, unless it is harmless (`models.configuration.harmless_fields`).
        model_class: built from the result of `read_config`; `others` are the classes for configs of other types.
        chosen_by: a field of the config that is true for files of this architecture, whatever name they have.
        saved_as: the name that transformers gives it when it saves a model of this `model_type`, if another one.
    """

    name: str
    model_type: str
    read_config: Callable[[Fields], ModelConfig]
    model_class: type[Model]
    saved_as: str = ""
    chosen_by: str = ""
    others: Mapping[type[ModelConfig], type[Model]] = field(default_factory=dict, hash=False)

    def class_of(self, config: ModelConfig) -> type[Model]:
        """The model's class for one of `read_config`'s results."""
        return self.others.get(type(config), self.model_class)
