"""The parts of most decoders: attention over rotated heads, the gated MLP, layers by the position of their norms.

    embed(ids) * scale  ->  layers  ->  norm  ->  head * scale, capped

A family's file chooses among them and adds the differences. x is the residual stream, `[num_tokens,
hidden_size]` throughout.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

from models.base import Model
from models.configuration.config import ModelConfig, read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope
from models.errors import ModelLoadError
from models.makers.declaration import Width
from models.makers.maker import Maker
from models.makers.shards import Shard
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.linear.linear import Linear
from runtime.linear.norm import RmsNorm
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

NormKind = Literal["none", "head", "row", "centred", "after"]
Choices = Mapping[str, Any]
NONE: Choices = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A model with rotary positions.

    Attributes:
        layer_ropes: the rotation of each layer's queries and keys, or None for no rotation.
        attention_bias, attention_output_bias, mlp_bias, head_bias: which maps have biases; the first is of query, key
            and value.
    """

    layer_ropes: tuple[RopeConfig | None, ...]
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False


def read_rotated(fields: Fields, rope: Choices = NONE, **defaults: Any) -> dict[str, Any]:
    """The fields of `DecoderConfig` without biases, all layers rotated alike, as keyword arguments: `defaults` are
    `read_common`'s, `rope` has `parse_rope`'s."""
    common = read_common(fields, **defaults)
    rotation = parse_rope(fields, common["head_dim"], common["max_position_embeddings"], **rope)
    return {**common, "layer_ropes": (rotation,) * common["num_layers"]}


class Layer(Protocol):
    """One layer of the stack: the residual stream in, the residual stream out."""

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor: ...


class Mixer(Protocol):
    """The part of a layer that lets tokens see earlier ones: `[num_tokens, hidden_size]` in and out, plus the
    residual."""

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, *, residual: Tensor | None = None) -> Tensor: ...


class FeedForward(Protocol):
    """The part of a layer after its attention: `[num_tokens, hidden_size]` in and out, plus the residual."""

    def __call__(self, x: Tensor, batch: Batch, *, residual: Tensor | None = None) -> Tensor: ...


