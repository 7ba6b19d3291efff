"""Formulas and code on the page: found in Markdown without harm to either, also while they come, and drawn by the
browser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.conftest import Served, say
from tests.server.page.browser import answers, ask, needs_browser, opened, wait_idle

ANSWER = r"""The roots of \(a_1x^2 + b_1x + c_1 = 0\) are *not* $x_1 * x_2$ but **$\frac{-b_1}{2a_1}$**, as
\[ x_{1,2} = 1 \] says.

\[
x
- y
= \sqrt{b_1^2 - 4a_1c_1}
\]

1. In a list: $$\sum_{i=1}^{n} i$$
2. And
   $$
   \begin{aligned} a &= b \\ c &= d \end{aligned}
   $$

| set | size |
|---|---|
| \(\{x : |x| < 1\}\) | $|S|$ |

> quoted $\alpha_1$ and $\beta_1$

It costs $5 or $10, US$3 and $20_000 a year; **$5** and **$6**; `$x$` stays,
\$y\$ stays, $HOME/$USER too, the $n$th not.

$$ \begin{tikzpicture} a_1 * b_1 * c_1 \end{tikzpicture} $$

```python
def f(x_1):  # $x$
    return "*x*"
```

- [x] done with $a_1$
- [ ] to do
"""

SOURCES = [
    r"a_1x^2 + b_1x + c_1 = 0",
    r"x_1 * x_2",
    r"\frac{-b_1}{2a_1}",
    r"x_{1,2} = 1",
    "x\n- y\n= \\sqrt{b_1^2 - 4a_1c_1}",
    r"\sum_{i=1}^{n} i",
    r"\begin{aligned} a &= b \\ c &= d \end{aligned}",
    r"\{x : |x| < 1\}",
    "|S|",
    r"\alpha_1",
    r"\beta_1",
    "n",
    "a_1",
]


@needs_browser
def test_formulas_are_drawn_and_nothing_else_is_one(browser: Browser, fake: Served) -> None:
    fake.engine.script = lambda request, index: say(ANSWER)
    with opened(browser, fake.url) as page:
        ask(page, "roots?")
        wait_idle(page)
        prose = answers(page)
        expect(prose.locator("math")).to_have_count(len(SOURCES))
        assert prose.locator("math").locator("annotation").all_text_contents() == SOURCES
        expect(prose.locator(".math:not(:has(math))")).to_have_text(
            r"$$ \begin{tikzpicture} a_1 * b_1 * c_1 \end{tikzpicture} $$"
        )
        expect(prose.locator("em")).to_have_text(["not"])
        expect(prose.locator("strong")).to_have_count(3)
        amounts = prose.locator("> p", has_text="It costs")
        expect(amounts).to_contain_text("It costs $5 or $10, US$3 and $20_000 a year; $5 and $6; $x$ stays,")
        expect(amounts).to_contain_text("$y$ stays, $HOME/$USER too")
        expect(prose.locator("td")).to_have_count(2)
        expect(prose.locator("li.task input")).to_have_count(2)
        checked = prose.locator("li.task input").evaluate_all(
            "all => all.map(i => [i.checked, i.disabled, i.ariaLabel])"
        )
        assert checked == [[True, True, "done"], [False, True, "to do"]]
        assert is_laid_out_as_a_fraction(page)
        block = prose.locator(".katex-display > .katex").first
        middles = block.evaluate(
            "m => [m, m.closest('p')].map(e => e.getBoundingClientRect()).map(b => b.left + b.right)"
        )
        assert abs(middles[0] - middles[1]) < 4  # a formula with lines of its own stands in the middle
        code = prose.locator("figure code")
        expect(code).to_have_text('def f(x_1):  # $x$\n    return "*x*"', use_inner_text=True)
        expect(code.locator(".token-k")).to_have_text(["def", "return"])
        expect(code.locator(".token-f")).to_have_text("f")


def is_laid_out_as_a_fraction(page: Page) -> Any:
    """Whether the browser draws the numerator above the denominator: it knows the elements for what they are."""
    return page.evaluate(
        """() => {
            const parts = [...document.querySelector(".mfrac .vlist").children].map((part) => part.lastElementChild);
            const [below, line, above] = parts.map((part) => part.getBoundingClientRect());
            const middle = (box) => (box.top + box.bottom) / 2;
            return middle(above) < line.top && line.top < middle(below);
        }"""
    )


@needs_browser
def test_no_cut_of_a_formula_is_taken_for_markdown(browser: Browser, fake: Served) -> None:
    """As the text grows, letter by letter, no part of a formula becomes emphasis, a list or a rule; and in the end all
    is as it is at once."""
    with opened(browser, fake.url) as page:
        found = page.evaluate(
            """async ([text, cuts]) => {
                const { MarkdownView } = await import("/page/markdown.js");
                const place = () => document.body.appendChild(document.createElement("div"));
                const whole = place();
                new MarkdownView(whole).update(text);
                const grown = place();
                const view = new MarkdownView(grown);
                for (let end = 1; end <= text.length; end += 1) view.update(text.slice(0, end), true);
                view.update(text, false);
                const growing = cuts.map((source) => {
                    const element = document.createElement("div");
                    const view = new MarkdownView(element);
                    const bad = [];
                    for (let end = 1; end <= source.length; end += 1) {
                        view.update(source.slice(0, end), true);
                        const wrong = element.querySelector("em, strong, li, hr, td, blockquote, a");
                        if (wrong) bad.push(source.slice(0, end));
                    }
                    return bad[0] ?? null;
                });
                for (let round = 0; round < 200 && !whole.isEqualNode(grown); round += 1) {
                    await new Promise((resolve) => setTimeout(resolve, 25));
                }
                return { growing, differs: whole.isEqualNode(grown) ? null : [whole.innerText, grown.innerText] };
            }""",
            [
                ANSWER,
                [
                    r"see \(a_1 *b* _c_ __d__ [x](http://a.b)\)",
                    "$$\na\n- b\n+ c\n> d\n---\n| a | b |\n|---|---|\n| c | d |\n$$",
                    "so:\n\\[\n- *a*\n\\]",
                    "so: $$\n- *a*\n$$",
                    "with $a_1*b*c_1$",
                ],
            ],
        )
        assert found["growing"] == [None] * 5
        assert found["differs"] is None


@needs_browser
def test_what_a_formula_says_stays_text(browser: Browser, fake: Served) -> None:
    hostile = [
        r"\href{javascript:window.hacked=1}{x}",
        r"\text{<img src=x onerror=window.hacked=1>}",
        r"\vec{x} \fbox{y} \pmb{z}",
        r"\style{position:fixed;inset:0}{x}",
        r"\class{sheet}{x}",
        r"\unicode{x3C}script\unicode{x3E}",
        r"\htmlStyle{position: fixed}{x} \hspace{-99em}",
        r"\def\a{\a\a}\a",
        "{" * 900 + "x",
    ]
    fake.engine.script = lambda request, index: say(
        " and ".join(f"${each}$" for each in hostile) + '\n\n```html\n<script>window.hacked = 1</script>"\n```\n'
    )
    with opened(browser, fake.url) as page:
        ask(page, "hack me")
        wait_idle(page)
        expect(answers(page).locator("math")).to_have_count(3)
        expect(answers(page).locator(".math:not(:has(math))")).to_have_text([f"${each}$" for each in hostile[3:]])
        expect(answers(page).locator("code .token-k").first).to_be_visible()
        assert page.evaluate("window.hacked") is None
        attributes = answers(page).evaluate(
            "e => [...e.querySelectorAll('math *')].flatMap((each) => each.getAttributeNames())"
        )
        assert not {"href", "src"} & set(attributes)
        assert answers(page).locator("script, img, a, .sheet, [style*=position]").count() == 0


@needs_browser
@pytest.mark.exhaustive
def test_without_the_server_code_has_no_colours(browser: Browser, fake: Served) -> None:
    fake.engine.script = lambda request, index: say("so $x^2$ is\n\n```python\nx = 1\n```\n")
    expected = ("Failed to load", "the server responded")
    with opened(browser, fake.url, expected_errors=expected) as page:
        error = {"error": {"message": "busy", "code": "renderer_busy"}}
        page.route(
            "**/page/render",
            lambda route: route.fulfill(status=429, body=json.dumps(error), content_type="application/json"),
        )
        ask(page, "square?")
        wait_idle(page)
        expect(answers(page).locator("math")).to_have_count(1)
        expect(answers(page).locator("code")).to_have_text("x = 1")
        page.unroute("**/page/render")
        expect(answers(page).locator("code .token-m")).to_have_count(1)  # it has asked again


@needs_browser
@pytest.mark.exhaustive
def test_code_keeps_its_colours_while_it_grows(browser: Browser, fake: Served) -> None:
    lines = "".join(f"x_{number} = {number}  # line\n" for number in range(60))
    fake.engine.script = lambda request, index: say(f"```python\n{lines}```\n")
    fake.engine.step_s = 0.002
    with opened(browser, fake.url) as page:
        ask(page, "lines")
        code = answers(page).locator("code")
        expect(code.locator(".token-m").nth(5)).to_be_visible()
        expect(page.locator("#stop")).to_be_visible()  # it is still being written
        wait_idle(page)
        expect(code.locator(".token-c")).to_have_count(60)
        assert code.evaluate("e => e.textContent") == lines.removesuffix("\n")


DOLLARS = [
    ("it costs $5 or $10.", []),
    ("US$5 and A$6", []),
    ("from $5 to 10$ a day", []),
    ("$5-$10, $1,000–$2,000, $3/$4", []),
    ("**$5** or **10$**", []),
    ("$20k and $30k", []),
    ("5$ and 6$", []),
    ("$HOME/$USER and $PATH", []),
    ("`$x$` and \\$y\\$", []),
    ("$ x $ and $x $ and $ x$", []),
    ("$$", []),
    ("$$$ cheap $$$", []),
    ("an open $x", []),
    ("\\(x", []),
    ("$x$, $y$.", ["x", "y"]),
    ("$5x + 3$ and $2$", ["5x + 3", "2"]),
    ("the $n$th and $k$-means, $x$s", ["n", "k", "x"]),
    ("($x$) [$y$] **$z$**", ["x", "y", "z"]),
    ("$10 < x < 20$", ["10 < x < 20"]),
    ("$\\text{cost} = \\$5$ so", ["\\text{cost} = \\$5"]),
    ("$a$ costs $5", ["a"]),
    ("costs $5 where $a$ is", ["a"]),
    ("\\(a\\) \\[b\\] $$c$$", ["a", "b", "c"]),
    ("\\\\(a\\\\) stays", []),
]


@needs_browser
def test_money_is_no_formula(browser: Browser, fake: Served) -> None:
    with opened(browser, fake.url) as page:
        found = page.evaluate(
            """async (texts) => {
                const { spansOf } = await import("/page/spans.js");
                return texts.map((text) => spansOf(text).filter((s) => s.kind === "math").map((s) => s.content));
            }""",
            [text for text, _ in DOLLARS],
        )
    assert [(text, formulas) for (text, _), formulas in zip(DOLLARS, found, strict=True)] == DOLLARS
