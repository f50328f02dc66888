"""Long texts in pieces: the same tokens as in one go, given up when they are too long, and nobody waits for them."""

import itertools
import random
import threading
from functools import partial

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from mlx_serve.engine.models import encoding
from mlx_serve.engine.models.encoding import Cuts, Encoder, FairLock
from mlx_serve.values import GUARD, ApiError
from tests.engine.tinymodel import mlx_tokenizer

DEADLINE_S = 20
CHINESE = "模型的上下文长度是有限的，超过的部分会被拒绝。第一段，第二段；还有第三段！\n服务器 mlx 会说明 reason。\n\n"
SENTENCE = (
    "a an the of to in is it that for on with as by at or be not are from this which one two text model request server "
    "token prompt answer client limit bytes piece length `engine/encoding.py` (see 3.14) **bold** 2026-12-01 --flag x "
    '= [1, 2, 3]; don\'t "quoted" Upper CASE naïve façade re-used e.g. 100,000 50 % https://example.org/a?b=c'
)


def _prose(n_words: int) -> str:
    """Always the same: what the tokenizers learn, and so where a text may be cut, does not change with the project."""
    chosen, words = random.Random(3), SENTENCE.split()
    ends = [" ", " ", " ", " ", ", ", ". ", "\n", "\n\n", "; ", ": "]
    return "".join(chosen.choice(words) + chosen.choice(ends) for _ in range(n_words))


TEXT = _prose(3000) + CHINESE * 20
ODD = "2, 2, 12，２, ﬁ A a it's 12345 and  3.14\n\n\n  x\ty\r\n\r\n(a)[b] don't; \u00e9\u0301 f\u2028g   \n h" * 20
# The words of Qwen's and Llama 3's tokenizers.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def byte_level(split=None):
    """Byte-level BPE with GPT-2's words, or with those of a pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        words = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXT, ODD], trainer)
    return tokenizer


def sentencepiece_bpe(normalizer=None):
    """Merges over marked spaces; every text gets a space in front, by the normalizer or by Metaspace."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator([TEXT, ODD], trainers.BpeTrainer(vocab_size=3000, special_tokens=["<unk>"]))
    if normalizer is not None:
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizer
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=1500, special_tokens=["<unk>"], unk_token="<unk>")
    tokenizer.train_from_iterator([TEXT, ODD], trainer)
    return tokenizer


def llama_2():
    return sentencepiece_bpe(normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]))


KINDS = {
    "gpt-2": byte_level,
    "cl100k": partial(byte_level, CL100K),
    "metaspace": sentencepiece_bpe,
    "llama 2": llama_2,
    "unigram": unigram,
}


def with_ends(tokenizer):
    """A start and an end token around each text."""
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<|begin|>", "<|end|>")]
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A <|end|>", special_tokens=ids)
    return tokenizer


@pytest.fixture(params=KINDS)
def found(request, monkeypatch):
    monkeypatch.setattr(encoding, "PIECE_CHARS", 5)
    monkeypatch.setattr(encoding, "MAX_PIECE_CHARS", 5000)
    tokenizer = mlx_tokenizer(with_ends(KINDS[request.param]()))
    tokenizer.is_unigram = request.param == "unigram"
    return tokenizer


def texts():
    chosen = random.Random(7)
    chars = [*"aB3 \n\t.,;'(", "é", "模", "，", "。", "  ", "\r\n", "word", "12"]
    yield from (TEXT, ODD, CHINESE, TEXT + GUARD + ODD)
    yield from ("".join(chosen.choices(chars, k=200)) for _ in range(50))


def test_pieces_have_the_tokens_of_the_whole_text(found):
    for text in texts():
        parts = [found._wrapper.encode(part, add_special_tokens=False) for part in text.split(GUARD)]
        want = list(itertools.chain(*parts))
        asked = []
        got = found.encode(text, special=False, check=asked.append)
        # Of two segmentations that are equally likely, a unigram model takes the one that rounding makes likelier.
        assert sorted(got) == sorted(want) if found.is_unigram else got == want
        begin, end = (found._wrapper.convert_tokens_to_ids(token) for token in ("<|begin|>", "<|end|>"))
        assert found.encode(text, special=True) == [begin, *got, end]
        assert len(asked) > 10 or text == CHINESE
        assert asked[1:] == sorted(asked[1:])


def test_a_text_is_given_up_as_soon_as_it_is_too_long(found):
    pieces = []
    encode = found._encoder._encode
    found._encoder._encode = lambda text, special: pieces.append(text) or encode(text, special)

    def check(n_tokens):
        if n_tokens > 100:
            raise ApiError(400, "too long")

    # As long as that, but of so few tokens at least that only tokenizing tells.
    found._encoder._max_token_chars = len(TEXT)
    with pytest.raises(ApiError):
        found.encode(TEXT, special=False, check=check)
    assert 0 < sum(map(len, pieces)) < 2000


def test_a_text_without_any_place_to_cut_is_cut_all_the_same():
    text = "a" * (3 * encoding.MAX_PIECE_CHARS + 7)
    pieces = [piece for _, piece in Cuts([b"ab"]).pieces(text)]
    assert "".join(pieces) == text
    assert [len(piece) for piece in pieces] == [encoding.MAX_PIECE_CHARS] * 3 + [7]


def test_a_place_that_a_token_reaches_over_is_no_cut():
    cuts = Cuts([b"a b", "模。".encode()])
    assert not cuts.is_exact("a", " ")
    assert not cuts.is_exact("模", "。")
    assert cuts.is_exact("b", " ")
    # A tokenizer may fold what it reads: to lower case, to plain digits and commas, to letters without accents.
    folded = Cuts([b"a ", b"2 ", b"2,", b"e "])
    assert not any(folded.is_exact(before, " ") for before in ("A", "²", "２", "é", "Ｅ"))
    assert not folded.is_exact("2", "，")
    # Behind a space the words of some tokenizers depend on what comes next.
    assert not cuts.is_exact(" ", "\n")


def test_a_short_text_passes_a_long_one():
    begun, go_on, order = threading.Semaphore(0), threading.Semaphore(0), []

    def encode(text, special):
        if len(text) > 100:
            begun.release()
            assert go_on.acquire(timeout=DEADLINE_S)
        order.append("long" if len(text) > 100 else "short")
        return [0] * len(text)

    encoder = Encoder(encode, list, 1)
    run = partial(encoder.encode, special=False, check=lambda n: None)
    long = [threading.Thread(target=run, args=("word " * encoding.PIECE_CHARS,)) for _ in range(3)]
    for thread in long:
        thread.start()
    assert begun.acquire(timeout=DEADLINE_S)
    short = threading.Thread(target=run, args=("hi",))
    short.start()
    # It waits for the piece that is being encoded, and for no other one.
    while not encoder._lock._waiting:
        threading.Event().wait(0.001)
    go_on.release()
    short.join(DEADLINE_S)
    assert order[:2] == ["long", "short"]
    go_on.release(1000)
    for thread in long:
        thread.join(DEADLINE_S)
    assert not short.is_alive()


def test_a_fair_lock_goes_to_who_came_first():
    lock, order = FairLock(), []

    def work(name):
        with lock:
            order.append(name)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    with lock:
        for i, thread in enumerate(threads, start=1):
            thread.start()
            while len(lock._waiting) < i:
                threading.Event().wait(0.001)
        order.append("first")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert order == ["first", 0, 1, 2, 3, 4]
