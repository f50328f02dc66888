"""llama-server's endpoints around the tokenizer, on the fake one: a token is a byte, or a control token."""

import pytest

from mlx_serve.testing import EOS
from tests.sockets.apikit import serving


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def post(server, path: str, **body):
    status, _, answer = server.request("POST", path, body)
    assert status == 200, answer
    return answer


def test_tokenize(server):
    assert post(server, "/tokenize", content="ab") == {"tokens": [97, 98]}
    assert post(server, "/v1/tokenize", content="", model="fake") == {"tokens": []}


def test_control_tokens_are_parsed_unless_they_are_not_to_be(server):
    assert post(server, "/tokenize", content="a<eos>") == {"tokens": [97, EOS]}
    assert post(server, "/tokenize", content="a<eos>", parse_special=False) == {"tokens": list(b"a<eos>")}


def test_pieces_are_text_or_bytes(server):
    pieces = [{"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA1, "piece": [0xA1]}]
    assert post(server, "/tokenize", content="aá", with_pieces=True) == {"tokens": pieces}


def test_detokenize_is_the_way_back(server):
    tokens = post(server, "/tokenize", content="Zürich 🐉<eos>")["tokens"]
    text = "Zürich 🐉<eos>"
    assert post(server, "/detokenize", tokens=tokens) == {"content": text, "prompt": text}
    assert post(server, "/detokenize", tokens=[]) == {"content": "", "prompt": ""}


def test_vllm_s_form_of_a_text(server):
    found = post(server, "/tokenize", prompt="ab", model="fake")
    assert found == {"tokens": [97, 98], "count": 2, "max_model_len": 4096, "token_strs": None}
    assert post(server, "/tokenize", prompt="ab", return_token_strs=True)["token_strs"] == ["a", "b"]


def test_vllm_s_form_of_a_conversation(server):
    messages = [{"role": "user", "content": "hi"}]
    found = post(server, "/tokenize", messages=messages)
    assert (bytes(found["tokens"]), found["count"]) == (b"user: hi\n", 9)
    begun = [*messages, {"role": "assistant", "content": "So"}]
    found = post(server, "/tokenize", messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert bytes(found["tokens"]) == b"user: hi\nSo"


def test_the_tokens_of_a_chat_s_prompt_are_counted(server):
    messages = [{"role": "user", "content": "hi"}]
    found = post(server, "/v1/chat/completions/input_tokens", messages=messages)
    assert found == {"object": "response.input_tokens", "input_tokens": 9}


@pytest.mark.parametrize(("fields", "prompt"), [
    ({}, "user: hi\nSo"),
    ({"continue_final_message": True}, "user: hi\nSo"),
    ({"add_generation_prompt": True}, "user: hi\nassistant: So\n"),
    ({"add_generation_prompt": False}, "user: hi\nassistant: So\n"),
])  # fmt: skip
def test_how_a_prompt_ends(server, fields, prompt):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    assert post(server, "/apply-template", messages=messages, **fields)["prompt"] == prompt


def test_apply_template_shows_the_prompt_of_a_chat(server):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi <eos>"}]
    prompt = post(server, "/apply-template", messages=messages)["prompt"]
    assert prompt == "system: Be brief.\nuser: hi <eos>\n"
    body = {"messages": messages, "max_tokens": 1000}
    assert server.request("POST", "/v1/chat/completions", body)[2]["choices"][0]["message"]["content"] == prompt


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "content"),
    ("/tokenize", {"content": 5}, "content"),
    ("/tokenize", {"content": "a", "add_special": 1}, "add_special"),
    ("/tokenize", {"content": "x" * 100_000}, "content"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10_000]}, "tokens"),
    ("/detokenize", {"tokens": [97] * 5000}, "tokens"),
    ("/apply-template", {"messages": []}, "messages"),
    ("/apply-template", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
])  # fmt: skip
def test_a_bad_field_is_named(server, path, body, param):
    status, _, answer = server.request("POST", path, body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_an_unknown_model_is_not_found(server):
    assert server.request("POST", "/tokenize", {"content": "a", "model": "other"})[0] == 404
