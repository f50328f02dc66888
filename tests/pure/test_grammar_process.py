"""The process that compiles grammars: what ends one of its processes, and that nothing else ends with it."""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_serve.api import grammars
from mlx_serve.api.grammar_child import GrammarLimits, resident_bytes
from mlx_serve.api.grammars import GrammarCompiler
from mlx_serve.engine.generate.grammars import Vocabulary
from mlx_serve.testing import VOCAB_SIZE, FakeTokenizer
from mlx_serve.text.grammar import Function, Rule
from mlx_serve.values import ApiError, ClientGone

pytest.importorskip("llguidance")

DEADLINE_S = 60
# Compiles for hours, 55 MB more in each second.
ENDLESS = Rule("json_schema", {"type": "integer", "multipleOf": 99999989}, "p")
# Takes 400 MB in a second.
LARGE = Rule("regex", "a?" * 8100, "p")
DEEP = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(3000)) + '\nr3000: "a"'
HUGE = "((a{1000}){1000}){10}"


@pytest.fixture
def vocabulary():
    return Vocabulary(FakeTokenizer(), VOCAB_SIZE)


@pytest.fixture
def start(vocabulary):
    """Starts compilers with limits."""
    started = []

    def one(**limits):
        started.append(GrammarCompiler(lambda entry: vocabulary, GrammarLimits(**{"cpu_s": 1, **limits})))
        return started[-1]

    yield one
    for compiler in started:
        compiler.close()


def compiled(compiler, rule, functions=(), alive=lambda: True):
    return compiler.compile(None, rule, functions, alive)


def refusal(compiler, rule, functions=()):
    with pytest.raises(ApiError) as caught:
        compiled(compiler, rule, functions)
    return caught.value


def regex(n):
    """A new grammar for each number."""
    return Rule("regex", f"[a-z]{{{n + 1}}}", "p")


