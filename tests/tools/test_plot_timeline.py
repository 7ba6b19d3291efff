"""The timeline's picture: rows, colours, places, and what is no trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from runtime.bench.scheduling.schedule import chrome_trace
from tests.runtime.bench.scheduling.test_scheduling_benches import story
from tools import plot_timeline

SVG = "{http://www.w3.org/2000/svg}"


def rectangles(svg: str, colour: str) -> list[tuple[float, float]]:
    """(left, right) of each bar of this colour that has a title."""
    found = [
        (float(each.get("x") or "nan"), float(each.get("width") or "nan"))
        for each in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if each.get("fill") == colour and each.find(f"{SVG}title") is not None
    ]
    return [(x, x + width) for x, width in found]


def test_a_row_a_request(tmp_path: Path) -> None:
    trace, out = tmp_path / "out.json", tmp_path / "out.svg"
    trace.write_text(json.dumps(chrome_trace(story(), {"a": 9.5, "b": 11.5})))
    assert plot_timeline.main([str(trace), "-o", str(out)]) == 0
    svg = out.read_text()
    counts = {kind: len(rectangles(svg, colour)) for kind, colour in plot_timeline.COLOURS.items()}
    assert counts == {"queued": 2, "prefill": 4, "decode": 2, "preempted": 1}
    assert len(rectangles(svg, "#8a8a8a")) == 5  # steps
    # 6.5 s over 1060 pixels from 120 on; A is out from 3.5 s to 4.5 s.
    [(left, right)] = rectangles(svg, plot_timeline.COLOURS["preempted"])
    assert left == pytest.approx(120 + 3.5 / 6.5 * 1060, abs=0.02)
    assert right == pytest.approx(120 + 4.5 / 6.5 * 1060, abs=0.02)
    assert re.findall(r">([ab])</text>", svg) == ["a", "b"]


def test_a_part_of_the_time() -> None:
    timeline = plot_timeline.read_timeline(chrome_trace(story(), {"a": 9.5, "b": 11.5}))
    svg = plot_timeline.svg(timeline, 600.0, 1400.0)
    assert rectangles(svg, plot_timeline.COLOURS["prefill"]) == [(120.0, 1180.0)]
    assert ">b</text>" not in svg
    with pytest.raises(plot_timeline.TraceFileError):
        plot_timeline.svg(timeline, 5.0, 5.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting"),
        ("[]", "traceEvents"),
        ('{"traceEvents": []}', "no processes"),
        (json.dumps(chrome_trace([], {})), "no request"),
    ],
)
def test_what_is_no_timeline(tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    assert plot_timeline.main([str(path), "-o", str(tmp_path / "out.svg")]) == 2
    assert words in capsys.readouterr().err
