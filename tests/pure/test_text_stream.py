"""Cutting and splitting text: every way of cutting the input into pieces gives the same output."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.testing import FakeTokenizer, parse_words
from mlx_serve.text.calls.readers import Frame, WholeCalls
from mlx_serve.text.splitter import Calls, Layout, RegionSplitter, held_back
from mlx_serve.text.stops import StopCutter, StopSearch
from mlx_serve.text.symbols import Piece, Symbols, is_symbol

CONTROLS = {1: "<think>", 2: "</think>", 3: "<tool_call>", 4: "</tool_call>", 5: "<|open|>", 6: "<|sep|>", 7: "<eos>"}
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


@pytest.mark.parametrize("n_stops", [1, 64])
def test_stop_strings_that_almost_match_cost_a_step_a_character(n_stops):
    """Not one for each character that is held back: those are compared once."""

    class Counted(str):
        n_asked = 0

        def __getitem__(self, key):
            Counted.n_asked += 1
            return super().__getitem__(key)

    n_chars = 3000
    search = StopSearch([Counted("a" * 1000 + chr(200 + i)) for i in range(n_stops)])
    Counted.n_asked = 0
    for char in "a" * n_chars:
        assert search.feed(char) is None
    assert search.n_held == 1000
    assert Counted.n_asked <= 4 * n_stops * n_chars


@given(st.text("ab", max_size=60), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(text, stops):
    search = StopSearch(stops)
    if search.feed(text) is None:
        assert search.n_held == held_back(text, stops)


def test_a_stop_string_does_not_reach_over_a_flush():
    cutter = StopCutter(["stop"])
    assert (cutter.feed("st"), cutter.flush(), cutter.feed("op"), cutter.stopped) == ("", "st", "op", False)
    assert (cutter.feed(" stop"), cutter.stopped) == (" ", True)


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


# Regions. In these texts «x» is a control token, <x> is text.


class Case:
    """A splitter with markers that are control tokens, or text."""

    def __init__(self, *, controls: bool = True, tools: bool = True, think=THINK, tool=TOOL, extra=()) -> None:
        self.symbols = Symbols(CONTROLS if controls else {})
        mark = self.symbols.marker
        edges = {"content": [(mark(think[0]), "reasoning")], "reasoning": [(mark(think[1]), "content")]}
        edges["content"] += [(mark(marker), "content") for marker in extra]
        if tools:
            edges["content"].append((mark(tool[0]), "call"))
            edges["reasoning"].append((mark(tool[0]), "call"))
        self.layout = Layout({key: tuple(value) for key, value in edges.items()})
        frame = Frame(tool[1], (tool[0],))
        self.calls = Calls(lambda _: WholeCalls(frame, lambda text: parse_words(text, ())), closing=mark(tool[1]))
        self.calls = self.calls if tools else None

    def text(self, written: str) -> str:
        for token, control in CONTROLS.items():
            written = written.replace(f"«{control.strip('<>')}»", self.symbols.char(token))
        assert "«" not in written
        return written

    def split(self, parts: list[str], *, cut=False, in_reasoning=False) -> list[tuple[str, str]]:
        splitter = RegionSplitter(self.layout, self.symbols, calls=self.calls, in_reasoning=in_reasoning)
        found = [piece for part in parts for piece in splitter.feed(part)] + splitter.flush(cut=cut)
        out: list[tuple[str, str]] = []
        for piece in found:
            assert not any(map(is_symbol, piece.text))
            if out and out[-1][0] == piece.kind != "call":
                out[-1] = (piece.kind, out[-1][1] + piece.text)
            else:
                out.append((piece.kind, piece.text))
        return out

    def each_way(self, written: str, **kwargs) -> list[tuple[str, str]]:
        """The result, which is the same for all ways of cutting the text in two, and for single characters."""
        text = self.text(written)
        want = self.split([text], **kwargs)
        assert self.split(list(text), **kwargs) == want
        for i in range(len(text)):
            assert self.split([text[:i], text[i:]], **kwargs) == want
        return want


def content(text: str) -> tuple[str, str]:
    return ("content", text)


def reasoning(text: str) -> tuple[str, str]:
    return ("reasoning", text)


def call(name: str, arguments: str) -> list[tuple[str, str]]:
    return [("call", name), ("arguments", arguments)]


REGIONS = [
    ("plain", [content("plain")]),
    ("«think»why«/think»because", [reasoning("why"), content("because")]),
    ("a«think»b«/think»c«think»d«/think»", [content("a"), reasoning("b"), content("c"), reasoning("d")]),
    ("«tool_call»f {}«/tool_call»", call("f", "{}")),
    (
        "x«tool_call»f 1«/tool_call»«tool_call»g 2«/tool_call»y",
        [content("x"), *call("f", "1"), *call("g", "2"), content("y")],
    ),
    ("«think»so«tool_call»f 1«/tool_call»", [reasoning("so"), *call("f", "1")]),
    ("«think»cut off", [reasoning("cut off")]),
    ("«tool_call»f 1", call("f", "1")),
    ("«tool_call»f 1«tool_call»g 2", [*call("f", "1"), *call("g", "2")]),
    # Malformed: as it was written, markers included.
    ("«tool_call»nonsense«/tool_call» y", [content("<tool_call>nonsense</tool_call> y")]),
    ("«tool_call»«/tool_call»", [content("<tool_call></tool_call>")]),
    ("«tool_call»cut", [content("<tool_call>cut")]),
    # Space at a call belongs to the template; any other is the model's.
    (
        "Sure.\n\n«tool_call»f 1«/tool_call»\n«tool_call»g 2«/tool_call»\n",
        [content("Sure."), *call("f", "1"), *call("g", "2")],
    ),
    ("«tool_call»f 1«/tool_call»\n\nDone. ", [*call("f", "1"), content("Done. ")]),
    ("«think»why«/think»\n\nbecause\n", [reasoning("why"), content("\n\nbecause\n")]),
    # A control token where it means nothing is dropped.
    ("a«/think»b«/tool_call»c«eos»", [content("abc")]),
    ("«think»a«think»b«/think»c", [reasoning("ab"), content("c")]),
    # Text that looks like a marker is text, whole or half.
    ("`<think>` and <tool_call>x</tool_call>", [content("`<think>` and <tool_call>x</tool_call>")]),
    ("almost <thin", [content("almost <thin")]),
]


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize(("text", "want"), REGIONS)
def test_regions_between_control_tokens(text, want, cut_off):
    if cut_off and not text.endswith("»"):
        # What was cut off is neither a call nor text.
        want = {
            "«tool_call»f 1": [],
            "«tool_call»cut": [],
            "«tool_call»f 1«tool_call»g 2": call("f", "1"),
        }.get(text, want)
    assert Case().each_way(text, cut=cut_off) == want


@given(st.sampled_from(REGIONS), st.lists(st.integers(0, 99), max_size=8))
def test_regions_do_not_depend_on_the_pieces(case, cuts):
    written, want = case
    splitting = Case()
    assert splitting.split(pieces_of(splitting.text(written), cuts)) == want


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "x", " 1", "\n"]), max_size=12)
)
def test_text_markers_do_not_depend_on_the_pieces(parts):
    Case(controls=False).each_way("".join(parts))
    Case(controls=False).each_way("".join(parts), cut=True)


def test_markers_that_are_text_are_found_in_the_text():
    case = Case(controls=False)
    assert case.each_way("<think>a</think>b<tool_call>f 1</tool_call>") == [
        reasoning("a"),
        content("b"),
        *call("f", "1"),
    ]


def test_half_a_marker_is_dropped_only_where_the_answer_was_cut_off():
    case = Case(controls=False)
    assert case.each_way("text <tool_c") == [content("text <tool_c")]
    assert case.each_way("text <tool_c", cut=True) == [content("text ")]
    assert case.each_way("text <", cut=True) == [content("text <")]
    assert case.each_way("<think>so </th", cut=True) == [reasoning("so ")]


def test_a_marker_of_several_tokens_never_leaks():
    case = Case(think=("<|open|>think<|sep|>", "</think>"), extra=["<|open|>response<|sep|>"])
    assert case.each_way("«|open|»think«|sep|»a«/think»b") == [reasoning("a"), content("b")]
    assert case.each_way("«|open|»response«|sep|»b") == [content("b")]
    for half in ("«|open|»", "«|open|»th", "«|open|»think"):
        for cut_off in (False, True):
            assert case.each_way("b" + half, cut=cut_off) == [content("b")]
    assert case.each_way("<|open|>think<|sep|>") == [content("<|open|>think<|sep|>")]


def test_a_prompt_may_open_the_reasoning():
    assert Case().each_way("why«/think»because", in_reasoning=True) == [reasoning("why"), content("because")]


def test_without_tools_there_are_no_calls():
    assert Case(controls=False, tools=False).each_way("<tool_call>f 1</tool_call>") == [
        content("<tool_call>f 1</tool_call>")
    ]


def test_a_tool_call_may_have_no_closing_marker():
    case = Case(tool=("<tool_call>", ""))
    assert case.each_way("a«tool_call»f 1«tool_call»g 2") == [content("a"), *call("f", "1"), *call("g", "2")]


def test_pieces_know_their_place_in_the_text():
    case = Case()
    splitter = RegionSplitter(case.layout, case.symbols, calls=case.calls)
    text = case.text("ab«think»c«/think»d«eos»e")
    pieces = splitter.feed(text) + splitter.flush()
    assert [(p.text, p.start, p.end) for p in pieces] == [("ab", 0, 2), ("c", 3, 4), ("d", 5, 6), ("e", 7, 8)]
    assert pieces[0] == Piece("content", "ab")


def test_a_symbol_stands_for_one_token():
    symbols = Symbols(CONTROLS)
    text = symbols.marker("<|open|>think<|sep|>")
    assert (len(text), symbols.restore(text), symbols.visible(text)) == (7, "<|open|>think<|sep|>", "think")
    assert symbols.marker("no control") == "no control"
    tokenizer = FakeTokenizer()
    assert not any(is_symbol(char) for char in tokenizer.decode(range(256)))
