"""Prompts out of files: what is read, and where a fault is."""

import json

import pytest

from mlx_serve.commands.bench.dataset import DatasetError, read_dataset


@pytest.fixture
def read(tmp_path):
    def write_and_read(text, output_tokens=None, default=128, *, chat=True):
        path = tmp_path / "prompts"
        path.write_text(text, encoding="utf-8")
        found = read_dataset(path, output_tokens, default, chat=chat)
        return [(turn.messages, turn.output_tokens) for conversation in found for turn in conversation.turns]

    return write_and_read


def user(text):
    return ({"role": "user", "content": text},)


def test_a_line_is_a_prompt(read):
    text = '{"prompt": "a"}\n\n{"prompt": "é", "output_tokens": 5}\n{"messages": [{"role": "user", "content": "c"}]}\n'
    assert read(text) == [(user("a"), 128), (user("é"), 5), (user("c"), 128)]


@pytest.mark.parametrize("name", ["output_tokens", "output_len", "max_tokens"])
def test_the_length_of_an_answer_has_the_names_that_others_use(read, name):
    assert read(json.dumps({"prompt": "a", name: 7})) == [(user("a"), 7)]


def test_the_command_line_overrules_the_file(read):
    assert read('{"prompt": "a", "max_tokens": 7}', output_tokens=9) == [(user("a"), 9)]


def test_a_line_separator_inside_a_text_ends_no_line(read):
    assert read('{"prompt": "a\u2028b"}') == [(user("a\u2028b"), 128)]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ("7", "not a JSON object"),
        ("{}", "neither a prompt"),
        ('{"prompt": ""}', "neither a prompt"),
        ('{"prompt": [1, 2]}', "neither a prompt"),
        ('{"prompt": "a", "messages": []}', "both"),
        ('{"messages": []}', "messages is not a list"),
        ('{"messages": "hi"}', "messages is not a list"),
        ('{"messages": [{"content": "a"}]}', "a role"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is not a whole number"),
        ('{"prompt": "a", "output_len": true}', "output_len is not a whole number"),
        ('{"prompt": "a", "output_tokens": "5"}', "output_tokens is not a whole number"),
    ],
)
def test_a_fault_names_its_line(read, line, fault):
    with pytest.raises(DatasetError, match=rf"prompts:3: .*{fault}"):
        read('{"prompt": "a"}\n\n' + line + "\n")


def test_messages_are_for_chat(read):
    with pytest.raises(DatasetError, match=r":1: messages need --endpoint chat"):
        read('{"messages": [{"role": "user", "content": "a"}]}', chat=False)


def test_sharegpt_is_the_first_question_and_the_length_of_its_answer(read):
    entries = [
        {"id": "1", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "x" * 40}]},
        {"id": "2", "conversations": [{"from": "human", "value": "alone"}]},
        {"id": "3", "conversations": []},
        {
            "id": "4",
            "conversations": [
                {"from": "gpt", "value": "hello"},
                {"from": "user", "value": "r"},
                {"from": "gpt", "value": "y"},
            ],
        },
    ]
    assert read(json.dumps(entries, indent=1)) == [(user("q"), 10), (user("r"), 1)]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[{},\n x]", ":2: not JSON"),
        ("[7]", "entry 1: no conversations"),
        ('[{"conversations": []}, {}]', "entry 2: no conversations"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 1: a turn"),
        ("[]", "no prompt"),
        ("", "no prompt"),
        ("\n\n", "no prompt"),
    ],
)
def test_a_fault_names_its_entry(read, text, fault):
    with pytest.raises(DatasetError, match=fault):
        read(text)


def test_a_file_that_can_not_be_read(tmp_path):
    with pytest.raises(DatasetError, match="No such file"):
        read_dataset(tmp_path / "none", None, 1, chat=True)
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(DatasetError, match=r"latin.*utf-8"):
        read_dataset(tmp_path / "latin", None, 1, chat=True)
