"""mlx-lm's tokenizers as the layers above see them: control tokens, and text out of tokens of real vocabularies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from mlx_serve.engine.generate.constraints import Constraint
from mlx_serve.engine.generate.grammars import Vocabulary
from mlx_serve.text.detokenizer import Detokenizer
from mlx_serve.text.formats import formats
from mlx_serve.text.grammar import Rule, compile_rule
from mlx_serve.values import Grammar, Sampling
from tests.engine.tinymodel import byte_tokenizer, mlx_tokenizer
from tests.pure.formatkit import THINK, TOOLS

CALL = ("<tool_call>", "</tool_call>")
MARKERS = (*THINK, *CALL)
HERMES = "{# tools tool_call.name <tool_call> #}"

# Markers as vocabularies have them: as special tokens, as added ones that are not special, as ordinary ones.
WAYS = {
    "special": lambda: mlx_tokenizer(special=MARKERS, template=HERMES),
    "added": lambda: mlx_tokenizer(added=MARKERS, template=HERMES),
    "ordinary": lambda: mlx_tokenizer(byte_tokenizer(MARKERS, splits=False), template=HERMES),
}


def ids_of(found) -> set[int]:
    return {found.encode(marker, special=False)[0] for marker in MARKERS}


@pytest.mark.parametrize("way", WAYS)
def test_markers_of_one_token_are_control_tokens(way):
    found = WAYS[way]()
    assert [len(found.encode(marker, special=False)) for marker in MARKERS] == [1] * 4
    assert (found.think, found.tool_call) == (THINK, CALL)
    assert {found.controls[token] for token in ids_of(found)} == set(MARKERS)
    assert formats(found).in_markers.keys() == ids_of(found)


@pytest.mark.parametrize("way", WAYS)
def test_no_grammar_is_spelled_with_control_tokens(way):
    pytest.importorskip("llguidance")
    found = WAYS[way]()
    vocabulary = Vocabulary(found, found.n_tokens)
    grammar = Grammar(compile_rule(Rule("json_schema", {"type": "string"}, "p")), n_bytes=1)
    constraint = Constraint(Sampling(99), found.eos_ids, vocabulary.matcher(grammar))
    constraint.take(found.encode('"', special=False)[0])
    allowed = set(np.flatnonzero(constraint.allowed(1, found.n_tokens)).tolist())
    assert allowed.isdisjoint(ids_of(found))
    assert allowed.isdisjoint(found.controls)
    # As text, a letter at a time, it may come.
    for char in "<think>":
        (token,) = found.encode(char, special=False)
        assert token in allowed
        constraint.take(token)
    assert not constraint.fault


def test_what_the_tokenizer_makes_several_tokens_of_is_text():
    found = mlx_tokenizer(byte_tokenizer(MARKERS), template=HERMES)
    assert len(found.encode("<think>", special=False)) > 1
    assert set(found.controls.values()).isdisjoint(MARKERS)
    facts = formats(found)
    splitter = facts.splitter(facts.symbols(TOOLS), TOOLS, in_reasoning=False)
    pieces = [piece for text in ("<think>", "a", "</think>", "b") for piece in splitter.feed(text)] + splitter.flush()
    assert [(piece.kind, piece.text) for piece in pieces] == [("reasoning", "a"), ("content", "b")]


def byte_fallback():
    """As sentencepiece vocabularies in tokenizer.json are: characters, and bytes for those that are not there."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "é", "🐉"]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|end|>"])
    return mlx_tokenizer(tokenizer)


TOKENIZERS = {"byte level": mlx_tokenizer(), "byte fallback": byte_fallback()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text("\ufffd aé🐉", max_size=20) | st.text(max_size=20))
def test_a_text_comes_back_from_its_tokens(kind, text):
    found = TOKENIZERS[kind]
    text = text.replace("\u2581", "")
    detokenizer = Detokenizer(found, ())
    assert "".join(map(detokenizer.add, found.encode(text, special=False))) == text
