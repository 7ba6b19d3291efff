"""An opcode's modifiers, taken word by word, an unknown word refused by name; arithmetic instructions by name and type.

`add.f32` and `add.s32` are handled in different files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.emulator.translation.lowering import Lowering, UnsupportedInstruction, lowers
from runtime.emulator.translation.ptx import TYPE_BYTES, Instruction, Operand


class Modifiers:
    """The parts of one instruction that are still to be understood."""

    def __init__(self, ins: Instruction) -> None:
        self.ins = ins
        self.name, *self.words = ins.parts

    def refuse(self, why: str) -> UnsupportedInstruction:
        return UnsupportedInstruction(self.ins, why)

    def take(self, word: str) -> bool:
        """Whether `word` is among them; it counts as understood."""
        if word in self.words:
            self.words.remove(word)
            return True
        return False

    def one_of(self, words: Iterable[str], default: str | None = None) -> str:
        """The one word of `words` that is among them."""
        known = list(words)
        for word in self.words:
            if word in known:
                self.words.remove(word)
                return word
        if default is None:
            raise self.refuse(f"needs one of .{', .'.join(known)}")
        return default

    def type(self, known: Iterable[str] = (*TYPE_BYTES, "pred")) -> str:
        """The last word, a type among `known`."""
        if not self.words or self.words[-1] not in known:
            raise self.refuse(f"type .{self.words[-1] if self.words else ''}")
        return self.words.pop()

    def operands(self, *counts: int) -> tuple[Operand, ...]:
        if len(self.ins.operands) not in counts:
            raise self.refuse(f"{len(self.ins.operands)} operands")
        return self.ins.operands

    def done(self) -> None:
        if self.words:
            raise self.refuse(f"modifier .{self.words[0]}")


Handler = Callable[[Lowering, Modifiers, str], None]
_HANDLERS: dict[str, dict[str, Handler]] = {}


def by_type(*names: str, kinds: Iterable[str]) -> Callable[[Handler], Handler]:
    """Registers ``handler(low, modifiers, kind)`` for instructions whose last word is one of `kinds`.

    The handler takes the modifiers that it supports; any left over is refused after it.
    """

    def register(handler: Handler) -> Handler:
        for name in names:
            if name not in _HANDLERS:
                _HANDLERS[name] = {}
                lowers(name)(_lower)
            for kind in kinds:
                assert kind not in _HANDLERS[name], f"{name}.{kind} has two handlers"
                _HANDLERS[name][kind] = handler
        return handler

    return register


def _lower(low: Lowering, ins: Instruction) -> None:
    mods = Modifiers(ins)
    handlers = _HANDLERS[mods.name]
    kind = mods.type(handlers)
    handlers[kind](low, mods, kind)
    mods.done()
