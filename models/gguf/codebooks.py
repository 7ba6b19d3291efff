"""GGUF's types with codebooks, IQ1_S to IQ3_S, as blocks of numbers that products multiply.

A file has the number of a codebook's line for each 4 or 8 elements, and signs. A line's elements are some of 3 or 8
magnitudes; in `numba_kernels.blocks` each element has its magnitude's number and its sign, in 3 or 4 bits.
Neighbours stand in the four bytes of a word: a line is a word, and so are the signs of 8 elements. Nothing is rounded.

The lines are those of llama.cpp's `ggml-common.h` (https://github.com/ggml-org/llama.cpp, MIT). As numbers whose first
digit counts least, to the base of 3 or 8, they are sorted: so a codebook is a set, written as one bit for each number
that a line could be (zlib, base 85).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from numba_kernels.blocks import BLOCKS

Array = np.ndarray[Any, Any]

_IQ1_S = (
    "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2WdTox*h^v8VtnDuD"
    "#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4"
    "l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^m"
    "WiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXvHn!_Ontv"
    "Sw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90"
    "?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy"
    "0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}u@dX;b%ns9v~6p49"
    "X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1"
)
_IQ2_XXS = (
    "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI!#Zg_{KuzkVd4Mw`"
    "?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjU"
    "UWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
)
_IQ2_XS = (
    "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-fCU6QVt|)*=>oJ=N8"
    "h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^i"
    "qGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx"
    "4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC"
)
_IQ2_S = (
    "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh^u5FBBgC>LAkBEEt"
    "arKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U"
    "9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OB"
    "C|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6"
)
_IQ3_XXS = (
    "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)&}FY<X@1m|7IGsjrX>q7"
    "@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sM"
    "gqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5"
)
_IQ3_S = (
    "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{OU0lD_x2OXCI"
    "^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1"
    "ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR("
    "zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
)

_ELEMENTS = np.arange(8)
_IN_TWO_BITS = 8 * (_ELEMENTS % 4) + 2 * (_ELEMENTS // 4)  # a place in the word for each of a line's elements
_IN_FOUR_BITS = 8 * (_ELEMENTS % 4) + 4 * (_ELEMENTS // 4)


def _lines(codebook: str, base: int, places: Array) -> Any:
    """The words of a codebook's lines, by their numbers."""
    bits = np.frombuffer(zlib.decompress(base64.b85decode(codebook)), np.uint8)
    lines = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    digits = lines[:, None] // base ** np.arange(len(places)) % base
    return (digits << places).sum(1).astype(np.uint32)


def _signs(places: Array) -> Any:
    """The words of the signs of 8 elements, by their byte."""
    return ((np.arange(256)[:, None] >> _ELEMENTS & 1) << places).sum(1).astype(np.uint32)


