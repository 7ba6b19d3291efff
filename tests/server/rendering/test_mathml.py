"""LaTeX as MathML: what formulas become, and that nothing but formulas comes through, whatever is asked for."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from latex2mathml.commands import CONVERSION_MAP, LOCAL_FONTS
from latex2mathml.symbols_parser import SYMBOLS

from server.rendering.mathml import CONTAINERS, LEAVES, LENGTHS, NUM_CHILDREN, WORDS, MathError, Tree, math_tree

CLASSES = {"boxed", "struck", "aligned", "ruled", "barred", "ruled barred"}


def nodes(tree: Tree) -> Iterator[tuple[str, dict[str, str], Any]]:
    tag, attributes, children = tree
    yield tag, attributes, children
    if not isinstance(children, str):
        for child in children:
            yield from nodes(child)


def text(tree: Tree) -> str:
    return "".join(children for _, _, children in nodes(tree) if isinstance(children, str))


def tags(latex: str, *, is_display: bool = True) -> list[str]:
    return [tag for tag, _, _ in nodes(math_tree(latex, is_display=is_display))]


@pytest.mark.parametrize(
    ("latex", "words", "has"),
    [
        (r"\frac{a}{b}", "ab", ["mfrac"]),
        (r"x_1^2 + \sqrt[3]{y}", "x12+y3", ["msubsup", "mroot"]),
        (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", "a=bc=d", ["mtable", "mtr", "mtd"]),
        (r"a = b \\ c = d", "a=bc=d", ["mtable"]),
        (r"\begin{equation} a \label{eq:1} \end{equation}", "a", ["mi"]),
        (r"\begin{gathered} a \\ b \end{gathered}", "ab", ["mtable"]),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "(1234)", ["mtable"]),
        (r"\lim_{x \to 0} \sum_i \bigcup_j", "limx→0∑i⋃j", ["munder"]),
        (r"\mathbb{RP} \mathbf{Ax} \mathfrak{C} \boldsymbol{\alpha}", "ℝℙ𝐀𝐱ℭ𝜶", ["mi"]),
        (r"a \pm \lfloor b \rfloor", "a±⌊b⌋", ["mo"]),
        (r"\text{50\% of $x$ <b>}", "50%\xa0of\xa0$x$\xa0<b>", ["mtext"]),
        (r"\boxed{42} \cancel{x}", "42x", ["mrow"]),
    ],
)
def test_formulas(latex: str, words: str, has: list[str]) -> None:
    assert text(math_tree(latex, is_display=True)) == words
    assert set(has) <= set(tags(latex))


@pytest.mark.parametrize(
    "latex",
    [
        r"\newcommand{\a}{\a\a}\a",
        r"\def\a{\b\b}\def\b{\c\c}\a",
        r"\frac{a}",
        r"\begin{tikzpicture} x \end{tikzpicture}",
        r"\unicode{xD800}",
        r"\unicode{x110000}",
        "{" * 300 + "x" + "}" * 300,
        "",
    ],
)
def test_what_is_no_formula_is_refused(latex: str) -> None:
    with pytest.raises(MathError):
        math_tree(latex, is_display=True)


@pytest.mark.parametrize(
    ("latex", "num_spaces"), [(r"n \log_2 n", 2), (r"\sin x", 1), (r"\sin(x)", 0), (r"a + \sin^2 x", 1), ("a b", 0)]
)
def test_a_function_stands_apart_from_its_argument(latex: str, num_spaces: int) -> None:
    assert tags(latex).count("mspace") == num_spaces


def test_links_styles_and_lengths_do_not_come_through() -> None:
    latex = (
        r"\href{javascript:alert(1)}{a} \style{position:fixed}{b} \class{toast}{c} \color{white}{d}"
        r"\hspace{-1000em} \raise{99em}{e} \rule{500em}{500em} \Huge f \hspace{2em}"
    )
    attributes = [attributes for _, attributes, _ in nodes(math_tree(latex, is_display=True)) if attributes]
    assert attributes == [{"display": "block"}, *[{"width": "2em"}]]


def test_only_what_is_listed_comes_through() -> None:
    """Random LaTeX of all commands that the library knows, with everything that can stand around them."""
    draw = random.Random(7)
    commands = sorted({*CONVERSION_MAP, *LOCAL_FONTS, *draw.sample(sorted(SYMBOLS), 200)})
    parts = [r"{", r"}", "^", "_", "&", r"\\", "[", "]", "'", "1em", "-9em", "<b>", '"', "x", "12", r"\href{x}",
             r"\left(", r"\right)", r"\style{x}", r"\class{x}", r"\color{red}", r"\begin{array}{c|c}", r"\end{array}",
             r"\hline",
             r"\begin{cases}", r"\end{cases}", r"\text{a}", r"\unicode{x41}", r"\mathbb{R}"]  # fmt: skip
    num_trees = 0
    for _ in range(1500):
        latex = " ".join(draw.choice(commands if draw.random() < 0.6 else parts) for _ in range(draw.randint(1, 9)))
        try:
            tree = math_tree(latex, is_display=draw.random() < 0.5)
        except MathError:
            continue
        num_trees += 1
        for tag, attributes, children in nodes(tree):
            assert tag in LEAVES | CONTAINERS, latex
            assert isinstance(children, str) == (tag in LEAVES), latex
            assert len(children) == NUM_CHILDREN.get(tag, len(children)), latex
            for name, value in attributes.items():
                if name in WORDS:
                    assert value in WORDS[name], latex
                elif name == "class":
                    assert value in CLASSES, latex
                else:
                    assert name in LENGTHS, latex
                    assert re.fullmatch(r"[+-]?[\d.]*[a-z]{0,2}", value), latex
    assert num_trees > 300
