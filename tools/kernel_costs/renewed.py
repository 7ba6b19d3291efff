"""A page of the kernel report of which some cases or kernels were examined anew."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.kernel_costs.goals import BEGIN, END

_GOALS = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END) + r"\n*", re.DOTALL)
_TITLE = re.compile(r"^## ", re.MULTILINE)
_TABLE = re.compile(r"(?P<head>\| .*\n\|[-:|]+\|\n)(?P<rows>(?:\|.*\n?)*)")
_ROW = re.compile(r"^\| (?P<name>[^|]+?) \|.*$", re.MULTILINE)
_ITEM = re.compile(r"^- (?P<name>[^:]+):.*$", re.MULTILINE)
_EXAMINED = re.compile(r"^\d+(?= of the \d+ registered kernels)", re.MULTILINE)
SCATTERED, OFFENDS, CLEAN = "Where sectors cannot be filled:", "What it does not:", "Nothing else offends."


def renewed(before: str, page: str, names: Sequence[str]) -> str:
    """`page`, which tells of some cases or kernels, with what `before` tells of others: sections, rows of tables, and
    what these are found to do, but without the goals (`goals.carried`). Rows are in the order of `names`; those of
    other names are left out, and so are all of a table that has other columns now."""
    if not before:
        return page
    old, new = _sections(_GOALS.sub("", before)), _sections(page)
    found = []
    for title, text in {**old, **new}.items():
        is_in_both = title in old and title in new
        found.append(_merged(old[title], text, list(names)) if is_in_both else text)
    return "## ".join(found)


def _sections(page: str) -> dict[str, str]:
    """The text in front of the first title, under "", and each section by its title."""
    head, *rest = _TITLE.split(page)
    return {"": head, **{each.split("\n", 1)[0]: each for each in rest}}


def _merged(old: str, new: str, names: list[str]) -> str:
    before, table = _TABLE.search(old), _TABLE.search(new)
    if before is None or table is None or before["head"] != table["head"]:
        return new
    ours = _named(_ROW, table["rows"])
    rows = _named(_ROW, before["rows"]) | ours
    kept = [rows[name] for name in names if name in rows]
    new = new[: table.start("rows")] + "\n".join(kept) + "\n" + new[table.end() :]
    new = _EXAMINED.sub(str(len(kept)), new)
    for title in (SCATTERED, OFFENDS):
        others = [item for name, item in _named(_ITEM, _list(old, title)).items() if name in rows and name not in ours]
        if others and title == OFFENDS:
            new = new.replace(CLEAN, OFFENDS)
        if others:
            at = new.index(title) + len(title) + 2
            new = new[:at] + "\n".join(others) + "\n" + new[at:]
    return new


def _list(text: str, title: str) -> str:
    """The items under a line that ends with a colon."""
    _, _, rest = text.partition(f"{title}\n\n")
    return rest.split("\n\n", 1)[0]


def _named(pattern: re.Pattern[str], text: str) -> dict[str, str]:
    return {match["name"]: match[0] for match in pattern.finditer(text)}
