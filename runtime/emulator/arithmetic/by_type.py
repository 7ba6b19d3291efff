"""Arithmetic instructions by name and type: `add.f32` and `add.s32` are handled in different files."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.emulator.translation.lowering import Lowering, lowers
from runtime.emulator.translation.modifiers import Modifiers
from runtime.emulator.translation.ptx import Instruction

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
