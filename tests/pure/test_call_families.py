"""Every family's answers, cut in eight ways: the same calls, thoughts and text, whatever the pieces are."""

import json

import pytest

from mlx_serve.text.formats import formats
from tests.pure.familykit import FAMILIES, TOOLS, atoms_of, transcripts, ways
from tests.pure.formatkit import Answer


def parsed(answer: Answer, *, cut: bool) -> Answer:
    """With arguments as values; those that were cut off are compared as text."""
    calls = [(name, text if cut and not _is_whole(text) else json.loads(text)) for name, text in answer.calls]
    return Answer(answer.content.strip(), answer.reasoning.strip(), calls)


def _is_whole(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def read(tokenizer, pieces, symbols, *, cut: bool) -> Answer:
    found = formats(tokenizer)
    splitter = found.splitter(symbols, TOOLS, in_reasoning=False)
    answer = Answer()
    for text in pieces:
        for piece in splitter.feed(text):
            answer.add(piece)
    for piece in splitter.flush(cut=cut):
        answer.add(piece)
    return answer


@pytest.mark.parametrize("name", FAMILIES)
def test_every_transcript_is_right_in_every_way_of_cutting(name):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    found = formats(tokenizer)
    wrong = []
    for what, written, cut, want in transcripts(family):
        symbols = found.symbols(TOOLS)
        atoms = atoms_of(tokenizer, symbols, found.controls, written)
        for way, pieces in ways(atoms).items():
            got = parsed(read(tokenizer, pieces, symbols, cut=cut), cut=cut)
            if got != parsed(want, cut=cut):
                wrong.append((what, way, got))
    assert not wrong, "\n".join(map(str, wrong[:12]))
