"""`quant_method: auto-round`: one config for several packings (https://github.com/intel/auto-round).

    data_type        bits      stored as
    int              2 to 8    by `packing_format`: auto_round:auto_gptq GPTQ's tensors without an order, zeros less 1;
                               auto_round, auto_round:gptqmodel the same, zeros as they are; auto_round:auto_awq AWQ's
    fp               8         compressed-tensors' float-quantized; by blocks as `quant_method: fp8`
    mx_fp            4, 8      compressed-tensors' mxfp4-pack-quantized, mxfp8-quantized
    nv_fp            4         compressed-tensors' nvfp4-pack-quantized
    nvfp4_v2         4         compressed-tensors' nvfp4-e5m3-pack-quantized
    mx_int           4         X.weight_packed uint8 [N, K / 2]: magnitudes in quarters with a sign above them,
                               X.weight_scale: exponents

Modules have `bits`, `group_size`, `sym`, `data_type` and the same of activations. `extra_config` has other ones for
modules by name, by a part of it or by a pattern; a module of 16 bits is stored in floats, as all are where
`packing_format` is auto_round:fake. A module that nothing names is as the config says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from models.configuration.json_fields import Fields
from models.quantized.compressed_tensors import FORMS, Form, Group, Numbers, matrix_in_form
from models.quantized.fp8 import Fp8Scheme
from models.quantized.gptq import AwqScheme, GptqModule, GptqScheme
from models.quantized.parts import Array, MatrixParts, ModuleTensors, UnconvertedModules, compiled, refusal
from runtime.linear.quantized import ActivationScheme, NumberKind, pack_halves, unpack_halves

NAMES = ("auto-round", "auto_round", "intel/auto-round")
_FROM_TRAINING = (
    "activation_scheme", "amp", "autoround_version", "backend", "batch_size", "block_name_to_quantize", "damp_percent",
    "desc_act", "disable_opt_rtn", "enable_alg_ext", "enable_minmax_tuning", "enable_norm_bias_tuning",
    "enable_opt_rtn", "enable_quanted_input", "gradient_accumulate_steps", "ignored_layers", "iters", "lm_head",
    "low_gpu_mem_usage", "lr", "minmax_lr", "model_free", "nblocks", "nsamples", "quant_block_list", "quant_lm_head",
    "quant_method", "regex_config", "scale_dtype", "seqlen", "to_quant_block_names", "transformers_version",
    "true_sequential", "weight_block_size",
)  # fmt: skip
_PLAIN_ZEROS = {"auto_gptq": False, "gptq": False, "": True, "gptqmodel": True}
_FLOAT_PACKINGS = ("fp8", "fp8_static", "llm_compressor", "llm_compressor_nvfp4_e5m3", "fake")
_PATTERN = re.compile(r"[\\^$*+?()\[\]|{}]")


class _ModuleScheme(Protocol):
    def matrix(self, module: ModuleTensors) -> MatrixParts | None: ...


@dataclass(frozen=True, slots=True)
class Module:
    """The config's description of a module: `size` is its `group_size`, or rows by elements."""

    bits: int
    size: int | tuple[int, int]
    is_symmetric: bool
    data_type: str
    act_bits: int
    act_type: str
    act_size: int
    is_act_dynamic: bool


_USUAL = Module(4, 128, True, "int", 16, "", 0, True)


@dataclass(frozen=True, slots=True)
class InForm:
    """A module in a form of compressed-tensors."""

    group: Group
    form: Form

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        """See `models.quantized.scheme.QuantizationScheme`."""
        is_packed = self.form.part == "weight_packed"
        is_stored = module.has("weight_packed") if is_packed else module.type_of("weight").startswith("F8_")
        return matrix_in_form(module, self.group, self.form) if is_stored else None


