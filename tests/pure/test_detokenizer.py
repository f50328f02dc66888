"""Tokens to text as they come, on the fake tokenizer, whose tokens are single bytes."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.engine.fake_backend import EOS, FakeTokenizer
from mlx_serve.text.detokenizer import Detokenizer


def texts(tokens, context=()):
    detokenizer = Detokenizer(FakeTokenizer().decode, FakeTokenizer.hidden_ids, context)
    return [detokenizer.add(token) for token in tokens]


@given(st.text(max_size=40))
def test_the_pieces_join_to_the_text_and_never_hold_half_a_character(text):
    pieces = texts(text.encode())
    assert "".join(pieces) == text.rstrip("\ufffd") or "\ufffd" in text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


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

    def decode(self, ids):
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def test_leading_spaces_follow_the_neighbours():
    chat = Detokenizer(Spaced().decode, ())
    assert [chat.add(t) for t in (1, 2, 3)] == ["once", " upon", " a"]
    completion = Detokenizer(Spaced().decode, (), context=(1,))
    assert [completion.add(t) for t in (2, 3)] == [" upon", " a"]
