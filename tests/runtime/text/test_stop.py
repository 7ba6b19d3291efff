"""The stop matcher against a search of the whole text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.stop import StopMatch, StopMatcher


def first_match(text: str, stops: list[str], floor: int = 0) -> StopMatch | None:
    """The occurrence that begins first, then ends first, among those that end beyond `floor`."""
    found = [
        (start, start + len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > floor
    ]
    return StopMatch(*min(found)) if found else None


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


def match_in_pieces(pieces: list[str], stops: list[str], floor: int = 0) -> StopMatch | None:
    matcher = StopMatcher(stops)
    seen, last_safe = 0, 0
    whole = "".join(pieces)
    for piece in pieces:
        seen += len(piece)
        match = matcher.push(piece, can_match=seen > floor)
        if match is not None:
            assert last_safe <= match.start, "text was declared safe and then matched"
            return match
        assert last_safe <= matcher.safe_end <= seen
        last_safe = matcher.safe_end
        assert not any(stop in whole[:last_safe] and floor == 0 for stop in stops)
    match = matcher.finish()
    assert match is None or last_safe <= match.start
    return match


texts = st.text("abc", max_size=40)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(text=texts, stops=stop_lists, places=st.lists(st.integers(0, 100)))
def test_any_cut_finds_what_the_whole_text_holds(text: str, stops: list[str], places: list[int]) -> None:
    assert match_in_pieces(cut(text, places), stops) == first_match(text, stops)


@settings(max_examples=250, deadline=None)
@given(
    text=st.text("aéb😀日", max_size=20),
    stops=st.lists(st.text("aéb😀日", min_size=1, max_size=4), min_size=1),
)
def test_one_character_at_a_time(text: str, stops: list[str]) -> None:
    assert match_in_pieces(list(text), stops) == first_match(text, stops)


@settings(max_examples=250, deadline=None)
@given(text=texts, stops=stop_lists, places=st.lists(st.integers(0, 100)), floor=st.integers(0, 30))
def test_no_match_ends_before_the_floor(text: str, stops: list[str], places: list[int], floor: int) -> None:
    pieces = [piece for part in cut(text, [*places, floor]) for piece in [part] if piece]
    if floor > len(text):
        floor = len(text)
    assert match_in_pieces(pieces, stops, floor) == first_match(text, stops, floor)


def test_a_longer_string_that_began_earlier_wins() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("abc") is None
    assert matcher.push("d") == StopMatch(0, 4, "abcd")
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("abc") is None
    assert matcher.push("x") == StopMatch(1, 3, "bc")
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("abc") is None
    assert matcher.finish() == StopMatch(1, 3, "bc")


def test_of_two_that_begin_together_the_shorter_wins_at_once() -> None:
    assert StopMatcher(["abc", "ab"]).push("ab") == StopMatch(0, 2, "ab")


def test_long_texts_take_linear_time() -> None:
    """A million characters of almost-matches; a quadratic matcher would take hours."""
    matcher = StopMatcher(["a" * 1000 + "b", "ab" * 500])
    assert matcher.push("a" * 1_000_000) is None
    assert matcher.safe_end == 1_000_000 - 1000
