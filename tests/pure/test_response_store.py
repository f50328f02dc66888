"""Kept responses: the bounds, and what a conversation holds on to."""

import pytest

from mlx_serve.api.response_store import ResponseStore, conversation, input_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def response(name: str, text: str = "answer") -> dict:
    return {"id": name, "output": [{"id": f"msg_{name}", "text": text}]}


def question(text: str) -> dict:
    return {"id": f"q_{text}", "text": text}


def keep(store: ResponseStore, name: str, before: str | None = None, text: str = "answer") -> None:
    last = store.turn(before, "") if before is not None else None
    store.keep(response(name, text), [question(name)], last, [f"msg_{name}"], "")


def ids(items) -> list[str]:
    return [item["id"] for item in items]


def test_a_conversation_has_all_turns_in_their_order():
    store = ResponseStore()
    keep(store, "a")
    keep(store, "b", before="a")
    keep(store, "c", before="b")
    turn = store.turn("c", "")
    assert ids(conversation(turn)) == ["q_a", "msg_a", "q_b", "msg_b", "q_c", "msg_c"]
    assert ids(input_of(turn)) == ["q_a", "msg_a", "q_b", "msg_b", "q_c"]
    assert conversation(None) == []


def test_a_conversation_may_fork():
    store = ResponseStore()
    keep(store, "a")
    keep(store, "b", before="a")
    keep(store, "c", before="a")
    assert ids(conversation(store.turn("b", ""))) == ["q_a", "msg_a", "q_b", "msg_b"]
    assert ids(conversation(store.turn("c", ""))) == ["q_a", "msg_a", "q_c", "msg_c"]


def test_the_least_recently_used_goes_first():
    store = ResponseStore(max_count=2)
    keep(store, "a")
    keep(store, "b")
    assert store.turn("a", "") is not None
    keep(store, "c")
    assert [store.turn(name, "") is not None for name in "abc"] == [True, False, True]


def test_nothing_is_kept_when_it_is_off():
    store = ResponseStore(max_count=0)
    keep(store, "a")
    assert (len(store), store.n_bytes, store.turn("a", "")) == (0, 0, None)
    assert not store.keeps


def test_time_ends_a_response():
    clock = Clock()
    store = ResponseStore(ttl_s=10, clock=clock)
    keep(store, "a")
    clock.now = 5
    keep(store, "b", before="a")
    clock.now = 10
    assert store.turn("a", "") is None
    assert ids(conversation(store.turn("b", "")))[:2] == ["q_a", "msg_a"]
    clock.now = 15
    assert store.turn("b", "") is None
    assert store.n_bytes == 0


def test_the_bytes_are_bounded_and_all_come_back():
    store = ResponseStore(max_bytes=10_000)
    names = [f"r{i}" for i in range(20)]
    for name in names:
        keep(store, name, text="x" * 1000)
        assert store.n_bytes <= 10_000
    assert 0 < len(store) < 20
    assert store.turn("r19", "") is not None
    for name in names:
        store.delete(name, "")
    assert (len(store), store.n_bytes) == (0, 0)


def test_earlier_turns_count_as_long_as_a_later_one_needs_them():
    store = ResponseStore()
    keep(store, "a", text="x" * 5000)
    alone = store.n_bytes
    keep(store, "b", before="a")
    both = store.n_bytes
    assert store.delete("a", "")
    assert not store.delete("a", "")
    assert store.n_bytes == both
    assert store.turn_of_item("msg_a", "") is not None
    assert store.delete("b", "")
    assert store.n_bytes == 0
    assert store.turn_of_item("msg_a", "") is None
    assert both > alone


def test_what_alone_is_too_large_is_not_kept():
    store = ResponseStore(max_bytes=5000)
    keep(store, "a")
    keep(store, "b", text="x" * 10_000)
    assert store.turn("b", "") is None
    assert store.turn("a", "") is not None


def test_a_long_conversation_is_let_go_of_in_one_go():
    """Thousands of turns, each holding the one before: no recursion, neither ours nor the interpreter's."""
    store = ResponseStore(max_count=1)
    keep(store, "r0")
    for i in range(1, 5000):
        keep(store, f"r{i}", before=f"r{i - 1}")
    assert len(conversation(store.turn("r4999", ""))) == 10_000
    assert store.delete("r4999", "")
    assert store.n_bytes == 0


def test_only_ids_that_the_server_gave_are_known():
    store = ResponseStore()
    keep(store, "a")
    assert store.turn_of_item("msg_a", "") is store.turn("a", "")
    assert store.turn_of_item("q_a", "") is None


@pytest.mark.parametrize("name", ["", "a", "msg_a"])
def test_an_unknown_id_is_none(name):
    store = ResponseStore()
    assert (store.turn(name, ""), store.turn_of_item(name, ""), store.delete(name, "")) == (None, None, False)
