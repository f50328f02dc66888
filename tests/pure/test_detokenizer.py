"""Tokens to text as they come, on the fake tokenizer, whose tokens are single bytes, and on tokens of several."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.testing import EOS, FakeTokenizer
from mlx_serve.text.detokenizer import Detokenizer


def texts(tokens, context=()):
    detokenizer = Detokenizer(FakeTokenizer(), FakeTokenizer.hidden_ids, context)
    return [detokenizer.add(token) for token in tokens]


class Parts:
    """Tokens of any bytes."""

    def __init__(self, parts):
        self.parts = parts

    def token_bytes(self, token):
        return self.parts[token]

    def decode(self, ids):
        return b"".join(self.parts[i] for i in ids).decode("utf-8", "replace")


# With the character that decoders also write for what is none.
TEXT = st.text("\ufffdaé🐉", max_size=20) | st.text(max_size=40)


@given(TEXT, st.lists(st.integers(0, 200), max_size=60))
def test_the_text_goes_out_whenever_a_token_ends_with_a_character(text, cuts):
    raw = text.encode()
    whole = set(itertools.accumulate((len(char.encode()) for char in text), initial=0))
    edges = [0]
    for cut in sorted({len(raw), *(cut % (len(raw) + 1) for cut in cuts)} - {0}):
        # Of tokens that end inside a character it takes four in a row.
        if cut in whole or len(edges) < 4 or not whole.isdisjoint(edges[-4:]):
            edges.append(cut)
    tokens = Parts([raw[a:b] for a, b in itertools.pairwise(edges)])
    detokenizer = Detokenizer(tokens, ())
    sent = ""
    for token, end in enumerate(edges[1:]):
        sent += detokenizer.add(token)
        assert raw.startswith(sent.encode())
        assert end not in whole or sent == raw[:end].decode()


@given(TEXT, TEXT)
def test_a_completion_is_what_follows_its_prompt(prompt, text):
    assert "".join(texts(text.encode(), context=prompt.encode())) == text


def test_the_replacement_character_itself_is_not_lost():
    assert texts("a\ufffd".encode()) == ["a", "", "", "\ufffd"]
    # Bytes that are no character look the same, but may still become one.
    assert texts(b"a\xef\xbf") == ["a", "", ""]


def test_a_character_comes_when_it_is_whole():
    assert texts("é🐉".encode()) == ["", "é", "", "", "", "🐉"]


def test_what_is_cut_off_inside_a_character_is_dropped():
    assert "".join(texts("ab🐉".encode()[:-1])) == "ab"


def test_bytes_that_make_no_character_do_not_hold_the_text_up():
    assert "".join(texts([0xFF] * 8 + [0x41])).endswith("A")


def test_control_tokens_are_not_shown():
    assert texts([0x41, EOS, 0x42]) == ["A", "", "B"]


def test_the_prompt_is_context_and_not_output():
    assert texts(b"!", context=b"hello") == ["!"]
    # A prompt that ends inside a character is no context.
    assert texts(b"!", context="é".encode()[:1]) == ["!"]


class Spaced:
    """A decoder that, as sentencepiece ones do, drops the space before a text's first word."""

    words = ("", " once", " upon", " a")

    def token_bytes(self, token):
        return self.words[token].encode()

    def decode(self, ids):
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def test_leading_spaces_follow_the_neighbours():
    chat = Detokenizer(Spaced(), ())
    assert [chat.add(t) for t in (1, 2, 3)] == ["once", " upon", " a"]
    completion = Detokenizer(Spaced(), (), context=(1,))
    assert [completion.add(t) for t in (2, 3)] == [" upon", " a"]
