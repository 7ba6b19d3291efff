"""Calls of NCCL as text, for messages."""

from __future__ import annotations

from runtime.emulator.nccl.board import Call

_TYPES = {
    0: "int8", 1: "uint8", 2: "int32", 3: "uint32", 4: "int64", 5: "uint64", 6: "float16", 7: "float32", 8: "float64",
    9: "bfloat16", 10: "float8_e4m3", 11: "float8_e5m2",
}  # fmt: skip
_OPERATIONS = {0: "sum", 1: "prod", 2: "max", 3: "min", 4: "avg"}
_WINDOW_SHIFT = 40


def described(call: Call) -> str:
    """`ncclAllReduce of 64 float32 (sum) at families/llama.py:61`."""
    if call.kind == "end of step":
        return f"end of step {call.count}"
    if call.dtype < 0:
        return f"nccl{call.kind} of {call.count:,} bytes at {call.place}"
    words = [f"nccl{call.kind} of {call.count:,} {_TYPES[call.dtype]}"]
    if call.operation >= 0:
        words.append(f"({_OPERATIONS[call.operation]})")
    if call.root >= 0:
        words.append({"Send": "to", "Recv": "of"}.get(call.kind, "from") + f" rank {call.root}")
    for name, place in (("source", call.source), ("target", call.target)):
        if place:
            words.append(f"{name} at {place & ((1 << _WINDOW_SHIFT) - 1):,} of window {(place >> _WINDOW_SHIFT) - 1}")
    return f"{' '.join(words)} at {call.place}"


def window_place(number: int, offset: int) -> int:
    """A place in a window, as in `Call`."""
    return (number + 1) << _WINDOW_SHIFT | offset
