"""The cutters over text: every way of cutting the input into pieces gives the same output."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.text.stream import Piece, RegionSplitter, StopCutter, held_back

THINK = ("<think>", "</think>")
TOOL = ("<tool_call>", "</tool_call>")


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def cut(stops: list[str], parts: list[str]) -> tuple[str, bool]:
    cutter = StopCutter(stops)
    out = "".join(cutter.feed(part) for part in parts)
    return out + cutter.flush(), cutter.stopped


@pytest.mark.parametrize(
    ("text", "stops", "want", "stopped"),
    [
        ("hello world", [], "hello world", False),
        ("hello world", ["wor"], "hello ", True),
        ("hello world", ["xyz"], "hello world", False),
        ("abcabd", ["abd"], "abc", True),  # the failed first match is given back
        ("aab", ["ab"], "a", True),
        ("one two", ["two", "one"], "", True),  # the first to be complete wins, whatever the order
        ("abcd", ["cd", "bcd"], "a", True),
        ("ends with a star", ["star!"], "ends with a star", False),
        ("naïve 🐉 fire", ["🐉"], "naïve ", True),
    ],
)
def test_stop_strings(text, stops, want, stopped):
    assert cut(stops, [text]) == (want, stopped)
    assert cut(stops, list(text)) == (want, stopped)


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 99), max_size=8),
)
def test_stop_cutting_does_not_depend_on_the_pieces(text, stops, cuts):
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    want = text[: sum(min(found))] if found else text
    assert cut(stops, pieces_of(text, cuts)) == (want, bool(found))


def test_nothing_comes_after_a_stop():
    cutter = StopCutter(["x"])
    assert cutter.feed("axb") == "a"
    assert cutter.feed("c") == ""
    assert cutter.flush() == ""


def test_held_back_is_no_more_than_a_marker_needs():
    assert held_back("text <thi", ["<think>"]) == 4
    assert held_back("text <think>", ["<think>"]) == 0
    assert held_back("text", ["<think>"]) == 0
    assert held_back("<<", ["<think>"]) == 1


def split(parts: list[str], *, think=THINK, tool=TOOL, in_reasoning=False) -> list[Piece]:
    splitter = RegionSplitter(think, tool, in_reasoning=in_reasoning)
    found = [piece for part in parts for piece in splitter.feed(part)] + splitter.flush()
    joined: list[Piece] = []
    for piece in found:
        if joined and joined[-1].kind == piece.kind != "tool":
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def content(text: str) -> Piece:
    return Piece("content", text)


def reasoning(text: str) -> Piece:
    return Piece("reasoning", text)


def tool(text: str, raw: str | None = None) -> Piece:
    return Piece("tool", text, raw if raw is not None else f"<tool_call>{text}</tool_call>")


REGIONS = [
    ("plain", [content("plain")]),
    ("<think>why</think>because", [reasoning("why"), content("because")]),
    ("a<think>b</think>c<think>d</think>", [content("a"), reasoning("b"), content("c"), reasoning("d")]),
    ("<tool_call>f {}</tool_call>", [tool("f {}")]),
    ("x<tool_call>f</tool_call><tool_call>g</tool_call>y", [content("x"), tool("f"), tool("g"), content("y")]),
    ("<think>so<tool_call>f</tool_call>", [reasoning("so"), tool("f")]),
    ("<think>cut off", [reasoning("cut off")]),
    ("<tool_call>cut off", [tool("cut off", "<tool_call>cut off")]),
    ("almost <thin", [content("almost <thin")]),
    ("a < b <think>x</think>", [content("a < b "), reasoning("x")]),
    ("<tool_call></tool_call>", [tool("")]),
]


@pytest.mark.parametrize(("text", "want"), REGIONS)
def test_regions(text, want):
    assert split([text]) == want
    assert split(list(text)) == want


@given(st.sampled_from(REGIONS), st.lists(st.integers(0, 99), max_size=8))
def test_regions_do_not_depend_on_the_pieces(case, cuts):
    text, want = case
    assert split(pieces_of(text, cuts)) == want


def test_a_prompt_may_open_the_reasoning():
    assert split(["why</think>because"], in_reasoning=True) == [reasoning("why"), content("because")]


def test_without_markers_everything_is_content():
    assert split(["<think>a</think>"], think=None, tool=None) == [content("<think>a</think>")]


def test_a_tool_call_may_have_no_closing_marker():
    assert split(["a[TOOL]f {}"], tool=("[TOOL]", "")) == [content("a"), tool("f {}", "[TOOL]f {}")]
