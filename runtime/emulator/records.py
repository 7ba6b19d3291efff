"""Records of 64-bit fields in memory: declared once, read by name in compiled code, in translated kernels, on the host.

    class Block(Record):
        x = Long()                # int64
        cluster = Table("Block")  # address of an array of addresses of records
        pcs = Ints()              # address of int32 elements
        counts = Longs(3)         # three int64 in the record itself

Compiled code has a record as a bare pointer of its own Numba type: ``block.x``, ``block.cluster[1].pcs[lane]``; an
index on a record gives the next ones in memory (``block.warps[i]``), ``if record:`` is false for address 0. ``at`` of a
record type makes an intrinsic from address to record. Reading a field takes Numba one step of typing and three LLVM
instructions, where a constant index took two variables and the overload resolution of getitem.

On the host ``Block(address)`` reads and writes the same fields; ``Block.x.index`` counts 64-bit words.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, override"

from __future__ import annotations

import ctypes
import operator
from typing import Any, ClassVar, Self, overload

from llvmlite import ir
from numba import types
from numba.core.datamodel import PrimitiveModel, register_default
from numba.core.imputils import lower_builtin, lower_cast, lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_getattr,
    infer_global,
    signature,
)
from numba.extending import intrinsic as _intrinsic

intrinsic: Any = _intrinsic  # numba's stub takes the typing context for an argument of the call
_LONG = ir.IntType(64)
WORD_BYTES = 8


class Pointer(types.Type):
    """Numba's type of a record in compiled code, and of an array of their addresses."""

    def __init__(self, record: str, is_table: bool = False) -> None:
        self.record, self.is_table = record, is_table
        super().__init__(f"{'Table' if is_table else 'Record'}({record})")


@register_default(Pointer)
class _PointerModel(PrimitiveModel):
    def __init__(self, manager: Any, type_: Any) -> None:
        super().__init__(manager, type_, _LONG.as_pointer())


class Field:
    """One field: `index` is its first 64-bit word, `type` its type in compiled code, `words` its size."""

    words = 1
    is_inside = False

    def __init__(self, type_: Any = types.int64) -> None:
        self.type, self.index = type_, -1

    @overload
    def __get__(self, record: None, owner: Any) -> Self: ...
    @overload
    def __get__(self, record: Record, owner: Any) -> int: ...
    def __get__(self, record: Record | None, owner: Any) -> Self | int:
        return self if record is None else record[self.index]

    def __set__(self, record: Record, value: int) -> None:
        record[self.index] = value


class Long(Field):
    """An int64: a number, or an address without a type."""


class Longs(Field):
    """int64 elements in the record itself."""

    is_inside = True

    def __init__(self, count: int) -> None:
        super().__init__(types.CPointer(types.int64))
        self.words = count


def _elements(element: Any) -> Any:
    return lambda: Field(types.CPointer(element))


Bytes, Ints, Words, LongArray = map(_elements, (types.uint8, types.int32, types.uint32, types.int64))
"""The address of elements of that type."""


def To(record: str) -> Field:
    """The address of a record, or of the first of several."""
    return Field(Pointer(record))


def Table(record: str) -> Field:
    """The address of an array of records' addresses."""
    return Field(Pointer(record, is_table=True))


class Record:
    """A record at an address, as the host reads it."""

    records: ClassVar[dict[str, type[Record]]] = {}
    fields: ClassVar[dict[str, Field]]
    size_words: ClassVar[int]
    size_bytes: ClassVar[int]

    def __init_subclass__(cls, size_words: int = 0) -> None:
        cls.fields, at = {}, 0
        for name, field in vars(cls).items():
            if isinstance(field, Field):
                field.index, at = at, at + field.words
                cls.fields[name] = field
        cls.size_words = max(at, size_words)
        cls.size_bytes = WORD_BYTES * cls.size_words
        assert cls.__name__ not in Record.records, cls.__name__
        Record.records[cls.__name__] = cls

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self._memory: Any = None

    @classmethod
    def new(cls) -> Self:
        """A record of zeros, which lives as long as its handle on the host."""
        memory = (ctypes.c_int64 * cls.size_words)()
        record = cls(ctypes.addressof(memory))
        record._memory = memory
        return record

    def __getitem__(self, index: int) -> int:
        return ctypes.c_int64.from_address(self.pointer + WORD_BYTES * index).value

    def __setitem__(self, index: int, value: int) -> None:
        ctypes.c_int64.from_address(self.pointer + WORD_BYTES * index).value = int(value)


def pointer_to(record: type[Record]) -> Pointer:
    """The type of a record in compiled code."""
    return Pointer(record.__name__)


def at(record: type[Record]) -> Any:
    """An intrinsic: the record at an address."""
    result = pointer_to(record)

    @intrinsic
    def record_at(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], _LONG.as_pointer())

        return result(types.int64), generate

    return record_at


def _field(type_: Pointer, name: str) -> Field | None:
    return None if type_.is_table else Record.records[type_.record].fields.get(name)


@infer_getattr
class _Attributes(AttributeTemplate):
    key = Pointer

    def generic_resolve(self, type_: Pointer, name: str) -> Any:
        field = _field(type_, name)
        return None if field is None else field.type


def _place(builder: Any, record: Any, index: int) -> Any:
    return builder.gep(record, [_LONG(index)])


@lower_getattr_generic(Pointer)
def _get(context: Any, builder: Any, type_: Any, record: Any, name: str) -> Any:
    field = Record.records[type_.record].fields[name]
    place = _place(builder, record, field.index)
    if field.is_inside:
        return place
    value = builder.load(place)
    return value if field.type == types.int64 else builder.inttoptr(value, context.get_value_type(field.type))


@lower_setattr_generic(Pointer)
def _set(context: Any, builder: Any, sig: Any, arguments: Any, name: str) -> None:
    record, value = arguments
    field = Record.records[sig.args[0].record].fields[name]
    assert not field.is_inside, f"{name} is an array"
    value = value if field.type == types.int64 else builder.ptrtoint(value, _LONG)
    builder.store(value, _place(builder, record, field.index))


@lower_cast(types.Integer, Pointer)
@lower_cast(types.Integer, types.CPointer)
def _cast(context: Any, builder: Any, of: Any, to: Any, value: Any) -> Any:
    return builder.inttoptr(context.cast(builder, value, of, types.int64), context.get_value_type(to))


@infer_global(bool)
class _Truth(AbstractTemplate):
    def generic(self, arguments: Any, keywords: Any) -> Any:
        (value,) = arguments
        return signature(types.boolean, value) if isinstance(value, Pointer) else None


@lower_builtin(bool, Pointer)
def _is_true(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return builder.icmp_unsigned("!=", builder.ptrtoint(arguments[0], _LONG), _LONG(0))


@infer_global(operator.getitem)
class _Element(AbstractTemplate):
    def generic(self, arguments: Any, keywords: Any) -> Any:
        record, index = arguments
        if isinstance(record, Pointer) and isinstance(index, types.Integer):
            return signature(Pointer(record.record), record, types.int64)
        return None


@lower_builtin(operator.getitem, Pointer, types.Integer)
def _element(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    record, index = arguments
    if sig.args[0].is_table:
        return builder.inttoptr(builder.load(builder.gep(record, [index])), _LONG.as_pointer())
    size = Record.records[sig.args[0].record].size_words
    return builder.gep(record, [builder.mul(index, _LONG(size))])
