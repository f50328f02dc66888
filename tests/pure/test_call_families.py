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


def wrong_answers(name: str) -> tuple[int, list[tuple[str, str, Answer]]]:
    """How many transcripts there are, and what came out wrong: (transcript, way of cutting, answer)."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    found = formats(tokenizer)
    wrong, n = [], 0
    for what, written, cut, want in transcripts(family):
        n += 1
        symbols = found.symbols(TOOLS)
        atoms = atoms_of(tokenizer, symbols, found.controls, written)
        for way, pieces in ways(atoms).items():
            got = parsed(read(tokenizer, pieces, symbols, cut=cut), cut=cut)
            if got != parsed(want, cut=cut):
                wrong.append((what, way, got))
    return n, wrong


@pytest.mark.parametrize("name", FAMILIES)
def test_every_transcript_is_right_in_every_way_of_cutting(name):
    n, wrong = wrong_answers(name)
    assert n > 15
    assert not wrong, "\n".join(map(str, wrong[:12]))


def test_an_answer_that_is_no_call_is_not_held_back():
    for name, family in FAMILIES.items():
        tokenizer = family.tokenizer()
        found = formats(tokenizer)
        splitter = found.splitter(found.symbols(TOOLS), TOOLS, in_reasoning=False)
        assert [piece.text for piece in splitter.feed("Sure")] == ["Sure"], name


XML = [name for name, family in FAMILIES.items() if not family.is_typed]


@pytest.mark.parametrize("name", XML)
def test_a_long_text_goes_out_while_it_comes(name):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    found = formats(tokenizer)
    symbols = found.symbols(TOOLS)
    text = "a line of a file, and one more\n" * 100
    written = family.write([("write_file", {"text": text})])
    splitter = found.splitter(symbols, TOOLS, in_reasoning=False)
    deltas, fed = [], 0
    for char in atoms_of(tokenizer, symbols, found.controls, written):
        deltas += [piece.text for piece in splitter.feed(char) if piece.kind == "arguments"]
        fed += len(char)
        if fed == len(written) // 2:
            # Nothing but a few characters that may begin a tag is held back.
            assert len("".join(deltas)) > len(text) // 3
    deltas += [piece.text for piece in splitter.flush() if piece.kind == "arguments"]
    assert json.loads("".join(deltas)) == {"text": text}
    assert len(deltas) > 1000


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.think is not None])
def test_reasoning_that_the_prompt_has_opened_ends_where_it_is_closed(name):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    found = formats(tokenizer)
    assert found.think == family.think
    symbols = found.symbols(())
    splitter = found.splitter(symbols, (), in_reasoning=True)
    answer = Answer()
    atoms = atoms_of(tokenizer, symbols, found.controls, f"hm{family.think[1]}Hi.")
    for piece in [*(piece for char in atoms for piece in splitter.feed(char)), *splitter.flush()]:
        answer.add(piece)
    assert answer == Answer("Hi.", "hm")


def main() -> None:
    """The table of families: transcripts that are right in all ways of cutting."""
    for name in FAMILIES:
        n, wrong = wrong_answers(name)
        print(f"{name:42} {n - len({what for what, _, _ in wrong}):3} of {n}, in {8 * n} ways")


if __name__ == "__main__":
    main()
