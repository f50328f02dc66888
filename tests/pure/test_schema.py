"""Requests: what is taken, and what is refused with which field named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlx_serve.api.body import parse, read_object
from mlx_serve.api.openai.schema import ChatRequest, CompletionRequest
from mlx_serve.api.request_fields import MAX_N
from mlx_serve.api.responses.schema import ResponseRequest
from mlx_serve.api.serving import new_sampling
from mlx_serve.text.grammar import Rule
from mlx_serve.values import ApiError

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


MANY = [str(i) for i in range(5000)]


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def json_schema(**fields):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}} | fields}}


def chat(**fields):
    return parse(ChatRequest, json.dumps({"messages": [USER], **fields}).encode())


def completion(**fields):
    return parse(CompletionRequest, json.dumps({"prompt": "hi", **fields}).encode())


def refusal(call, *args, **kwargs) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args, **kwargs)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


def outcome(call, *args):
    try:
        return call(*args)
    except ApiError as error:
        return error


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "line 1, column 1"),
        (b'{"a": }', "line 1, column 7"),
        (b'{"a": 1,\n "b"', "line 2"),
        (b'{"a": "\xff"}', "position 7"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b"[]", "object"),
        (b'"text"', "object"),
        (b"null", "object"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a":' + b"9" * 10_000 + b"}", "number is too long"),
        (b"\xef\xbb\xbf\xef\xbb\xbf{}", "BOM"),
    ],
)
def test_a_body_that_is_no_json_object_says_where(body, where):
    assert where in refusal(read_object, body).message


@given(st.binary(max_size=64))
def test_no_body_raises_anything_but_an_api_error(body):
    out = outcome(read_object, body)
    assert isinstance(out, dict) or out.status == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})


@given(
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6), st.sampled_from([ChatRequest, CompletionRequest])
)
def test_no_value_of_any_field_raises_anything_but_an_api_error(fields, kind):
    body = {"messages": [USER], "prompt": "hi", **fields}
    out = outcome(parse, kind, json.dumps(body).encode())
    assert isinstance(out, kind) or out.status == 400
    if isinstance(out, kind):
        rule = outcome(out.rule)
        assert rule is None or isinstance(rule, Rule) or rule.status == 400


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", None),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role", None),
        ({"messages": [{"role": "user"}]}, "messages[0]", None),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", None),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", None),
        ({"messages": [{"role": "assistant", "reasoning": 5}]}, "messages[0].reasoning", "invalid_type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": ["\ud800"]}}}]},
            "tools[0].function.parameters",
            None,
        ),
        ({"chat_template_kwargs": {"x": "\ud800"}}, "chat_template_kwargs", None),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
        ({"model": 5}, "model", "invalid_type"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream": 1}, "stream", "invalid_type"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": -0.1}, "temperature", None),
        ({"temperature": 2.1}, "temperature", None),
        ({"temperature": 10**400}, "temperature", "invalid_type"),
        ({"top_p": 1.5}, "top_p", None),
        ({"top_k": 1.5}, "top_k", "invalid_type"),
        ({"min_p": -1}, "min_p", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", None),
        ({"n": 0}, "n", None),
        ({"n": MAX_N + 1}, "n", None),
        ({"stop": 5}, "stop", None),
        ({"stop": [1]}, "stop", None),
        ({"logit_bias": [1]}, "logit_bias", None),
        ({"logit_bias": {"x": 1}}, "logit_bias", None),
        ({"logit_bias": {"-1": 1}}, "logit_bias", None),
        ({"logit_bias": {"1": 101}}, "logit_bias", None),
        ({"logit_bias": {"1": "x"}}, "logit_bias", None),
        ({"logit_bias": {str(token): 1 for token in range(16_385)}}, "logit_bias", None),
        ({"seed": 1.5}, "seed", "invalid_type"),
        ({"logprobs": 3}, "logprobs", "invalid_type"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", None),
        ({"top_logprobs": 3}, "top_logprobs", None),
        ({"top_logprobs": -2}, "top_logprobs", None),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", None),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs", None),
        ({"seed": 2**63}, "seed", None),
        ({"seed": -(2**63) - 1}, "seed", None),
        ({"messages": [{"role": "tool", "tool_call_id": "a", "content": [{}]}]}, "messages[0].content", None),
        (
            {"messages": [{"role": "tool", "tool_call_id": "a", "content": [{"type": "\ud800"}]}]},
            "messages[0].content",
            None,
        ),
        ({"presence_penalty": 3}, "presence_penalty", None),
        ({"repetition_penalty": -1}, "repetition_penalty", None),
        ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage", "invalid_type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", None),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", None),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice", None),
        ({"tool_choice": named("g"), "tools": [TOOL]}, "tool_choice", None),
        ({"tool_choice": named("f")}, "tool_choice", None),
        ({"tool_choice": {"type": "custom"}, "tools": [TOOL]}, "tool_choice", None),
        ({"tool_choice": allowed("auto", "g"), "tools": [TOOL]}, "tool_choice", None),
        ({"tool_choice": allowed("never", "f"), "tools": [TOOL]}, "tool_choice", None),
        ({"tool_choice": allowed("auto"), "tools": [TOOL]}, "tool_choice", None),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
        ({"response_format": {"type": "xml"}}, "response_format.type", None),
        ({"response_format": {"type": "json_schema"}}, "response_format", None),
        (json_schema(name="a b"), "response_format.json_schema.name", None),
        (json_schema(schema=None), "response_format.json_schema.schema", "missing_required_parameter"),
        (json_schema(schema="x"), "response_format.json_schema.schema", "invalid_type"),
        ({"guided_choice": []}, "guided_choice", None),
        ({"guided_choice": [1]}, "guided_choice[0]", "invalid_type"),
        ({"guided_regex": 5}, "guided_regex", "invalid_type"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", None),
        ({"min_tokens": -1}, "min_tokens", None),
        ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
        ({"reasoning_effort": "wild"}, "reasoning_effort", None),
        ({"modalities": ["text", "audio"]}, "modalities", None),
        ({"audio": {"voice": "alloy"}}, "audio", None),
        ({"functions": [{"name": "f"}]}, "functions", None),
        ({"functions": [{"name": "f"}], "function_call": "auto"}, "functions", None),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", None),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", None),
        ({"chat_template_kwargs": {"sanitize_control_tokens": True}}, "chat_template_kwargs", None),
    ],
)
def test_a_chat_field_that_is_wrong_is_named(fields, param, code):
    error = refusal(chat, **fields)
    assert (error.param, error.code) == (param, code)
    assert param in error.message or param.split("[")[0] in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": "x"}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "logprobs": 1}, "best_of"),
        ({"best_of": 100, "prompt": ["a", "b"]}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_completion_field_that_is_wrong_is_named(fields, param):
    assert refusal(completion, **fields).param == param


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "modalities": [1] * 5000}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "role_mapping": dict.fromkeys(MANY, 1)}),
        (ChatRequest, {"messages": [1] * 5000}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "tools": [1] * 5000}),
        (ResponseRequest, {"input": [1] * 5000}),
        (ResponseRequest, {"input": "a", "include": [1] * 5000}),
        (ResponseRequest, {"input": "a", "metadata": dict.fromkeys(MANY, 1)}),
        (ResponseRequest, {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": [1] * 5000}]}),
    ],
)
def test_a_thousand_faults_are_not_written_down_one_by_one(kind, fields):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(fields)
    assert refused.value.error_count() == 1


def test_null_counts_as_absent():
    fields = dict.fromkeys({*ChatRequest.model_fields} - {"messages"})
    assert chat(**fields) == chat()


def test_fields_that_are_not_known_are_ignored():
    assert chat(vendor={"x": 1}, user="me") == chat(user="me")


def test_stop_is_a_string_or_a_list():
    assert chat(stop="a").stop == ["a"]
    assert chat(stop=["a", "b", "c", "d", "e"]).stop == ["a", "b", "c", "d", "e"]
    assert chat(stop=[]).stop == []
    assert chat(stop="").stop == chat(stop=[""]).stop == []
    assert chat(stop=["", "a"]).stop == ["a"]


def test_a_byte_order_mark_before_the_json_is_ignored():
    assert read_object(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}') == {"a": "\ufeff"}


def test_prompts_are_always_a_list():
    assert completion(prompt="a").prompt == ["a"]
    assert completion(prompt=["a", "b"]).prompt == ["a", "b"]
    assert completion(prompt=[1, 2]).prompt == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompt == [[1], [2, 3]]


def test_text_parts_join_to_the_plain_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"


def test_developer_is_system():
    body = chat(messages=[{"role": "developer", "content": "x"}])
    assert body.messages[0].as_dict() == {"role": "system", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"reasoning": "hm"}, "hm"),
        ({"reasoning_content": "hm"}, "hm"),
        ({"reasoning": "a", "reasoning_content": "b"}, "b"),
        ({"reasoning": "a", "reasoning_content": ""}, ""),
        ({"reasoning": "a", "reasoning_content": None}, "a"),
    ],
)
def test_reasoning_is_another_name_of_reasoning_content(fields, want):
    body = chat(messages=[{"role": "assistant", "content": "x", **fields}])
    assert body.messages[0].as_dict() == {"role": "assistant", "content": "x", "reasoning_content": want}


def sampling_of(body, defaults=None, **more):
    return new_sampling(defaults or {}, body.given_sampling, max_tokens=10, **more)


def test_the_newer_limit_wins():
    assert chat(max_tokens=5, max_completion_tokens=3).wanted_tokens == 3
    assert chat(max_tokens=5, max_completion_tokens=None).wanted_tokens == 5
    assert chat().wanted_tokens is None


def test_what_a_request_leaves_out_comes_from_the_command_line():
    defaults = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "n_draft_tokens": 5}
    sampling = sampling_of(chat(), defaults)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 40, 0.1)
    asked = chat(temperature=0, top_p=0.5, top_k=0, logit_bias={"7": -100}, seed=-1)
    own = sampling_of(asked, defaults, top_logprobs=2)
    assert (own.temperature, own.top_p, own.top_k) == (0, 0.5, 0)
    assert (own.logit_bias, own.seed, own.top_logprobs) == (((7, -100.0),), -1, 2)


@pytest.mark.parametrize(
    ("fields", "want"), [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)]
)
def test_logprobs_of_a_chat(fields, want):
    assert chat(**fields).needed_logprobs == want


@pytest.mark.parametrize(
    ("fields", "want"),
    [({}, None), ({"logprobs": 0}, 0), ({"logprobs": 3}, 3), ({"logprobs": True, "top_logprobs": 2}, 2)],
)
def test_logprobs_of_a_completion(fields, want):
    assert completion(**fields).needed_logprobs == want


OTHER = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("choice", "told", "must"),
    [
        (None, ["f", "g"], []),
        ("auto", ["f", "g"], []),
        ("none", [], []),
        ("required", ["f", "g"], ["f", "g"]),
        (named("g"), ["g"], ["g"]),
        (allowed("auto", "g"), ["g"], []),
        (allowed("required", "g", "f"), ["f", "g"], ["f", "g"]),
    ],
)
def test_a_tool_choice_says_what_is_offered_and_what_must_be_called(choice, told, must):
    body = chat(tools=[TOOL, OTHER], tool_choice=choice)
    assert [tool["function"]["name"] for tool in body.offered_tools] == told
    assert [function.name for function in body.must_call] == must


def test_a_tool_goes_to_the_model_as_it_came():
    assert chat(tools=[TOOL]).offered_tools == [TOOL]
    assert chat(tools=[OTHER, TOOL], tool_choice="required").must_call[1].param == "tools[1].function.parameters"


def test_without_tools_a_choice_that_asks_for_none_is_harmless():
    assert chat(tool_choice="auto").offered_tools == chat(tool_choice="none").offered_tools == []
    assert chat(functions=[{"name": "f"}], function_call="none").functions


@pytest.mark.parametrize(("parallel", "most"), [(None, None), (True, None), (False, 1)])
def test_without_parallel_calls_there_is_one_call_at_most(parallel, most):
    assert chat(tools=[TOOL], parallel_tool_calls=parallel).max_calls == most


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", {"type": "object"}, "response_format")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ("json_schema", SCHEMA, "response_format")),
        (json_schema(schema=SCHEMA, strict=False), ("json_schema", SCHEMA, "response_format", False)),
        (json_schema(schema=SCHEMA, strict=True), ("json_schema", SCHEMA, "response_format")),
        ({"guided_json": SCHEMA}, ("json_schema", SCHEMA, "guided_json")),
        ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", SCHEMA, "guided_json")),
        ({"guided_regex": "a+"}, ("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, ("choice", ["a", "b"], "guided_choice")),
        ({"guided_grammar": "root ::= x"}, ("grammar", "root ::= x", "guided_grammar")),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a"}}, ("regex", "a", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, ("choice", ["a"], "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "g"}}, ("grammar", "g", "structured_outputs.grammar")),
        (
            {"structured_outputs": {"json_object": True}},
            ("json_schema", {"type": "object"}, "structured_outputs.json_object"),
        ),
        ({"grammar": "root ::= x"}, ("grammar", "root ::= x", "grammar")),
        ({"json_schema": SCHEMA}, ("json_schema", SCHEMA, "json_schema")),
        ({"regex": "a"}, ("regex", "a", "regex")),
    ],
)
def test_every_way_to_say_what_the_text_must_be(make, fields, rule):
    assert make(**fields).rule() == (rule and Rule(*rule))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "grammar": "x"}, "grammar"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"guided_json": "{"}, "guided_json"),
    ],
)
def test_only_one_thing_can_be_demanded_of_a_text(fields, param):
    assert refusal(chat(**fields).rule).param == param


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
def test_the_reasoning_effort_goes_to_the_chat_template(fields, options):
    assert chat(**fields).template_options == options


def test_fields_of_openai_s_own_service_change_nothing():
    ignored = {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "verbosity": "low",
        "modalities": ["text"],
        "web_search_options": {},
        "moderation": {},
        "parallel_tool_calls": True,
        "function_call": "none",
    }
    assert sampling_of(chat(**ignored)) == sampling_of(chat())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, ""),
        ({"type": "content", "content": "ab"}, "ab"),
        ({"type": "content", "content": ""}, ""),
        ({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
    ],
)
def test_a_prediction_is_a_text_or_parts_of_one(given, text):
    request = chat(prediction=given).generation_request()
    assert request.prediction == text
    assert request.sampling == chat().generation_request().sampling


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("text", "prediction"),
        ([], "prediction"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": ["a"]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "prediction.content"),
        ({"type": "content", "content": "\ud800"}, "prediction.content"),
    ],
)
def test_a_prediction_of_another_shape_is_refused(given, param):
    assert refusal(chat, prediction=given).param == param


def test_penalties_without_a_context_size_look_at_the_whole_output():
    sampling = sampling_of(chat(presence_penalty=1, frequency_penalty=1, frequency_context_size=7))
    assert (sampling.presence_context_size, sampling.frequency_context_size) == (None, 7)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_a_seed_has_64_bits(seed):
    assert chat(seed=seed).seed == seed


@pytest.mark.parametrize("make", [chat, completion])
def test_mlx_lm_servers_default_of_top_logprobs_is_none(make):
    assert make(top_logprobs=-1).needed_logprobs is None
    assert make(top_logprobs=-1, logprobs=False).needed_logprobs is None
    # There it means none to mlx_lm.server, and all of the vocabulary to vLLM.
    assert refusal(make, top_logprobs=-1, logprobs=True).param == "top_logprobs"


def test_a_json_schema_needs_no_name():
    fields = json_schema(schema=SCHEMA)
    del fields["response_format"]["json_schema"]["name"]
    assert chat(**fields).rule().value == SCHEMA


@pytest.mark.parametrize(("strict", "want"), [(None, False), (False, False), (True, True)])
def test_what_cannot_be_enforced_is_refused_when_the_request_is_strict(strict, want):
    assert chat(**json_schema(schema=SCHEMA, strict=strict)).rule().strict == want
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": strict}}
    assert chat(tools=[tool], tool_choice="required").must_call[0].strict == want


SAID = {"role": "assistant", "content": "So"}
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("messages", "fields", "want"),
    [
        ([USER, SAID], {}, True),
        ([USER, SAID], {"continue_final_message": True}, True),
        ([USER, SAID], {"continue_final_message": True, "add_generation_prompt": False}, True),
        ([SAID], {"continue_final_message": True}, True),
        ([USER, SAID], {"add_generation_prompt": True}, False),
        ([USER, SAID], {"add_generation_prompt": False}, False),
        ([USER, SAID], {"continue_final_message": False}, False),
        ([SAID], {}, False),
        ([USER, CALLING], {}, False),
        ([USER], {}, False),
    ],
)
def test_an_assistant_s_last_message_is_the_beginning_of_the_answer(messages, fields, want):
    assert chat(messages=messages, **fields).ends_in_answer == want


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([USER], {}),
        ([USER, CALLING], {}),
        ([USER, {"role": "assistant", "function_call": {"name": "f"}}], {}),
        ([USER, SAID], {"add_generation_prompt": True}),
    ],
)
def test_only_words_of_the_assistant_can_be_continued(messages, fields):
    assert refusal(chat, messages=messages, continue_final_message=True, **fields).param == "continue_final_message"


@pytest.mark.parametrize(
    ("fields", "harmless"),
    [
        ({"bad_words": ["x"]}, {"bad_words": []}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": None}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": True}),
        ({"use_beam_search": True}, {"use_beam_search": False}),
        ({"return_token_ids": True}, {"return_token_ids": False}),
        ({"chat_template": "{{ 1 }}"}, {"chat_template": None}),
        ({"truncate_prompt_tokens": 5}, {"truncate_prompt_tokens": None}),
        ({"add_special_tokens": True}, {"add_special_tokens": False}),
        ({"echo": True}, {"echo": False}),
        ({"allowed_token_ids": [1], "min_tokens": 1}, {"allowed_token_ids": [1]}),
        ({"allowed_token_ids": [1], "ignore_eos": True}, {"min_tokens": 1, "ignore_eos": True}),
        ({"allowed_token_ids": []}, {"allowed_token_ids": None}),
        ({"stop_token_ids": [-1]}, {"stop_token_ids": []}),
        ({"stop_token_ids": [True]}, {}),
        ({"stop_token_ids": list(range(65))}, {"stop_token_ids": list(range(64))}),
    ],
)
def test_what_vllm_has_and_is_not_served_is_refused_where_it_asks_for_something(fields, harmless):
    assert refusal(chat, **fields).param.split("[")[0] == next(iter(fields))
    assert chat(**harmless)


def test_what_a_completion_has_alone():
    assert completion(truncate_prompt_tokens=5, add_special_tokens=False).truncate_prompt_tokens == 5
    assert completion(echo=True).echo
    assert refusal(completion, truncate_prompt_tokens=5, echo=True).param == "truncate_prompt_tokens"


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_a_picture_in_a_tools_result_becomes_a_note():
    parts = [{"type": "text", "text": "Done. "}, PICTURE]
    result = chat(messages=[{"role": "tool", "tool_call_id": "x", "content": parts}]).messages[0]
    assert result.as_dict()["content"] == "Done. [image_url omitted: this model reads text only]"


CALL = {"name": "f", "arguments": '{"a": 1}'}


def test_the_older_form_of_a_call_and_its_result():
    messages = [
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "function", "name": "f", "content": "2"},
    ]
    called, result = (message.as_dict() for message in chat(messages=messages).messages)
    assert called["tool_calls"] == [{"id": "", "type": "function", "function": CALL}]
    assert "function_call" not in called
    assert result == {"role": "tool", "name": "f", "content": "2", "tool_call_id": ""}


def test_the_newer_form_of_a_call_wins():
    newer = [{"id": "x", "type": "function", "function": {"name": "g", "arguments": "{}"}}]
    message = {"role": "assistant", "tool_calls": newer, "function_call": CALL}
    assert chat(messages=[message]).messages[0].as_dict()["tool_calls"] == newer
