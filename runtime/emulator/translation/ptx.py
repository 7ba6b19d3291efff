"""PTX text → kernels as plain data: registers, parameters, memory symbols, instructions with parsed operands.

The grammar is PTX ISA 9.x, chapters 4 and 5; instructions have no meaning here. Scoped blocks, as
inline assembly makes them, are flattened by renaming; debug sections are skipped. Unreadable text is an error with the
line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from runtime.errors import InvalidArgumentError


class PtxError(InvalidArgumentError):
    """A PTX text that cannot be read, with its line."""


@dataclass(frozen=True, slots=True)
class Register:
    name: str
    type: str  # pred, b16, b32, f32, b64, f64, b128 …


@dataclass(frozen=True, slots=True)
class Special:
    """A predefined register such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Integer:
    value: int


@dataclass(frozen=True, slots=True)
class Float:
    """`bits` as written: 0f… (width 32) or 0d… (width 64)."""

    bits: int
    width: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A label, a parameter, a variable or a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Negated:
    """`!%p`."""

    operand: Register


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`%r1|%p2`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, and for tensor copies `[base, {coordinates}]`."""

    base: Operand
    offset: int = 0
    coordinates: Operand | None = None


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a destination that is thrown away."""


Operand = Register | Special | Integer | Float | Symbol | Negated | Vector | Pair | Address | Sink


def leaves(operand: Operand | None) -> Iterator[Operand]:
    """Every register, symbol and number in an operand."""
    if isinstance(operand, Negated):
        yield operand.operand
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from leaves(item)
    elif isinstance(operand, Pair | Address):
        parts = (operand.first, operand.second) if isinstance(operand, Pair) else (operand.base, operand.coordinates)
        for part in parts:
            yield from leaves(part)
    elif operand is not None:
        yield operand


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str  # as written: "fma.rn.ftz.f32"
    operands: tuple[Operand, ...]
    guard: Register | None
    guard_negated: bool
    line: int

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    @property
    def sets_carry(self) -> bool:
        """Whether the carry flag is a result, as of `add.cc.u32`."""
        return "cc" in self.parts[1:]

    @property
    def reads_carry(self) -> bool:
        """Whether the carry flag is an operand, as of `addc.u32`."""
        return self.parts[0] in ("addc", "subc", "madc")


CARRY = Register("CC.CF", "pred")
"""The carry flag of each thread, a register without a name in PTX."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A parameter or a memory symbol. `size_bytes` is None for `extern .shared x[]`."""

    name: str
    space: str  # param, shared, global, const, local
    align: int
    size_bytes: int | None
    initial: bytes = b""


@dataclass(slots=True)
class Kernel:
    name: str
    parameters: list[Variable] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)  # .shared, .local and call arguments of the body
    registers: dict[str, Register] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label → index of the instruction that follows
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of brx.idx: list's label → labels
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # maxntid, reqntid, minnctapersm …
    is_entry: bool = True


@dataclass(slots=True)
class Module:
    version: str
    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]
    lines: list[str]


TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4,
    "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16,
}  # fmt: skip

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>"[^"]*")
      | (?P<float>0[fF][0-9a-fA-F]{8}(?![0-9a-zA-Z_])|0[dD][0-9a-fA-F]{16}(?![0-9a-zA-Z_]))
      | (?P<version>\d+\.\d+)
      | (?P<number>0[xX][0-9a-fA-F]+U?|\d+U?)
      | (?P<name>%?[A-Za-z_$][\w$]*(?:(?:\.|::)[\w$]+)*)
      | (?P<directive>\.[A-Za-z_][\w]*(?:::\w+)?)
      | (?P<punctuation>[][{}()<>,;:@!|=+\-])""",
    re.VERBOSE,
)

_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|cluster_ctaid|cluster_nctaid|clusterid|nclusterid)\.[xyz]$"
    r"|%(laneid|warpid|nwarpid|smid|nsmid|gridid|lanemask_(eq|le|lt|ge|gt)|clock|clock_hi|clock64|globaltimer"
    r"|globaltimer_lo|globaltimer_hi|cluster_ctarank|cluster_nctarank|is_explicit_cluster|dynamic_smem_size"
    r"|total_smem_size|aggr_smem_size|current_graph_exec|envreg\d+|pm\d+)$"
)


Item = TypeVar("Item")


@dataclass(slots=True)
class _Tokens:
    """Tokens of a text with a cursor; each is (kind, text, line)."""

    items: list[tuple[str, str, int]]
    at: int = 0

    def peek(self, ahead: int = 0) -> str:
        index = self.at + ahead
        return self.items[index][1] if index < len(self.items) else ""

    @property
    def kind(self) -> str:
        return self.items[self.at][0] if self.at < len(self.items) else "end"

    @property
    def line(self) -> int:
        return self.items[min(self.at, len(self.items) - 1)][2] if self.items else 0

    def next(self) -> str:
        if self.at >= len(self.items):
            raise PtxError("the text ends in the middle of a statement")
        self.at += 1
        return self.items[self.at - 1][1]

    def expect(self, text: str) -> None:
        found = self.next()
        if found != text:
            raise PtxError(f"line {self.items[self.at - 1][2]}: expected {text!r}, found {found!r}")

    def until(self, end: str, read: Callable[[], Item]) -> list[Item]:
        """Everything that `read` finds up to `end`, with commas between."""
        found = []
        while not self.accept(end):
            found.append(read())
            self.accept(",")
        return found

    def accept(self, text: str) -> bool:
        if self.peek() == text:
            self.at += 1
            return True
        return False


def _tokenize(text: str) -> _Tokens:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    items: list[tuple[str, str, int]] = []
    skipping_section = False
    for number, line in enumerate(text.split("\n"), 1):
        code = line.split("//", 1)[0].strip()
        if skipping_section:
            skipping_section = not code.startswith("}")
            continue
        if code.startswith(".section"):
            skipping_section = "}" not in code
            continue
        if code.startswith((".loc ", ".loc\t", ".file", "@@DWARF")):
            continue
        at = 0
        while at < len(code):
            match = _TOKEN.match(code, at)
            if match is None:
                raise PtxError(f"line {number}: cannot read {code[at : at + 20]!r}")
            at = match.end()
            kind = match.lastgroup or ""
            if kind != "space":
                items.append((kind, match.group(), number))
    return _Tokens(items)


def _integer(text: str) -> int:
    return int(text.rstrip("U"), 0) if not re.fullmatch(r"0\d+U?", text) else int(text.rstrip("U"), 8)


def parse(text: str) -> Module:
    """Parses a PTX module. Raises PtxError with the line at fault."""
    tokens = _tokenize(text)
    module = Module("", "", {}, {}, text.split("\n"))
    while tokens.kind != "end":
        token = tokens.next()
        if token == ".version":
            module.version = tokens.next()
        elif token == ".target":
            module.target = tokens.next()
            while tokens.accept(","):
                tokens.next()
        elif token == ".address_size":
            if tokens.next() != "64":
                raise PtxError("only 64-bit addresses are emulated")
        elif token in (".visible", ".extern", ".weak", ".common", ";"):
            continue
        elif token in (".entry", ".func"):
            kernel = _kernel(tokens, is_entry=token == ".entry", module=module)
            module.kernels[kernel.name] = kernel
        elif token in (".global", ".const", ".shared"):
            for variable in _variables(tokens, token[1:]):
                module.variables[variable.name] = variable
        elif token == ".pragma":
            while tokens.next() != ";":
                pass
        else:
            raise PtxError(f"line {tokens.line}: unknown directive {token!r}")
    return module


def _variables(tokens: _Tokens, space: str) -> list[Variable]:
    """`.align 8 .b8 name[16] = {…}, other;` after the state space."""
    align, type_name = 0, ""
    while tokens.kind == "directive":
        word = tokens.next()
        if word == ".align":
            align = _integer(tokens.next())
        elif word[1:] in TYPE_BYTES:
            type_name = word[1:]
        elif word not in (".attribute", ".v2", ".v4", ".ptr", ".noreturn"):
            raise PtxError(f"line {tokens.line}: unknown attribute {word!r} of a variable")
    found = []
    while True:
        name = tokens.next()
        count: int | None = 1
        while tokens.accept("["):
            if tokens.accept("]"):
                count = None
            else:
                count = (count or 1) * _integer(tokens.next())
                tokens.expect("]")
        element = TYPE_BYTES[type_name]
        initial = _initial(tokens, element) if tokens.accept("=") else b""
        size = None if count is None else count * element
        found.append(Variable(name, space, align or element, size, initial))
        if not tokens.accept(","):
            break
    tokens.expect(";")
    return found


def _initial(tokens: _Tokens, element: int) -> bytes:
    def value() -> bytes:
        negative = tokens.accept("-")
        kind, text = tokens.kind, tokens.next()
        if kind == "float":
            bits = int(text[2:], 16)
            return bits.to_bytes(element, "little")
        if kind != "number":
            raise PtxError(f"line {tokens.line}: initialiser {text!r} is not a number")
        number = -_integer(text) if negative else _integer(text)
        return (number % (1 << (8 * element))).to_bytes(element, "little")

    if not tokens.accept("{"):
        return value()
    return b"".join(tokens.until("}", value))


def _parameters(tokens: _Tokens) -> list[Variable]:
    def parameter() -> Variable:
        tokens.expect(".param")
        align, size = 0, 0
        while tokens.kind == "directive":
            word = tokens.next()
            if word == ".align":
                align = _integer(tokens.next())
            elif word[1:] in TYPE_BYTES:
                size = TYPE_BYTES[word[1:]]
            elif word == ".ptr":  # the rest describes the memory that the parameter points at
                while tokens.kind == "directive" and tokens.peek() != ".align":
                    tokens.next()
                if tokens.accept(".align"):
                    tokens.next()
        name = tokens.next()
        count = 1
        if tokens.accept("["):
            count = _integer(tokens.next())
            tokens.expect("]")
        return Variable(name, "param", max(align, size), size * count)

    tokens.expect("(")
    return tokens.until(")", parameter)


def _kernel(tokens: _Tokens, is_entry: bool, module: Module) -> Kernel:
    if not is_entry and tokens.peek() == "(":  # a return value
        _parameters(tokens)
    kernel = Kernel(tokens.next(), is_entry=is_entry)
    if tokens.peek() == "(":
        kernel.parameters = _parameters(tokens)
    while tokens.kind == "directive":
        name = tokens.next()[1:]
        values = []
        while tokens.kind == "number":
            values.append(_integer(tokens.next()))
            tokens.accept(",")
        kernel.directives[name] = tuple(values)
    if tokens.accept(";"):  # a declaration
        return kernel
    _Body(tokens, kernel).read()
    return kernel


class _Body:
    """Reads `{ … }` into a kernel, renaming the declarations of inner scopes."""

    def __init__(self, tokens: _Tokens, kernel: Kernel) -> None:
        self.tokens, self.kernel = tokens, kernel
        self.scopes: list[dict[str, str]] = []
        self.serial = 0

    def read(self) -> None:
        tokens, kernel = self.tokens, self.kernel
        tokens.expect("{")
        self._open()
        while self.scopes:
            if tokens.accept("{"):
                self._open()
            elif tokens.accept("}"):
                self.scopes.pop()
            elif tokens.accept(";"):
                pass
            elif tokens.kind == "directive":
                self._declaration()
            elif tokens.kind == "name" and tokens.peek(1) == ":" and tokens.peek(2) == ".branchtargets":
                name = self._resolve(tokens.next())
                tokens.at += 2
                kernel.branch_targets[name] = tuple(tokens.until(";", lambda: self._resolve(tokens.next())))
            elif tokens.kind == "name" and tokens.peek(1) == ":":
                kernel.labels[self._resolve(tokens.next())] = len(kernel.instructions)
                tokens.expect(":")
            else:
                self._instruction()

    def _open(self) -> None:
        """Labels may be used before their definition, so a scope's own labels are found ahead of reading it."""
        names: dict[str, str] = {}
        self.scopes.append(names)
        if len(self.scopes) == 1:
            return
        depth, at = 1, self.tokens.at
        items = self.tokens.items
        while depth and at < len(items):
            text = items[at][1]
            depth += (text == "{") - (text == "}")
            is_statement = at == 0 or items[at - 1][1] in (";", "{", "}", ":")
            if depth == 1 and is_statement and items[at][0] == "name" and items[at + 1][1] == ":":
                names[text] = self._fresh(text)
            at += 1

    def _fresh(self, name: str) -> str:
        self.serial += 1
        return f"{name}@{self.serial}"

    def _resolve(self, name: str) -> str:
        for names in reversed(self.scopes):
            if name in names:
                return names[name]
        return name

    def _declare(self, name: str) -> str:
        unique = name if len(self.scopes) == 1 else self._fresh(name)
        self.scopes[-1][name] = unique
        return unique

    def _declaration(self) -> None:
        tokens, kernel = self.tokens, self.kernel
        word = tokens.next()
        if word == ".reg":
            type_name = tokens.next()[1:]
            while True:
                name = tokens.next()
                if tokens.accept("<"):
                    for index in range(_integer(tokens.next())):
                        unique = self._declare(f"{name}{index}")
                        kernel.registers[unique] = Register(unique, type_name)
                    tokens.expect(">")
                else:
                    unique = self._declare(name)
                    kernel.registers[unique] = Register(unique, type_name)
                if not tokens.accept(","):
                    break
            tokens.expect(";")
        elif word in (".shared", ".local", ".param"):  # .param: an argument of a call
            for variable in _variables(tokens, word[1:]):
                unique = self._declare(variable.name)
                kernel.variables.append(
                    Variable(unique, variable.space, variable.align, variable.size_bytes, variable.initial)
                )
        elif word == ".pragma":
            while tokens.next() != ";":
                pass
        else:
            raise PtxError(f"line {tokens.line}: unknown directive {word!r} in {self.kernel.name}")

    def _instruction(self) -> None:
        tokens = self.tokens
        line = tokens.line
        guard, negated = None, False
        if tokens.accept("@"):
            negated = tokens.accept("!")
            guard = self.kernel.registers[self._resolve(tokens.next())]
        opcode = tokens.next()
        while tokens.kind == "directive":  # an opcode whose suffix begins with a digit is split by the tokenizer
            opcode += tokens.next()
        instruction = Instruction(opcode, tuple(tokens.until(";", self._operand)), guard, negated, line)
        if instruction.sets_carry or instruction.reads_carry:
            self.kernel.registers[CARRY.name] = CARRY
        self.kernel.instructions.append(instruction)

    def _operand(self) -> Operand:
        tokens = self.tokens
        for opening, closing in (("{", "}"), ("(", ")")):  # a call's arguments have the second kind
            if tokens.accept(opening):
                return Vector(tuple(tokens.until(closing, self._operand)))
        if tokens.accept("["):
            return self._address()
        if tokens.accept("!"):
            operand = self._operand()
            if not isinstance(operand, Register):
                raise PtxError(f"line {tokens.line}: '!' before something that is no register")
            return Negated(operand)
        operand = self._atom()
        if tokens.accept("|"):
            return Pair(operand, self._atom())
        return operand

    def _atom(self) -> Operand:
        tokens = self.tokens
        negative = tokens.accept("-")
        kind, line, text = tokens.kind, tokens.line, tokens.next()
        if kind == "number":
            return Integer(-_integer(text) if negative else _integer(text))
        if kind == "float":
            width = 32 if text[1] in "fF" else 64
            bits = int(text[2:], 16)
            return Float(bits ^ (1 << (width - 1)) if negative else bits, width)
        if kind != "name":
            raise PtxError(f"line {line}: cannot read the operand {text!r}")
        if text == "_":
            return Sink()
        name = self._resolve(text)
        if name in self.kernel.registers:
            return self.kernel.registers[name]
        if _SPECIAL.match(text):
            return Special(text)
        if text.startswith("%"):
            raise PtxError(f"line {line}: unknown register {text}")
        return Symbol(name)

    def _address(self) -> Address:
        tokens = self.tokens
        base = self._atom()
        offset = 0
        coordinates: Operand | None = None
        if tokens.accept("+"):
            negative = tokens.accept("-")
            offset = _integer(tokens.next()) * (-1 if negative else 1)
        elif tokens.peek() == "-":
            tokens.next()
            offset = -_integer(tokens.next())
        if tokens.accept(","):
            coordinates = self._operand()
        tokens.expect("]")
        return Address(base, offset, coordinates)
