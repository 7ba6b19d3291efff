"""Forms of instructions: a row of the table in `instructions.py`, checked against an instruction and translated.

A row names opcodes by their first parts, the modifiers that may follow, the types, the operands, and what they become:
a function of values, an emulated operation, or a translation of its own, which takes modifiers word by word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from runtime.emulator.translation.lowering import Lowering, UnsupportedInstruction
from runtime.emulator.translation.ptx import TYPE_BYTES, Instruction, Integer, Operand

Value = Any


class Modifiers:
    """The parts of one instruction that are still to be understood; with a `Lowering`, what a function of values sees.

    Attributes:
        kind: the instruction's type, its last word, if the form has types.
    """

    def __init__(self, ins: Instruction, low: Lowering | None = None, num_parts: int = 1, kind: str = "") -> None:
        self.ins = ins
        self.name, *words = ins.parts
        self.words, self.kind = words[num_parts - 1 : len(words) - bool(kind)], kind
        if low is not None:
            self.low, self.b = low, low.builder

    def refuse(self, why: str) -> UnsupportedInstruction:
        return UnsupportedInstruction(self.ins, why)

    def __contains__(self, word: str) -> bool:
        return word in self.words

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


class Form:
    """A row of the table. `lower` is a translation of its own for any modifiers, types and operands.

    Modifiers, in any order: ``ftz?`` may stand there, ``lo|hi`` is one of these, ``cta|gpu?`` one of them or none.

    Operands of a function of values, which returns the result: ``d`` the result's register; ``t`` a value of the
    instruction's type, ``2t`` of its double width, ``b`` of its width as bits, ``u32``, ``pred`` of these types;
    ``members`` the member mask, whose lanes come together first; ``raw`` the operand itself.

    Operands of an emulated operation: ``[]`` an address (base and offset), ``r32`` a register to read, ``d32`` one to
    write, ``dp`` a predicate to write, ``#`` a literal, ``128`` this literal, which is not handed on; ``members``, as
    above, is not either, nor is ``-``, which ``-?`` may be missing. After them, without an operand, ``=1`` is a number,
    and ``read:1,parity:2`` the sum of the numbers of those words that are in the opcode.
    """

    def __init__(
        self, heads: str, words: str = "", kinds: str = "", operands: str = "", run: Callable[..., Any] | str = "",
        *, blocks: bool = False, lower: Callable[[Lowering, Instruction], None] | None = None,
    ) -> None:  # fmt: skip
        self.heads, self.kinds, self.run, self.blocks, self.lower = heads.split(), kinds.split(), run, blocks, lower
        choices = [choice.removesuffix("?").split("|") for choice in words.split()]
        self.required = [set(choice) for choice, text in zip(choices, words.split()) if not text.endswith("?")]
        self.choice_of = {word: number for number, choice in enumerate(choices) for word in choice}
        self.operands = operands.split()
        given = [word for word in self.operands if "=" not in word and ":" not in word]
        self.counts = {len(given), len([word for word in given if word != "-?"])}

    def misfit(self, ins: Instruction, words: list[str]) -> str:
        """The reason why an instruction, with these modifiers after the head, has another form; "" if it has this."""
        unknown = [word for word in words if word not in self.choice_of]
        if unknown:
            return f"modifier .{unknown[0]}"
        if len({self.choice_of[word] for word in words}) != len(words):
            return f"modifiers .{', .'.join(words)} together"
        missing = [choice for choice in self.required if not choice.intersection(words)]
        if missing:
            return f"needs one of .{', .'.join(sorted(missing[0]))}"
        return "" if len(ins.operands) in self.counts else f"{len(ins.operands)} operands"

    def translate(self, low: Lowering, mods: Modifiers) -> None:
        if isinstance(self.run, str):
            self._call(low, mods)
            return
        operands = mods.ins.operands
        if "members" in self.operands:
            low.converge(operands[self.operands.index("members")])
        values = [self._value(mods, what, operand) for what, operand in zip(self.operands[1:], operands[1:])]
        result = self.run(mods, *values)
        if mods.kind == "pred":
            low.write_predicate(operands[0], result)
        else:
            low.write(operands[0], result)

    @staticmethod
    def _value(mods: Modifiers, what: str, operand: Operand) -> Value:
        low, kind = mods.low, mods.kind
        if what == "raw":
            return operand
        if what == "members":
            return low.builder.and_(low.value(operand, "b32"), low.splat(low.mask))
        if what == "2t":
            kind = f"{kind[0]}{2 * int(kind[1:])}"
        elif what != "t":
            kind = f"b{kind[1:]}" if what == "b" else what
        return low.predicate(operand) if kind == "pred" else low.value(operand, kind)

    def _call(self, low: Lowering, mods: Modifiers) -> None:
        """Sources are read before a destination forgets a register's value, which may be the same."""
        assert isinstance(self.run, str)
        if not self.run:
            return
        if self.blocks:
            low.resume_here()
        arguments: list[list[Any]] = []
        results = []
        operands = iter(mods.ins.operands)
        for what in self.operands:
            if what.startswith("="):
                arguments.append([int(what[1:])])
            elif ":" in what:
                flags = (each.split(":") for each in what.split(","))
                arguments.append([sum(int(number) for word, number in flags if word in mods.ins.parts)])
            elif (operand := next(operands, None)) is None or what.startswith("-"):
                continue
            elif what == "[]":
                arguments.append([*low.address(operand)])
            elif what[0] == "r":
                arguments.append([low.slot(operand, int(what[1:]))])
            elif what[0] == "d":
                results.append((len(arguments), what, operand))
                arguments.append([])
            elif what == "#":
                arguments.append([low.uniform(operand)])
            elif what == "members":
                low.converge(operand)
            elif what.isdigit() and operand != Integer(int(what)):
                raise low.refuse(f"{operand}, not {what}")
        for place, what, operand in results:
            is_predicate = what == "dp"
            arguments[place] = [
                low.predicate_destination(operand) if is_predicate else low.destination(operand, int(what[1:]))
            ]
        low.call(self.run, *(value for values in arguments for value in values), blocks=self.blocks)


class Table:
    """All forms, found by the longest first parts of an opcode that have some."""

    def __init__(self, *rows: Form) -> None:
        self._by_head: dict[str, list[Form]] = {}
        for row in rows:
            for head in row.heads:
                self._by_head.setdefault(head, []).append(row)

    def lower(self, low: Lowering, ins: Instruction) -> None:
        """Translates an instruction. Raises UnsupportedInstruction."""
        parts = ins.parts
        for count in range(len(parts), 0, -1):
            if rows := self._by_head.get(".".join(parts[:count])):
                return self._lower(rows, low, ins, count)
        raise UnsupportedInstruction(ins, "unknown instruction")

    @staticmethod
    def _lower(rows: list[Form], low: Lowering, ins: Instruction, count: int) -> None:
        last, why = ins.parts[-1], ""
        for row in rows:
            if row.lower is not None:
                return row.lower(low, ins)
            if row.kinds and (last not in row.kinds or count == len(ins.parts)):
                continue
            mods = Modifiers(ins, low, count, last if row.kinds else "")
            misfit = row.misfit(ins, mods.words)
            if not misfit:
                return row.translate(low, mods)
            why = why or misfit
        raise UnsupportedInstruction(ins, why or f"type .{last}")