@dataclass(frozen=True, slots=True)
class AutoRoundScheme:
    """See the module.

    Attributes:
        usual: of modules that no name matches.
        exact: the schemes of modules that are named; None for floats.
        others: patterns, or whole parts of names, and the scheme of modules with them.
    """

    usual: _ModuleScheme | None
    exact: Mapping[str, _ModuleScheme | None]
    others: tuple[tuple[re.Pattern[str], _ModuleScheme | None], ...]

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From `quantization_config`. Raises `ConfigError`."""
        for name in _FROM_TRAINING:
            fields.raw(name)
        fields.expect("fmt", "e4m3")
        packing = fields.string("packing_format", fields.string("backend", "auto_round:auto_gptq"))
        kind = packing.removeprefix("auto_round").removeprefix(":").replace("-", "_")
        kinds = (*_PLAIN_ZEROS, "auto_awq", "awq", *_FLOAT_PACKINGS)
        if not packing.startswith("auto_round") or kind not in kinds:
            known = ", ".join(f"auto_round:{each}" if each else "auto_round" for each in kinds)
            raise fields.error("packing_format", f"{packing!r:.80} is not supported; supported are {known}")
        described = _module(fields, _USUAL)
        exact: dict[str, _ModuleScheme | None] = {}
        others = []
        extra = fields.object("extra_config")
        for name in extra.values():
            pattern = name if _PATTERN.search(name) else rf"(^|\.){re.escape(name)}(\.|$)"
            section = extra.object(name)
            said = _scheme(section, kind, _module(section, described))
            others.append((compiled(fields, "extra_config", pattern), said))
            exact[name] = said
        return cls(_scheme(fields, kind, described), exact, tuple(others))

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        said = self.usual
        if module.name in self.exact:
            said = self.exact[module.name]
        else:
            said = next((said for pattern, said in self.others if pattern.search(module.name)), said)
        if said is not None:
            return said.matrix(module)
        for part in ("qweight", "weight_packed"):
            if module.has(part):
                stored = module.take(part, ("I32", "U8"))
                raise refusal(stored, "is stored, but extra_config says that the module has 16 bits or more")
        return None


def _module(fields: Fields, usual: Module) -> Module:
    """The scheme that `fields` name; `usual` has those that they leave out."""
    bits = fields.integer("bits", usual.bits)
    size = fields.raw("group_size")
    if isinstance(size, list) and len(size) == 2:
        sides = Fields({f"group_size[{i}]": side for i, side in enumerate(size)}, fields.where)
        size = tuple(sides.integer(f"group_size[{i}]", most=1 << 20) for i in range(2))
    elif size is None:
        size = usual.size
    else:
        size = fields.integer("group_size", least=-1, most=1 << 20)
    act_size = fields.raw("act_group_size")
    if isinstance(act_size, list):
        act_size = act_size[-1] if act_size else 0
    said = Module(
        bits, size, fields.boolean("sym", usual.is_symmetric),
        fields.string("data_type", "float" if bits >= 16 else usual.data_type),
        fields.integer("act_bits", usual.act_bits), fields.string("act_data_type", usual.act_type),
        max(0, act_size) if type(act_size) is int else usual.act_size,
        fields.boolean("act_dynamic", usual.is_act_dynamic),
    )  # fmt: skip
    for name in ("act_sym", "scheme"):
        fields.raw(name)
    for name in ("rotation_config", "transform_config", "super_bits", "super_group_size"):
        fields.expect(name, {})
    return said


def _scheme(fields: Fields, kind: str, said: Module) -> _ModuleScheme | None:
    """The scheme of one description; None for floats."""
    if said.bits >= 16 or kind == "fake":
        return None
    if not said.data_type.startswith("int"):
        return _float_scheme(fields, said)
    if kind in _FLOAT_PACKINGS:
        raise fields.error("data_type", f"is {said.data_type!r:.80}, must not be integers in auto_round:{kind}")
    if said.act_bits < 16:
        raise fields.error("act_bits", f"is {said.act_bits}, must be 16 or more: activations are not rounded")
    if not isinstance(said.size, int) or said.size == 0:
        raise fields.error("group_size", f"is {said.size}, must be -1 (all of a row) or more than 0")
    size = max(0, said.size)
    if kind in ("auto_awq", "awq"):
        if said.bits != 4:
            raise fields.error("bits", f"is {said.bits}, must be 4 in AWQ's packing")
        return AwqScheme(size, ())
    if said.bits not in (2, 3, 4, 8):
        raise fields.error("bits", f"is {said.bits}, must be 2, 3, 4, 8 or 16")
    return GptqScheme(GptqModule(said.bits, size, said.is_symmetric, False), (), _PLAIN_ZEROS[kind])


def _float_scheme(fields: Fields, said: Module) -> _ModuleScheme:
    name = next((name for name in _FORMATS if said.data_type.startswith(name)), None)
    if name is None:
        known = ", ".join(("int", *_FORMATS))
        raise fields.error("data_type", f"{said.data_type!r:.80} is not supported; supported are {known}")
    forms = _FORMATS[name]
    if said.bits not in forms:
        allowed = " or ".join(map(str, forms))
        raise fields.error("bits", f"is {said.bits}, must be {allowed} for the data_type {said.data_type!r:.80}")
    if not said.is_symmetric:
        raise fields.error("sym", f"is false, must be true for the data_type {said.data_type!r:.80}")
    if isinstance(said.size, tuple):
        if name != "fp":
            raise fields.error("group_size", f"is {list(said.size)}, must be one number")
        return Fp8Scheme(said.size, False, False, UnconvertedModules(fields, "", ()))
    format, form = forms[said.bits]
    by_group = next(each for each in form.strategies if each.endswith("group"))
    strategy = "tensor" if said.size == 0 else "channel" if said.size < 0 else by_group
    if strategy not in form.strategies:
        raise fields.error(
            "group_size", f"is {said.size}, must be more than 0 for the data_type {said.data_type!r:.80}"
        )
    activation = None
    if said.act_bits < 16 and name != "mx_int":  # of 4 bits, like the weight, which becomes floats
        number = _ACTIVATIONS.get((said.act_bits, said.act_type.startswith("int")))
        if number is None:
            raise fields.error("act_bits", f"is {said.act_bits} of {said.act_type!r:.80}, must be 4, 8 or 16")
        activation = ActivationScheme(number, said.act_size, not said.is_act_dynamic)
    numbers = Numbers(form.kind, said.bits, strategy, max(0, said.size), None, True, False)
    return InForm(Group("the config", format, numbers, activation), form)


def _magnitudes(array: Array) -> Array:
    """Halves of bytes with a sign above a magnitude as integers above -8."""
    halves = unpack_halves(array)
    return pack_halves(np.where(halves > 7, 16 - halves, 8 + halves).astype(np.uint8))


_QUARTERS = np.ldexp(np.float32(0.25), np.arange(256) - 127).astype(np.float32)
_QUARTERS[255] = np.nan
_ACTIVATIONS: dict[tuple[int, bool], NumberKind] = {
    (8, False): "fp8", (8, True): "int8", (4, False): "fp4"
}  # fmt: skip
_E5M3 = "nvfp4-e5m3-pack-quantized"
_MX_INT = Form("int", (4,), ("group",), "weight_packed", "U8", "int4", ("U8",), _magnitudes, _QUARTERS)
_FORMATS: dict[str, dict[int, tuple[str, Form]]] = {
    "mx_fp": {
        4: ("mxfp4-pack-quantized", FORMS["mxfp4-pack-quantized"]), 8: ("mxfp8-quantized", FORMS["mxfp8-quantized"])
    },
    "mx_int": {4: ("mx_int", _MX_INT)},
    "nvfp4_v2": {4: (_E5M3, FORMS[_E5M3])},
    "nv_fp": {4: ("nvfp4-pack-quantized", FORMS["nvfp4-pack-quantized"])},
    "fp": {8: ("float-quantized", FORMS["float-quantized"])},
}  # fmt: skip
