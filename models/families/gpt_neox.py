"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): GPT-2's LayerNorms, MLP and biases with rotary positions of a
part of each head. Attention and MLP stand side by side, unless the file says otherwise. Queries, keys and values are
stored together, head by head.

    x = x + attention(norm(x)) + mlp(norm'(x))
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

from models.base import Architecture
from models.configuration.config import GELU_NAMES, read_attention_bias
from models.configuration.json_fields import Fields
from models.decoder import DecoderConfig, Layer, read_rotated
from models.layer_norm import LayerNormDecoder, LayerNormLayer, PlainMlp
from models.makers.maker import Maker


@dataclass(frozen=True, slots=True, kw_only=True)
class GptNeoxConfig(DecoderConfig):
    is_parallel: bool


class GptNeoxModel(LayerNormDecoder):
    config: GptNeoxConfig
    prefix = "gpt_neox."
    root = "gpt_neox"
    table_name, norm_name, head_name = "embed_in", "final_layer_norm", "embed_out"
    renames = MappingProxyType({"lm_head.": "embed_out."})  # as transformers 5 has it
    harmless = re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")  # masks

    def make_layer(self, index: int, maker: Maker) -> Layer:
        attention = self.attention(index, maker, under="attention", stack="query_key_value", output="dense")
        mlp = PlainMlp(self.config, maker.under("mlp"), up="dense_h_to_4h", down="dense_4h_to_h")
        norms = (self.make_norm(name, maker) for name in ("input_layernorm", "post_attention_layernorm"))
        return LayerNormLayer(attention, mlp, *norms, is_parallel=self.config.is_parallel)


def read_gpt_neox(fields: Fields) -> GptNeoxConfig:
    rope = {
        "default_theta": _own_name(fields, "rotary_emb_base", "rope_theta", 10_000.0),
        "default_partial_rotary_factor": _own_name(fields, "rotary_pct", "partial_rotary_factor", 0.25),
    }
    common = read_rotated(
        fields, rope, default_max_positions=2048, norm_eps_name="layer_norm_eps", default_norm_eps=1e-5,
        activations=GELU_NAMES, default_activation="gelu",
    )  # fmt: skip
    fields.expect("num_key_value_heads", common["num_heads"])
    return GptNeoxConfig(
        **common,
        **read_attention_bias(fields, default=True),
        mlp_bias=True,
        is_parallel=fields.boolean("use_parallel_residual", True),
    )


def _own_name(fields: Fields, name: str, general: str, default: float) -> float:
    """A field by this family's name, beside which some files have the general one."""
    value: float = fields.number(name, default, above=0.0, most=1e12)
    if fields.has(name) and fields.has(general) and fields.raw(general) != value:
        raise fields.error(name, f"is {value:g}, but {general} is {fields.raw(general)!r:.80}")
    return value


ARCHITECTURES = (Architecture("GPTNeoXForCausalLM", "gpt_neox", read_gpt_neox, GptNeoxModel),)
