"""A decode step of one sequence as one launch: a model's addresses, as `numba_kernels.cuda.megakernel` takes them."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from models.decoder import Decoder, GatedMlp, PreNormLayer
from numba_kernels.cuda import megakernel
from runtime.backends.cuda_tensor import id_flag
from runtime.batch import Batch
from runtime.device.gpu import Gpu
from runtime.dtype import float32, int32
from runtime.engine.config import EngineLimits
from runtime.engine.steps.executor import Model
from runtime.engine.steps.pictures import PictureModel
from runtime.errors import InvalidArgumentError
from runtime.kv.cache import KVCache
from runtime.linear.linear import Linear
from runtime.linear.weight import RowWeight
from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor


class Megakernel:
    """The launch of one model over one KV cache, with scratch of its own; for one stream.

    Raises InvalidArgumentError for a model or a device that the kernel is not made for, naming what it has.
    """

    def __init__(self, model: Model, kv_cache: KVCache, limits: EngineLimits) -> None:
        decoder, layers = _checked(model, kv_cache, limits)
        config, first = decoder.config, layers[0]
        self._gpu = gpu = Gpu.of(model.device)
        head_dim, q_heads, kv_heads = config.head_dim, first.attention.num_heads, first.attention.num_kv_heads
        hidden, inner = config.hidden_size, _mlp(first).down_proj.shape[1]
        try:
            self._launch = megakernel.plan(
                hidden=hidden, inner=inner, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim,
                block_size=limits.block_size, vocabulary=config.vocab_size, dtype=decoder.dtype.ptx,
                num_sms=gpu.properties.num_sms, capability=10 * gpu.capability[0] + gpu.capability[1],
            )  # fmt: skip
        except ValueError as error:
            raise _refused(str(error)) from None
        table = np.array([_addresses(layer, kv_cache) for layer in layers], np.int64)
        self._layers = Tensor.from_numpy(table).to(model.device)
        self._counter = Tensor.zeros(1, int32, model.device)
        sizes = megakernel.scratch_floats(hidden, inner, q_heads, kv_heads, head_dim)
        self._scratch = [Tensor.zeros(size, float32, model.device) for size in sizes.values()]
        rope, embedding = first.attention.rope, decoder.embed_tokens
        assert rope is not None, "checked"
        table_address = cast("Tensor | RowWeight", embedding).address
        head_address = _matrix(decoder.lm_head)
        self._held = decoder, rope
        self._weights = rope.cos.address, rope.sin.address, table_address, decoder.norm.address, head_address
        self._numbers = (
            len(layers), hidden, inner, q_heads, kv_heads, config.vocab_size, config.norm_eps,
            first.attention.scale * math.log2(math.e),
        )  # fmt: skip
        self._vocabulary = config.vocab_size

    @property
    def size_bytes(self) -> int:
        """Bytes on the device, for scratch and the table of layers."""
        return sum(each.size_bytes for each in (self._layers, self._counter, *self._scratch))

    def logits(self, batch: Batch) -> Tensor:
        """``[1, vocab_size]`` float32 behind the only token of a batch, whose keys and values go into their pages."""
        assert batch.num_tokens == batch.num_seqs == 1
        result = Tensor.empty((1, self._vocabulary), float32, batch.token_ids.device)
        gpu, counter = self._gpu, self._counter
        inputs = batch.token_ids, batch.positions, batch.seq_lens, batch.slot_mappings[0], batch.block_tables[0]
        gpu.fill(counter.address, 0, counter.size_bytes)
        gpu.launch(
            self._launch, counter.address, self._layers.address, *(each.address for each in inputs), *self._weights,
            *(each.address for each in self._scratch), result.address, id_flag(result.device).address, *self._numbers,
        )  # fmt: skip
        return result


def _addresses(layer: PreNormLayer, kv_cache: KVCache) -> list[int]:
    """In the order of `megakernel.LAYER_ADDRESSES`."""
    attention, mlp = layer.attention, _mlp(layer)
    k_cache, v_cache = kv_cache.layer(attention.index)
    norms = [0 if norm is None else norm.address for norm in (attention.q_norm, attention.k_norm)]
    return [
        _norm(attention.qkv_proj), _matrix(attention.qkv_proj), *norms, k_cache.address, v_cache.address,
        _matrix(attention.o_proj), _norm(mlp.gate_up_proj), _matrix(mlp.gate_up_proj), _matrix(mlp.down_proj),
    ]  # fmt: skip


def _mlp(layer: PreNormLayer) -> GatedMlp:
    assert isinstance(layer.mlp, GatedMlp), "of such a layer"
    return layer.mlp


def _norm(linear: Linear) -> int:
    assert linear.norm is not None, "of such a layer"
    return 0 if linear.weight.is_normed else linear.norm.weight.address


def _matrix(linear: Linear) -> int:
    return cast(RowWeight, linear.weight).address


def _refused(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"decode is 'megakernel': {why}", param="decode")


def _checked(model: Model, kv_cache: KVCache, limits: EngineLimits) -> tuple[Decoder, list[PreNormLayer]]:
    """The model and its layers, all of which the kernel computes as they are."""
    if model.device.kind == "cpu":
        raise _refused("it needs a GPU, real or emulated")
    name = type(model).__name__
    if not isinstance(model, Decoder) or len(kv_cache.spec.group_windows) != 1 or limits.rotary_switch is not None:
        raise _refused(f"{name} is no decoder of Llama's kind whose layers are all alike")
    if isinstance(model, PictureModel):
        raise _refused(f"{name} reads pictures, behind which positions are not places")
    layers = [each for each in model.layers if type(each) is PreNormLayer and isinstance(each.mlp, GatedMlp)]
    unlike = [what for what, is_so in _differences(model, layers) if is_so]
    if unlike:
        raise _refused(f"{name} has {', '.join(unlike)}")
    return model, layers


def _differences(model: Decoder, layers: list[PreNormLayer]) -> list[tuple[str, bool]]:
    """What the kernel does not know, and whether the model has it."""
    maps: list[Any] = [model.lm_head]
    for layer in layers:
        mlp = _mlp(layer)
        maps += (layer.attention.qkv_proj, layer.attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    weights = [each.weight for each in maps]
    ropes = {layer.attention.rope for layer in layers}
    rope = next(iter(ropes), None)
    is_whole = (
        isinstance(rope, RopeTable) and len(ropes) == 1 and not rope.interleaved and rope.q_scales is None
        and 2 * rope.cos.shape[1] == model.config.head_dim
    )  # fmt: skip
    return [
        ("layers of other kinds", len(layers) != len(model.layers)),
        ("weights that are not rows of f32, f16 or bf16", not all(isinstance(each, RowWeight) for each in weights)),
        ("biases", any(getattr(each, "bias", None) is not None for each in weights)),
        ("weights that are split", any(each.communicator is not None for each in maps)),
        ("activations other than SwiGLU", any(_mlp(layer).activation != "silu" for layer in layers)),
        ("rotations other than of whole heads", not is_whole),
        ("windows", any(layer.attention.window is not None for layer in layers)),
        ("caps", any(layer.attention.softcap is not None for layer in layers) or model.logits_softcap is not None),
        ("scales of its own", (model.embedding_scale, model.logits_scale) != (1.0, 1.0)),
        ("several scales of scores", len({layer.attention.scale for layer in layers}) != 1),
    ]