_LINES_OF_1 = _lines(_IQ1_S, 3, _IN_TWO_BITS)
_LINES_OF_2 = {
    name: _lines(book, 3, _IN_TWO_BITS) for name, book in (("XXS", _IQ2_XXS), ("XS", _IQ2_XS), ("S", _IQ2_S))
}
_LINES_OF_3 = {name: _lines(book, 8, _IN_FOUR_BITS[:4]) for name, book in (("XXS", _IQ3_XXS), ("S", _IQ3_S))}
_SIGN_BITS, _FOURTH_BITS = _signs(8 * (_ELEMENTS % 4) + _ELEMENTS // 4), _signs(_IN_FOUR_BITS + 3)
_WITH_PARITY = np.array([each | (each.bit_count() & 1) << 7 for each in range(128)], np.uint8)
"""Eight signs by their first seven; the last makes their number even."""


def _low_first(packed: Array, shifts: range) -> Any:
    """`[n, m]` -> `[n, m * len(shifts)]`: each element moved down by these."""
    moved = packed[..., None] >> np.array(shifts, packed.dtype)
    return moved.reshape(len(packed), -1)


def _seven_signs(words: Array) -> Any:
    """Bytes of signs `[n, 4 m]` out of words `[n, m]` with four times seven of them."""
    return _WITH_PARITY[_low_first(words, range(0, 28, 7)) & np.uint32(127)]


def _pairs(nibbles: Array) -> Any:
    """`[n, m]` of four bits -> bytes `[n, m / 2]`, low halves first."""
    return (nibbles[:, ::2] | nibbles[:, 1::2] << nibbles.dtype.type(4)).astype(np.uint8)


def _kept(name: str, scale: Array, factor: float, scales: Array, **words: Array) -> Array:
    blocks = np.empty(len(scale), BLOCKS[name].fields)
    blocks["d"], blocks["scales"] = scale.astype(np.float32) * np.float32(factor), scales
    for field, value in words.items():
        blocks[field] = value.view(np.uint8)
    return blocks


def _of_two_bits(name: str, scale: Array, scales: Array, lines: Array, signs: Array) -> Array:
    """`lines` are words and `signs` bytes of 8 elements each, `[n, 32]`."""
    bits = _SIGN_BITS[signs] << np.tile(np.arange(0, 8, 2, dtype=np.uint32), 8)
    q, signs = lines[:, ::2] | lines[:, 1::2] << np.uint32(4), np.bitwise_or.reduce(bits.reshape(-1, 8, 4), axis=2)
    return _kept(name, scale, 0.125, scales, q=q, signs=signs)


def _of_four_bits(name: str, scale: Array, factor: float, scales: Array, lines: Array, signs: Array) -> Array:
    """`lines` are words of 4 elements `[n, 64]`, `signs` bytes of 8."""
    words = lines[:, ::2] | lines[:, 1::2] << np.uint32(4) | _FOURTH_BITS[signs]
    return _kept(name, scale, factor, scales, q=words)


def _iq1_s(blocks: Array) -> Array:
    high = blocks["high"]
    lines = _LINES_OF_1[blocks["q"] | (_low_first(high, range(0, 12, 3)) & np.uint16(7)) << np.uint16(8)]
    signs = np.repeat((high >> np.uint16(15)).astype(np.uint8) * np.uint8(255), 4, axis=1)
    scales = (high >> np.uint16(12) & np.uint16(7)).astype(np.uint8) * np.uint8(17)
    return _of_two_bits("IQ1", blocks["d"], scales, lines, signs)


def _iq1_m(blocks: Array) -> Array:
    """The scale's four nibbles lie above four times three scales of three bits."""
    scales, high = blocks["scales"], _low_first(blocks["high"], range(0, 8, 4))
    bits = (scales >> np.uint16(12) << np.arange(0, 16, 4, dtype=np.uint16)).sum(1, dtype=np.uint16)
    lines = _LINES_OF_1[blocks["q"] | (high & np.uint8(7)).astype(np.uint16) << np.uint16(8)]
    signs = (high >> np.uint8(3) & np.uint8(1)) * np.uint8(255)
    groups = _low_first(scales, range(0, 12, 3)) & np.uint16(7)
    return _of_two_bits("IQ1", bits.view(np.float16), _pairs(groups), lines, signs)


def _iq2_xxs(blocks: Array) -> Array:
    words = blocks["q"].view("<u4").reshape(-1, 8, 2)
    lines = _LINES_OF_2["XXS"][np.ascontiguousarray(words[..., 0]).view(np.uint8)]
    scales = (words[..., 1] >> np.uint32(28)).astype(np.uint8) * np.uint8(17)
    return _of_two_bits("IQ2", blocks["d"], scales, lines, _seven_signs(words[..., 1]))


def _iq2_xs(blocks: Array) -> Array:
    lines, signs = _LINES_OF_2["XS"][blocks["q"] & np.uint16(511)], _WITH_PARITY[blocks["q"] >> np.uint16(9)]
    return _of_two_bits("IQ2", blocks["d"], blocks["scales"], lines, signs)


def _iq2_s(blocks: Array) -> Array:
    high = (_low_first(blocks["high"], range(0, 8, 2)) & np.uint8(3)).astype(np.uint16)
    lines = _LINES_OF_2["S"][blocks["q"] | high << np.uint16(8)]
    return _of_two_bits("IQ2", blocks["d"], blocks["scales"], lines, blocks["signs"])


def _iq3_xxs(blocks: Array) -> Array:
    signs, scales = _seven_signs(blocks["signs"]), (blocks["signs"] >> np.uint32(28)).astype(np.uint8)
    return _of_four_bits("IQ3_XXS", blocks["d"], 0.25, _pairs(scales), _LINES_OF_3["XXS"][blocks["q"]], signs)


def _iq3_s(blocks: Array) -> Array:
    high = np.unpackbits(blocks["high"], axis=1, bitorder="little").astype(np.uint16)
    lines = _LINES_OF_3["S"][blocks["q"] | high << np.uint16(8)]
    return _of_four_bits("IQ3_S", blocks["d"], 1.0, blocks["scales"], lines, blocks["signs"])


_D = ("d", "<f2")
CODEBOOK_TYPES: dict[str, tuple[list[Any], str, Callable[[Array], Array]]] = {
    "IQ1_S": ([_D, ("q", "u1", 32), ("high", "<u2", 8)], "IQ1", _iq1_s),
    "IQ1_M": ([("q", "u1", 32), ("high", "u1", 16), ("scales", "<u2", 4)], "IQ1", _iq1_m),
    "IQ2_XXS": ([_D, ("q", "u1", 64)], "IQ2", _iq2_xxs),
    "IQ2_XS": ([_D, ("q", "<u2", 32), ("scales", "u1", 8)], "IQ2", _iq2_xs),
    "IQ2_S": ([_D, ("q", "u1", 32), ("signs", "u1", 32), ("high", "u1", 8), ("scales", "u1", 8)], "IQ2", _iq2_s),
    "IQ3_XXS": ([_D, ("q", "u1", 64), ("signs", "<u4", 8)], "IQ3_XXS", _iq3_xxs),
    "IQ3_S": (
        [_D, ("q", "u1", 64), ("high", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)], "IQ3_S", _iq3_s,
    ),
}  # fmt: skip
"""A file's block of 256 elements, the name of the block that it becomes, and how."""
