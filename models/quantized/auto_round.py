"""`quant_method: auto-round`: one config for several packings (https://github.com/intel/auto-round).

    packing_format                        stored as
    auto_round:auto_gptq                  GPTQ's tensors without an order, zeros less 1
    auto_round, auto_round:gptqmodel      GPTQ's, zeros as they are
    auto_round:auto_awq                   AWQ's

Integers have `bits`, `group_size` and `sym`. `extra_config` has other ones for modules by name, by a part of it
or by a pattern; a module of 16 bits is stored in floats. A module that nothing names is as the config says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from models.configuration.json_fields import Fields
from models.quantized.gptq import AwqScheme, GptqModule, GptqScheme
from models.quantized.parts import MatrixParts, ModuleTensors, compiled, refusal

NAMES = ("auto-round", "auto_round", "intel/auto-round")
_FROM_TRAINING = (
    "amp", "autoround_version", "backend", "batch_size", "block_name_to_quantize", "damp_percent", "desc_act",
    "disable_opt_rtn", "enable_alg_ext", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_opt_rtn",
    "enable_quanted_input", "gradient_accumulate_steps", "iters", "lm_head", "low_gpu_mem_usage", "lr", "minmax_lr",
    "model_free", "nblocks", "nsamples", "quant_block_list", "quant_lm_head", "quant_method", "scale_dtype", "seqlen",
    "to_quant_block_names", "transformers_version", "true_sequential",
)  # fmt: skip
_PLAIN_ZEROS = {"auto_gptq": False, "gptq": False, "": True, "gptqmodel": True}
_PATTERN = re.compile(r"[\\^$*+?()\[\]|{}]")


@dataclass(frozen=True, slots=True)
class AutoRoundScheme:
    """See the module.

    Attributes:
        usual: of modules that no name matches.
        exact: the schemes of modules that are named; None for floats.
        others: patterns, or whole parts of names, and the scheme of modules with them.
    """

    usual: GptqScheme | AwqScheme
    exact: Mapping[str, GptqScheme | AwqScheme | None]
    others: tuple[tuple[re.Pattern[str], GptqScheme | AwqScheme | None], ...]

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From `quantization_config`. Raises `ConfigError`."""
        for name in _FROM_TRAINING:
            fields.raw(name)
        packing = fields.string("packing_format", fields.string("backend", "auto_round:auto_gptq"))
        kind = packing.removeprefix("auto_round").removeprefix(":").replace("-", "_")
        if not packing.startswith("auto_round") or kind not in (*_PLAIN_ZEROS, "auto_awq", "awq"):
            raise fields.error(
                "packing_format",
                f"{packing!r:.80} is not supported; supported are auto_round:auto_gptq, auto_round,"
                " auto_round:gptqmodel and auto_round:auto_awq: export the model with one of these, or with format"
                " llm_compressor, auto_gptq, auto_awq or gguf",
            )
        usual = _scheme(fields, kind, None)
        assert usual is not None
        exact: dict[str, GptqScheme | AwqScheme | None] = {}
        others = []
        extra = fields.object("extra_config")
        for name in extra.values():
            pattern = name if _PATTERN.search(name) else rf"(^|\.){re.escape(name)}(\.|$)"
            others.append((compiled(fields, "extra_config", pattern), _scheme(extra.object(name), kind, usual)))
            exact[name] = others[-1][1]
        return cls(usual, exact, tuple(others))

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        said: GptqScheme | AwqScheme | None = self.usual
        if module.name in self.exact:
            said = self.exact[module.name]
        else:
            said = next((said for pattern, said in self.others if pattern.search(module.name)), said)
        if said is None:
            if module.has("qweight"):
                stored = module.take("qweight", ("I32",))
                raise refusal(stored, "is stored, but extra_config says that the module has 16 bits or more")
            return None
        return said.matrix(module)


def _scheme(fields: Fields, kind: str, usual: GptqScheme | AwqScheme | None) -> GptqScheme | AwqScheme | None:
    """The scheme of one description; what it leaves out is as in `usual`. None for floats."""
    bits, size, is_symmetric = 4, 128, True
    if isinstance(usual, GptqScheme):
        bits, size, is_symmetric = usual.usual.bits, usual.usual.group_size or -1, usual.usual.is_symmetric
    elif usual is not None:
        size = usual.group_size or -1
    bits = fields.integer("bits", bits)
    size = fields.integer("group_size", size, least=-1, most=1 << 20)
    is_symmetric = fields.boolean("sym", is_symmetric)
    data_type = fields.string("data_type", "float" if bits >= 16 else "int")
    act_bits = fields.integer("act_bits", 16)
    for name in ("act_data_type", "act_group_size", "act_sym", "act_dynamic", "scheme"):
        fields.raw(name)
    for name in ("rotation_config", "transform_config", "super_bits", "super_group_size"):
        fields.expect(name, {})
    if bits >= 16:
        return None
    if not data_type.startswith("int"):
        raise fields.error("data_type", f"is {data_type!r:.80}, must be 'int': export such a model as llm_compressor")
    if act_bits < 16:
        raise fields.error("act_bits", f"is {act_bits}, must be 16 or more: activations are not rounded")
    if size == 0:
        raise fields.error("group_size", "is 0, must be -1 (all of a row) or more than 0")
    if kind in ("auto_awq", "awq"):
        if bits != 4:
            raise fields.error("bits", f"is {bits}, must be 4 in AWQ's packing")
        return AwqScheme(max(0, size), ())
    if bits not in (2, 3, 4, 8):
        raise fields.error("bits", f"is {bits}, must be 2, 3, 4, 8 or 16")
    return GptqScheme(GptqModule(bits, max(0, size), is_symmetric, False), (), _PLAIN_ZEROS[kind])
