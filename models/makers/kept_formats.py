"""Decides the format in which a map's weights are kept: as stored, as requested, or as floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.checkpoints.checkpoint import Checkpoint
from models.errors import ModelLoadError
from models.makers.declaration import LinearDeclaration
from models.makers.shards import Shard
from numba_kernels.cuda.packing import Packing, packing_of
from runtime.dtype import DType
from runtime.linear.experts import can_stay_packed
from runtime.linear.format import GGML_FORMATS, GROUP_FORMATS, WeightFormat
from runtime.linear.kept import kept_format
from runtime.linear.options import LoadOptions


@dataclass(frozen=True, slots=True)
class KeptFormats:
    """The formats in which a maker's maps may be kept.

    Attributes:
        options: the device, and the requested formats.
        source: of the tensors, or None while it is unknown.
        dtype: the type of most weights.
        prefix: of names, for messages.
        is_expert: whether the maps are experts.
        keeps_order: whether products may take columns in another order.
    """

    options: LoadOptions
    source: Checkpoint | None
    dtype: DType
    prefix: str
    is_expert: bool
    keeps_order: bool

    def kept(self, name: str, columns: Shard, declaration: LinearDeclaration | None = None) -> WeightFormat | None:
        """The format in which a quantised matrix is kept as it is stored: on the cpu, if no other format is requested,
        there is a kernel for it, and this rank's columns are whole blocks."""
        options = self.options
        if options.device.kind != "cpu":
            return None
        layout = None if self.source is None else self.source[name].quantized
        is_cut = declaration is not None and declaration.is_cut
        unit = 1
        if layout is not None:
            if layout.has_order and (is_cut or not self.keeps_order):
                return None
            part = replace(layout, shape=(layout.shape[0], columns.count))
            format, unit = kept_format(part, options), layout.block[1] or 1
        elif self.source is None or options.dtype or options.format:
            return None
        else:
            format = (GGML_FORMATS | GROUP_FORMATS).get(self.source[name].block_format or "")
            if format is not None and (columns.whole % format.multiple or options.has_float_activations):
                return None
        if format is None:
            return None
        if is_cut and declaration is not None:
            step = format.segment_step if declaration.is_segmented else format.split
            return format if all(is_at_borders(columns, each) for each in (unit, step)) else None
        return format

    def kept_part(self, source: Checkpoint, name: str, part: str, inputs: int) -> WeightFormat | None:
        """The same for the keys or values of heads, which a file may have by head."""
        options = self.options
        if options.device.kind != "cpu" or options.dtype or options.format or options.has_float_activations:
            return None
        format = GGML_FORMATS.get(source[name].head_formats.get(part) or "")
        return None if format is None or inputs % format.multiple else format

    def packing(self, declaration: LinearDeclaration) -> Packing | None:
        """A GPU's packing of a quantised map as stored; None if it is dequantised. Its parts must agree."""
        if self.source is None or self.options.device.kind == "cpu":
            return None
        found = set()
        for name in declaration.names:
            layout = None if declaration.is_transposed else self.source[f"{name}.weight"].quantized
            format = None if layout is None else kept_format(layout, self.options)
            packing = None if format is None else packing_of(format.packing)
            if layout is not None and layout.has_order and not self._can_reorder(declaration):
                packing = None
            found.add((packing, layout is not None and layout.has_order))
        packing, has_order = found.pop() if len(found) == 1 else (None, False)
        if packing is not None and has_order and not self._has_one_order(declaration):
            packing = None
        if packing is not None and declaration.is_cut:
            blocks = (self.source[f"{name}.weight"].quantized for name in declaration.names)
            sizes = [max(1, packing.group), *(layout.block[1] for layout in blocks if layout is not None)]
            if not all(is_at_borders(declaration.columns, size) for size in sizes if size):
                return None
        if packing is None or not self.is_expert:
            return packing
        return packing if self._can_stay(packing, declaration.outputs, declaration.inputs) else None

    def _has_one_order(self, declaration: LinearDeclaration) -> bool:
        """Whether the columns of all parts are stored in the same order, as is usual for maps of one input."""
        assert self.source is not None
        orders = [self.source[f"{name}.weight"].order() for name in declaration.names]
        return all(each is not None and np.array_equal(each, orders[0]) for each in orders)  # type: ignore[arg-type]

    def _can_reorder(self, declaration: LinearDeclaration) -> bool:
        """Whether a GPU's map takes x's columns in another order. Ranks and exact mode cannot."""
        return self.keeps_order and not declaration.is_cut and not declaration.is_segmented

    def keeps_asked(self, outputs: int | Sequence[int], inputs: int) -> bool:
        """Whether experts are kept in the requested format."""
        packing = None if self.options.format is None else packing_of(self.options.format.packing)
        each = (outputs,) if isinstance(outputs, int) else outputs
        return self.options.device.kind == "cpu" or packing is None or self._can_stay(packing, each, inputs)

    def _can_stay(self, packing: Packing, outputs: Sequence[int], inputs: int) -> bool:
        """See `can_stay_packed`; `outputs` are this rank's. Raises ModelLoadError if exact mode's ranks would keep
        floats where one rank keeps packed weights."""
        can_stay, num_ranks = can_stay_packed(packing, self.dtype, outputs, inputs), self.options.num_ranks
        whole = [each * num_ranks for each in outputs]
        is_shared = self.options.exact and num_ranks > 1
        if is_shared and not can_stay and can_stay_packed(packing, self.dtype, whole, inputs):
            raise ModelLoadError(
                f"{self.prefix}: {outputs[0]} columns of quantised experts are not multiplied as the {whole[0]} of one"
                f" rank are, so exact needs fewer ranks than {num_ranks}"
            )
        return can_stay


def is_at_borders(shard: Shard, unit: int) -> bool:
    """Whether a share begins and ends at a unit's border."""
    end = shard.first + shard.count
    return shard.first % unit == 0 and (end % unit == 0 or end == shard.whole)


def check_cut(declaration: LinearDeclaration, format: WeightFormat) -> None:
    """Raises `ModelLoadError` if a rank's inputs do not end at a unit's border of their format."""
    unit = format.segment_step if declaration.is_segmented else format.split
    if declaration.is_cut and not is_at_borders(declaration.columns, unit):
        mode = " in exact mode" if declaration.is_segmented else ""
        raise ModelLoadError(
            f"{', '.join(declaration.names)}: a rank would have {declaration.inputs} inputs, but"
            f" {format.name} is cut at multiples of {unit}{mode}"
        )
