"""Over HTTP, drafts change nothing: the answers are those of the same server without drafts, wherever they end."""

import json
from collections import defaultdict
from itertools import accumulate

import pytest

from tests.engine.test_drafts_in_batch import Always
from tests.engine.test_habits import serving
from tests.engine.tinymodel import write_model

# Answers of these letters repeat themselves, so drafts are often right. The tokens of bytes begin with the "!".
LETTERS = {str(ord(letter) - ord("!")): 100 for letter in "ab"}
TEXT = {"model": "default_model", "prompt": "abbabaab" * 3, "max_tokens": 32, "logit_bias": LETTERS}
CHAT = {
    "model": "default_model",
    "messages": [{"role": "user", "content": "baabab" * 4}],
    "max_tokens": 32,
    "logit_bias": LETTERS,
}
SAMPLINGS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.0, "seed": 5}}
N_DRAFTED = 5


class Recorded(Always):
    """Drafts always, and notes how many tokens each row got in each step with drafts."""

    def __init__(self):
        super().__init__(N_DRAFTED)
        self.by_row = defaultdict(list)

    def ran(self, shape, n_drafted, taken, times):
        for row, n in taken:
            self.by_row[row].append(n)

    def ends(self):
        """After how many tokens of the newest output a step ended."""
        return set(accumulate(list(self.by_row.values())[-1], initial=0))


class Server:
    """Answers of a server. ``recorded`` has its steps with drafts."""

    def __init__(self, post, recorded):
        self.post, self.recorded = post, recorded
        self.n_inside = 0

    def ask(self, path, body):
        """Each choice, and the usage. ``n_inside`` counts the answers of one choice that ended within a draft."""
        self.recorded.by_row.clear()
        whole = self.post(path, body)
        choices = whole["choices"], whole["usage"]
        if self.recorded.by_row and body.get("n", 1) == 1:
            self.n_inside += whole["usage"]["completion_tokens"] not in self.recorded.ends()
        streamed = self.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})
        return choices, joined(streamed)

    def text(self, body):
        return self.post("/v1/completions", body)["choices"][0]["text"]


def joined(stream):
    """A stream's choices, their pieces put together, and its usage."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices, usage = defaultdict(dict), None
    for chunk in map(json.loads, lines):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            choices[choice["index"]] = merged(choices[choice["index"]], choice)
    return [choices[index] for index in sorted(choices)], usage


def merged(old, new):
    """Texts and lists of two pieces one behind the other; of what else both have, the newer."""
    out = dict(old)
    for key, value in new.items():
        if isinstance(value, dict):
            out[key] = merged(old.get(key) or {}, value)
        elif isinstance(value, list) or key in ("text", "content"):
            out[key] = (old.get(key) or type(value)()) + value if value is not None else old.get(key)
        elif value is not None or key not in old:
            out[key] = value
    return out


def answers(server):
    """What a server answers to all requests that are compared."""
    found = {}
    for name, sampling in SAMPLINGS.items():
        body = TEXT | sampling | {"logprobs": 2}
        found[name] = server.ask("/v1/completions", body)
        found[name, "chat"] = server.ask(
            "/v1/chat/completions", CHAT | sampling | {"logprobs": True, "top_logprobs": 2}
        )
        for n in range(10, 15):
            found[name, n] = server.ask("/v1/completions", body | {"max_tokens": n})
    # With a seed, for without one the letters soon repeat, and few stop strings would be the first of their kind.
    body = TEXT | SAMPLINGS["seeded"] | {"logprobs": 2}
    text = server.text(body)
    for end in range(10, len(text)):
        stop = text[end - 9 : end]
        if text.index(stop) + len(stop) == end:
            found["stop", end] = server.ask("/v1/completions", body | {"stop": stop})
    found["three"] = server.ask("/v1/completions", body | {"n": 3})
    stops = [text[12:22], found["three"][0][0][1]["text"][9:19]]
    found["three", "stop"] = server.ask("/v1/completions", body | {"n": 3, "stop": stops})
    found["three", "chat"] = server.ask("/v1/chat/completions", CHAT | SAMPLINGS["seeded"] | {"n": 3, "stop": ["abab"]})
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The answers without drafts and with them, how many of the latter ended within a draft, and the statistics."""
    path = write_model(tmp_path_factory.mktemp("models") / "tiny")
    recorded = Recorded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_serve.engine.generate.rows.DraftLength", lambda: recorded)
        with serving("--model", path, "--no-draft-ngram") as post:
            want = answers(Server(post, recorded))
            assert post("/stats")["drafts"]["drafted_tokens"] == 0
        with serving("--model", path, "--draft-ngram") as post:
            server = Server(post, recorded)
            got = answers(server)
            drafts = post("/stats")["drafts"]
    return want, got, server.n_inside, drafts


def test_answers_are_those_without_drafts(both):
    want, got, n_inside, drafts = both
    assert drafts["drafted_tokens"] > 1000
    assert drafts["accepted_tokens"] > 300
    # Stop strings: the drafts of a length limit end with it.
    assert n_inside >= 5
    assert want.keys() == got.keys()
    assert sum(name[0] == "stop" for name in want) >= 10
    for name, answer in want.items():
        assert got[name] == approximate(answer), name


def test_streamed_answers_are_the_whole_ones(both):
    for found in both[:2]:
        for name, ((whole, usage), (streamed, streamed_usage)) in found.items():
            assert list(map(essence, streamed)) == approximate(list(map(essence, whole))), name
            assert streamed_usage["completion_tokens"] == usage["completion_tokens"]


def essence(choice):
    """What a choice and the pieces of a streamed one have in common. An empty one has no pieces."""
    message = choice.get("message") or choice.get("delta") or choice
    text = message.get("content", message.get("text"))
    return text, choice["finish_reason"], choice["logprobs"] if text else None


def approximate(value):
    """A value whose log-probabilities are approximate: a pass over several tokens rounds differently."""
    if isinstance(value, dict):
        return {key: approximate(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(approximate, value))
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value