class Decoder(Model):
    """A decoder; the family makes its layers.

    Attributes:
        norm_offset: added to the weights of norms; 1 where they are stored less 1.
        embedding_scale: the factor of token embeddings.
        root: begins the names of all its tensors but the head's.
        table_name, norm_name, head_name: of the token table and the last norm, under the root, and of the head.
    """

    prefix = "model."
    root = "model"
    harmless = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
    config: DecoderConfig
    table_name, norm_name, head_name = "embed_tokens", "norm", "lm_head"
    norm_offset = 0.0
    embedding_scale = 1.0

    def __init__(self, config: DecoderConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.embed_tokens, self.lm_head = maker.embedding(
            f"{self.root}.{self.table_name}",
            head=self.head_name,
            rows=config.vocab_size,
            columns=config.hidden_size,
            is_tied=config.tie_word_embeddings,
            has_bias=config.head_bias,
        )
        self._ropes = {rope: maker.rope(rope) for rope in set(config.layer_ropes) if rope is not None}
        switches = {rope.switch(self.max_positions) for rope in self._ropes}
        assert len(switches) < 2, "layers that are rotated by tables of different rows"
        self.longrope_threshold = next(iter(switches), None)
        self.layers = maker.layers(f"{self.root}.layers", config.num_layers, self.make_layer)
        if maker.is_last:
            self.make_final_norm(maker)

    def make_final_norm(self, maker: Maker) -> None:
        """The norm that `finish` applies."""
        self.norm = maker.vector(f"{self.root}.{self.norm_name}.weight", self.config.hidden_size, add=self.norm_offset)

    @abstractmethod
    def make_layer(self, index: int, maker: Maker) -> Layer:
        """Layer `index`, from the checkpoint's tensors under its name."""

    def rope_of(self, index: int) -> RopeTable | None:
        """The rotations of a layer; None if it has none."""
        rope = self.config.layer_ropes[index]
        return None if rope is None else self._ropes[rope]

    def embed(self, batch: Batch) -> Tensor:
        x = self.look_up(batch, self.embed_tokens, self.embedding_scale)
        batch.keep(0, x)
        return x

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        for number, layer in enumerate(self.layers, self.own_layers.start + 1):
            x = layer(x, batch, kv_cache)
            batch.keep(number, x)
        return x

    def finish(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.norm, self.config.norm_eps)

    def attention(
        self, index: int, maker: Maker, *, under: str = "self_attn", input_norm: str = "", **choices: Any
    ) -> Attention:
        """The attention of a layer, from the tensors under that name, after the norm of that name; `choices` are
        `Attention`'s."""
        norm = self.input_norm(maker, input_norm)
        config = self.config.of_layer(index)
        return Attention(config, index, maker.under(under), self.rope_of(index), input_norm=norm, **choices)

    def mixer(self, index: int, maker: Maker, *, input_norm: str = "", **choices: Any) -> Mixer:
        """The part before a layer's MLP: attention, unless a family has something else there."""
        return self.attention(index, maker, input_norm=input_norm, **choices)

    def mlp(self, maker: Maker, *, under: str = "mlp", input_norm: str = "", **choices: Any) -> GatedMlp:
        """The MLP of a layer, from the tensors under that name, after the norm of that name; `choices` are
        `GatedMlp`'s."""
        norm = self.input_norm(maker, input_norm)
        return GatedMlp(self.config, maker.under(under), input_norm=norm, **choices)

    def feed_forward(self, index: int, maker: Maker, *, input_norm: str = "", **choices: Any) -> FeedForward:
        """The part after a layer's attention: the MLP, unless a family has experts there."""
        return self.mlp(maker, input_norm=input_norm, **choices)

    def input_norm(self, maker: Maker, name: str) -> RmsNorm | None:
        """The norm of that name before a part of a layer; "" for none."""
        if not name:
            return None
        return maker.rms_norm(f"{name}.weight", self.config.hidden_size, self.config.norm_eps, add=self.norm_offset)


class Attention:
    """Causal grouped-query attention between its projections, after a norm if it has one."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        maker: Maker,
        rope: RopeTable | None,
        *,
        qkv: str | tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        stack: str = "",
        output: str = "o_proj",
        inputs: int | None = None,
        input_norm: RmsNorm | None = None,
        norm: NormKind = "none",
        norms: tuple[str, str] = ("q_norm", "k_norm"),
        norm_offset: float = 0.0,
        softcap: float | None = None,
        has_sinks: bool = False,
        clip: float | None = None,
        has_gate: bool = False,
        values: ops.Values = "own",
        has_pages: bool = True,
    ) -> None:
        """`qkv` names the projections, or the one of all three, of so many `inputs` (`hidden_size` by default). They
        may be stored as one, `stack`, in which each head of keys stands between its queries and its values. `norm`:
        queries and keys are normalised by head, all heads together, by a LayerNorm of each head ("centred"), or by head
        when they are rotated; `norms` names the weights. `softcap` bounds scores. With `has_sinks` each head has one
        more logit, `sinks`. Queries, keys and values are kept within `clip`. With `has_gate` the projection of queries
        also has a gate of each head, rows after the head's queries: results are multiplied by its sigmoid
        (https://arxiv.org/abs/2505.06708). `values` may be made of keys (`ops.qkv_prepare`). Without `has_pages`, `qkv`
        and `norms` are those of queries alone, and keys and values another layer's."""
        hidden, head_dim = config.hidden_size, config.head_dim
        q_heads, kv_heads = config.shard("num_heads"), config.shard("num_kv_heads")
        q_size, kv_size = q_heads.times(head_dim), kv_heads.times(head_dim)
        self.index, self.rope, self.softcap = index, rope, softcap
        self.num_heads, self.head_dim, self.values = config.num_heads, head_dim, values
        self.num_kv_heads = config.num_kv_heads if has_pages else 0
        self.window, self.scale = config.layer_windows[index], config.attention_scales[index]
        self.norm_eps, self.clip = config.norm_eps, clip
        if stack:
            maker.note_head_stack(stack, qkv, q_heads, kv_heads, head_dim, hidden, has_bias=config.attention_bias)
        self.gate_proj: Linear | None = None
        if has_gate:
            assert not isinstance(qkv, str), "the gate stands beside queries alone"
            queries, *others = qkv
            parts, sizes = (f"{queries}.query", f"{queries}.gate"), (head_dim, head_dim)
            maker.note_row_stack(queries, parts, sizes, hidden, groups=q_heads.whole, has_bias=config.attention_bias)
            qkv = (parts[0], *others)
            self.gate_proj = maker.linear(
                parts[1],
                outputs=q_size,
                inputs=hidden,
                has_bias=config.attention_bias,
                split="outputs",
                norm=input_norm,
            )
        elif not isinstance(qkv, str) and has_pages and values == "own":
            rows = (q_size.whole, kv_size.whole, kv_size.whole)
            maker.note_row_stack(
                "qkv_proj", qkv, rows, inputs or hidden, has_bias=config.attention_bias, is_usual=False
            )
        outputs = (q_size, kv_size, kv_size)[: 1 if not has_pages else 2 if values == "keys" else 3]
        self.qkv_proj = maker.linear(
            qkv if isinstance(qkv, str) else qkv[: len(outputs)], outputs=outputs, inputs=inputs or hidden,
            has_bias=config.attention_bias, split="outputs", norm=input_norm,
        )  # fmt: skip
        self.q_norm: Tensor | None = None
        self.k_norm: Tensor | None = None
        self.sinks = maker.vector("sinks", q_heads) if has_sinks else None
        self.shared_norm: SharedRowNorm | None = None
        if norm == "row" and maker.options.communicator is not None:
            self.shared_norm = SharedRowNorm(maker, q_size, kv_size, config.norm_eps, norm_offset)
        elif norm != "none":
            widths: tuple[Width, Width] = (head_dim, head_dim) if norm in ("head", "after") else (q_size, kv_size)
            stored = (q_heads.whole, head_dim), (kv_heads.whole, head_dim)
            self.q_norm, self.k_norm = (
                maker.vector(f"{name}.weight", width, add=norm_offset, stored=shape if norm == "centred" else None)
                if has_pages or name == norms[0]
                else None
                for name, width, shape in zip(norms, widths, stored, strict=True)
            )
        self.norm_kind: ops.QkNorm = norm if norm in ("centred", "after") else "before"
        self.o_proj = maker.linear(
            output, outputs=hidden, inputs=q_size, has_bias=config.attention_output_bias, split="inputs"
        )

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, *, residual: Tensor | None = None) -> Tensor:
        attended = ops.qkv_attention(
            self._projected(x, batch), batch, kv_cache.group_of(self.index), **self._heads(batch, kv_cache),
            scale=self.scale, window=self.window, sinks=self.sinks, softcap=self.softcap,
        )  # fmt: skip
        return self._output(attended, x, batch, residual)

    def of_last_tokens(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> tuple[Tensor, Batch]:
        """``x + attention(x)`` in the rows of chunks' last tokens, and their batch. Keys and values of all tokens go
        into their pages."""
        assert batch.last_tokens is not None, "a step has them"
        q, last = self.prepare(x, batch, kv_cache), batch.of_last_tokens()
        q = ops.gather_rows(q.reshape(x.shape[0], -1), batch.last_tokens).reshape(-1, *q.shape[1:])
        x = ops.gather_rows(x, batch.last_tokens)
        k_cache, v_cache, *scales = kv_cache.layer(self.index)
        attended = ops.attention(
            q, k_cache, v_cache, last, kv_cache.group_of(self.index), scale=self.scale, window=self.window,
            sinks=self.sinks, softcap=self.softcap, scales=scales,
        )  # fmt: skip
        return self._output(attended, x, last, x), last

    def _output(self, attended: Tensor, x: Tensor, batch: Batch, residual: Tensor | None) -> Tensor:
        if self.gate_proj is not None:
            attended = ops.sigmoid_gate(attended, self.gate_proj(x, batch))
        return self.o_proj(attended, batch, residual=residual)

    def prepare(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        """The queries of `x`, `[num_tokens, num_heads, head_dim]`; keys and values go into their pages."""
        slots = batch.slot_mappings[kv_cache.group_of(self.index)]
        return ops.qkv_prepare(
            self._projected(x, batch), batch.positions, slot_mapping=slots, **self._heads(batch, kv_cache)
        )

    def _projected(self, x: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv_proj(x, batch)
        if self.shared_norm is not None:
            self.shared_norm(qkv)
        if self.clip is not None:
            ops.clamp(qkv, self.clip, out=qkv)
        return qkv

    def _heads(self, batch: Batch, kv_cache: KVCache) -> dict[str, Any]:
        """The arguments of `ops.qkv_prepare` and `ops.qkv_attention` for the layer's heads."""
        k_cache, v_cache, *scales = kv_cache.layer(self.index)
        return {
            "num_q_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim,
            "rope": self.rope if batch.rope is None else batch.rope, "q_norm": self.q_norm, "k_norm": self.k_norm,
            "norm_eps": self.norm_eps, "norm_kind": self.norm_kind, "values": self.values, "k_cache": k_cache,
            "v_cache": v_cache, "scales": scales,
        }  # fmt: skip


class SharedRowNorm:
    """Norms over all heads of queries, and of keys, of which each rank has some: they are gathered first."""

    def __init__(self, maker: Maker, q_size: Shard, kv_size: Shard, eps: float, offset: float) -> None:
        options = maker.options
        if options.exact or kv_size.whole != kv_size.count * options.num_ranks:
            why = "exact" if options.exact else f"{kv_size.whole} columns of keys"
            raise ModelLoadError(
                f"norms over all heads of queries and keys: {why} cannot be split over {options.num_ranks} ranks"
            )
        assert options.communicator is not None, "there are several ranks"
        self.communicator, self.eps = options.communicator, eps
        self.parts = [
            (shard, maker.vector(f"{name}.weight", shard.whole, add=offset))
            for name, shard in (("q_norm", q_size), ("k_norm", kv_size))
        ]

    def __call__(self, qkv: Tensor) -> None:
        """Normalises this rank's queries and keys in ``qkv [num_tokens, ...]``, where they lie."""
        first = 0
        for shard, weight in self.parts:
            mine = qkv[:, first : first + shard.count]
            whole = self.communicator.all_gather_columns(mine.contiguous(), shard.count, shard.whole)
            mine[:] = ops.rms_norm(whole, weight, self.eps)[:, shard.first : shard.first + shard.count]
            first += shard.count


class GatedMlp:
    """`down(f(gate(x)) * up(x))`, after a norm if it has one."""

    def __init__(
        self,
        config: DecoderConfig,
        maker: Maker,
        *,
        gate_up: str | tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        input_norm: RmsNorm | None = None,
        activation: ops.GluActivation = "silu",
        width: str = "intermediate_size",
    ) -> None:
        """`gate_up` names the maps, or the one of both, gate first; `width` the config's field for their outputs."""
        hidden, inner, has_bias = config.hidden_size, config.shard(width), config.mlp_bias
        self.activation: ops.GluActivation = activation
        self.gate_up_proj = maker.linear(
            gate_up, outputs=(inner, inner), inputs=hidden, has_bias=has_bias, split="outputs", norm=input_norm
        )
        self.down_proj = maker.linear(down, outputs=hidden, inputs=inner, has_bias=has_bias, split="inputs")
        self.is_in_place = maker.options.device.kind == "cpu" and self.down_proj.communicator is None

    def __call__(
        self, x: Tensor, batch: Batch, *, residual: Tensor | None = None, takes_residual: bool = False
    ) -> Tensor:  # fmt: skip
        """With `takes_residual` the result may lie in the residual's memory, which nothing else reads any more."""
        out = residual if takes_residual and self.is_in_place else None
        return self.down_proj(self.gate_up_proj.glu(x, self.activation, batch), batch, residual=residual, out=out)


class PreNormLayer:
    """`x = x + attention(norm(x));  x = x + mlp(norm(x))`, as in Llama.

    On a CPU the last layer computes queries' attention and the MLP of last tokens alone, where no other rows are
    wanted. A GPU's product scales rows by squares that the one before it left, beside all rows.
    """

    def __init__(
        self, model: Decoder, index: int, maker: Maker, *, attention: Choices = NONE, mlp: Choices = NONE,
        norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    ) -> None:  # fmt: skip
        """`attention` and `mlp` are choices of these parts; the `norms` come before them."""
        self.attention = model.mixer(index, maker, input_norm=norms[0], **attention)
        self.mlp = model.feed_forward(index, maker, input_norm=norms[1], **mlp)
        self.index = index
        self.gives_last_rows = index + 1 == model.config.num_layers and model.device.kind == "cpu"
        model.gives_last_rows |= self.gives_last_rows

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        if self.wants_last(batch) and isinstance(self.attention, Attention):
            x, batch = self.attention.of_last_tokens(x, batch, kv_cache)
        else:
            x, batch = self.wanted(self.attention(x, batch, kv_cache, residual=x), batch)
        if isinstance(self.mlp, GatedMlp):
            return self.mlp(x, batch, residual=x, takes_residual=True)
        return self.mlp(x, batch, residual=x)

    def wants_last(self, batch: Batch) -> bool:
        """Whether no rows but those of last tokens are wanted after this layer."""
        return self.gives_last_rows and batch.is_last_wanted and not batch.has_rows_after(self.index)

    def wanted(self, x: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """The rows that the MLP computes, given those after the attention."""
        if not self.wants_last(batch):
            return x, batch
        assert batch.last_tokens is not None, "a step has them"
        return ops.gather_rows(x, batch.last_tokens), batch.of_last_tokens()


class SandwichLayer:
    """`x = x + norm(attention(norm(x)));  x = x + norm(mlp(norm(x)))`, as in Gemma 2."""

    def __init__(
        self,
        config: DecoderConfig,
        maker: Maker,
        attention: Attention,
        mlp: GatedMlp,
        *,
        norms: tuple[str, str, str, str],
        norm_offset: float = 0.0,
    ) -> None:
        """`norms` names those before and after attention, before and after the MLP."""
        self.attention, self.mlp, self.eps = attention, mlp, config.norm_eps
        self.before_attention, self.behind_attention, self.before_mlp, self.behind_mlp = (
            maker.vector(f"{name}.weight", config.hidden_size, add=norm_offset) for name in norms
        )

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        attended = self.attention(ops.rms_norm(x, self.before_attention, self.eps), batch, kv_cache)
        x = ops.rms_norm(attended, self.behind_attention, self.eps, residual=x)
        hidden = self.mlp(ops.rms_norm(x, self.before_mlp, self.eps), batch)
        return ops.rms_norm(hidden, self.behind_mlp, self.eps, residual=x)