def test_what_passes_is_compiled_here_too_and_kept(start, vocabulary):
    compiler = start()
    first = compiled(compiler, regex(1))
    assert vocabulary.matcher(first).compute_bitmask()
    assert compiled(compiler, regex(1)) is first
    assert first.n_bytes > len(first.text)
    large = Rule("json_schema", {"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}, "p")
    assert compiled(compiler, large).n_bytes > 2**20


@pytest.mark.parametrize(
    ("rule", "functions", "limits", "param", "said"),
    [
        (ENDLESS, (), {}, "p", "more than 1 s of CPU time"),
        (LARGE, (), {"cpu_s": 60, "memory_bytes": 96 * 2**20}, "p", "more than 96 MB of memory"),
        (
            ENDLESS,
            (),
            {"cpu_s": 60, "memory_bytes": 2**40, "wall_s": 0.2},
            "p",
            "more than 60 s of CPU time",
        ),
        (Rule("grammar", DEEP, "p"), (), {}, "p", "too deeply"),
        (None, [Function("f", {"properties": {"a": ENDLESS.value}}, "tools[0]")], {}, "tools", "s of CPU time"),
        (Rule("regex", "(", "p"), (), {}, "p", "unclosed group"),
        (Rule("grammar", "start: <|no_such_token|>", "p"), (), {}, "p", "no_such_token"),
        (None, [Function("f", {"not": {}}, "tools[0]")], {}, "tools[0]", "not"),
        (Rule("json_schema", {"minimum": float("inf")}, "p"), (), {}, "p", "too large"),
    ],
)
def test_what_takes_too_much_is_refused_and_the_next_is_taken(start, rule, functions, limits, param, said):
    compiler = start(**limits)
    error = refusal(compiler, rule, functions)
    assert (error.status, error.param) == (400, param)
    assert said in error.message
    assert compiled(compiler, regex(1))


def test_a_schema_that_json_cannot_hold_is_refused(start):
    schema = {}
    for _ in range(sys.getrecursionlimit() * 40):
        schema = {"items": schema}
    error = refusal(start(), Rule("json_schema", schema, "p"))
    assert (error.status, error.param) == (400, "p")
    assert "nested too deeply" in error.message


@pytest.mark.parametrize(
    ("rule", "functions"),
    [
        (Rule("regex", HUGE, "p"), ()),
        (Rule("json_schema", {"type": "string", "pattern": HUGE}, "p"), ()),
        (None, [Function("f", {"properties": {"a": {"type": "string", "pattern": HUGE}}}, "p")]),
    ],
)
def test_a_long_forced_text_costs_nothing(start, vocabulary, rule, functions):
    grammar = compiled(start(memory_bytes=64 * 2**20), rule, functions)
    assert grammar.n_bytes < 2**20
    assert vocabulary.matcher(grammar).compute_bitmask()


def test_memory_is_watched_from_outside_where_no_limit_of_it_is_enforced(start):
    if not os.path.exists("/bin/ps"):
        pytest.skip("ps is not installed")
    assert resident_bytes([os.getpid()])[os.getpid()] > 2**20
    compiler = start(cpu_s=60, memory_bytes=32 * 2**20, watches=True, bounds=False)
    assert "more than 32 MB of memory" in refusal(compiler, ENDLESS).message


def test_a_process_ends_with_its_client_and_no_other_with_it(start):
    compiler = start(cpu_s=600, memory_bytes=2**40, at_once=2)
    compiled(compiler, regex(0))
    gone = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        # Two take all places; two wait for one. All four leave.
        leaving = [
            pool.submit(compiled, compiler, Rule("json_schema", ENDLESS.value | {"title": str(i)}, "p"), (), alive)
            for i, alive in enumerate([lambda: not gone.is_set()] * 4)
        ]
        staying = [pool.submit(compiled, compiler, regex(i)) for i in range(1, 5)]
        assert not any(future.done() for future in leaving)
        gone.set()
        for future in leaving:
            assert isinstance(future.exception(DEADLINE_S), ClientGone)
        for future in staying:
            assert future.result(DEADLINE_S)
    compiler.close()


def test_an_ordinary_grammar_does_not_wait_for_dear_ones(start):
    compiler = start(at_once=1, cpu_s=3)
    compiled(compiler, regex(9))
    with ThreadPoolExecutor(5) as pool:
        dear = [pool.submit(refusal, compiler, ENDLESS) for _ in range(5)]
        while len(children(compiler._child._process.pid)) < 2:
            assert not any(future.done() for future in dear)
        assert all(compiled(compiler, regex(i)) for i in range(3))
        assert not all(future.done() for future in dear)
        # Those that were put off for it get their answers all the same.
        assert all("more than 3 s of CPU time" in future.result().message for future in dear)


def test_a_child_that_dies_is_started_again_and_what_it_had_is_asked_again(start, caplog):
    compiler = start(cpu_s=2)
    compiled(compiler, regex(0))
    for i in range(1, 4):
        os.kill(compiler._child._process.pid, signal.SIGKILL)
        assert compiled(compiler, regex(i))
    assert "started again" in caplog.text
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(refusal, compiler, ENDLESS)
        while not compiler._child._control.fileno() or not children(compiler._child._process.pid):
            assert not waiting.done()
        os.kill(compiler._child._process.pid, signal.SIGKILL)
        assert "s of CPU time" in waiting.result(DEADLINE_S).message


def children(pid):
    return [path for path in os.listdir("/proc") if path.isdigit() and parent(path) == pid]


def parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_a_child_that_does_not_start_is_an_error_of_the_server(start, monkeypatch):
    monkeypatch.setattr(grammars, "_PROGRAM", "raise SystemExit(1)")
    error = refusal(start(), regex(1))
    assert (error.status, error.type) == (503, "server_error")
    monkeypatch.undo()


def test_nothing_is_compiled_after_the_end(start):
    compiler = start()
    compiled(compiler, regex(1))
    compiler.close()
    assert refusal(compiler, regex(2)).status == 503
    assert compiler._child is None


def test_requests_beyond_the_places_get_429(start, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_WAITING", 1)
    compiler = start(cpu_s=600, memory_bytes=2**40)
    asked, gone = threading.Event(), threading.Event()

    def alive():
        asked.set()
        return not gone.is_set()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(compiled, compiler, ENDLESS, (), alive)
        assert asked.wait(DEADLINE_S)
        error = refusal(compiler, regex(1))
        assert (error.status, dict(error.headers)) == (429, {"Retry-After": "1"})
        gone.set()
        assert isinstance(waiting.exception(DEADLINE_S), ClientGone)
    assert compiled(compiler, regex(1))


def test_a_child_holds_the_tokens_of_so_many_models(start, monkeypatch):
    monkeypatch.setattr(grammars, "_MAX_VOCABULARIES", 2)
    vocabularies = [Vocabulary(FakeTokenizer(), VOCAB_SIZE) for _ in range(5)]
    compiler = GrammarCompiler(vocabularies.__getitem__)
    pids = []
    for i in range(5):
        assert compiler.compile(i, regex(1), (), lambda: True)
        pids.append(compiler._child._process.pid)
    compiler.close()
    assert len(set(pids)) == 3
