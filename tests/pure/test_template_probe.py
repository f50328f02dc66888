"""Templates that leave out parts of a conversation, or refuse them: what each is given instead, and nothing is lost.

Each template here is a function that behaves as the ones of the models that are named.
"""

import json

import pytest

from mlx_serve.testing import FakeTokenizer
from mlx_serve.text.prompt import chat_prompt
from mlx_serve.text.templates.probe import plan
from mlx_serve.values import ApiError
from tests.pure.formatkit import TOOLS, model
from tests.pure.test_prompt import REMINDER, assistant, calling, system, user


def refuse(text: str):
    raise ApiError(400, text, param="messages")


def result(content: str, call_id: str = "call_0123456789abcdef", **fields) -> dict:
    return {"role": "tool", "content": content, "tool_call_id": call_id, **fields}


def line(message: dict) -> str:
    """A message with all that is in it."""
    return json.dumps(message, ensure_ascii=False)


def full(messages, tools, options) -> str:
    return "\n".join(map(line, [*messages, *(tools or ())]))


class Recorder:
    """What a template was given last, and what it made of it."""

    def __init__(self, template) -> None:
        self.template = template
        self.n_renderings = 0

    def __call__(self, messages, tools, options) -> str:
        self.n_renderings += 1
        self.messages, self.tools, self.options = list(messages), tools, options
        self.text = self.template(messages, tools, options)
        return self.text


def given(template, messages, tools=None, **facts) -> list[dict]:
    """The messages that the template gets."""
    recorder = Recorder(template)
    chat_prompt(model(render=recorder, **facts), messages, tools=tools)
    return recorder.messages


EVERYTHING = [
    system("a"),
    user("b"),
    assistant("c", tool_calls=[calling('{"d": "e"}'), calling("{}", "f", "g")]),
    result("h"),
    result("i", "g"),
    system("j"),
    assistant("k"),
    user("l"),
]


def test_a_template_that_shows_everything_is_given_it_as_it_is():
    got = given(full, EVERYTHING, TOOLS)
    assert [message["content"] for message in got] == [message["content"] for message in EVERYTHING]
    assert got[2]["tool_calls"][0]["function"]["arguments"] == {"d": "e"}


def test_a_template_is_probed_once():
    recorder = Recorder(full)
    tokenizer = model(render=recorder)
    chat_prompt(tokenizer, [user("x")])
    n_probes = recorder.n_renderings
    assert n_probes > 10
    chat_prompt(tokenizer, EVERYTHING)
    assert recorder.n_renderings == n_probes + 1
    chat_prompt(tokenizer, [user("x")], tools=TOOLS)
    n_probes = recorder.n_renderings
    chat_prompt(tokenizer, EVERYTHING, tools=TOOLS)
    assert recorder.n_renderings == n_probes + 1


# System messages


def no_system(messages, tools, options):
    """Phi-3-medium's passes over it without a word."""
    return full([message for message in messages if message["role"] != "system"], tools, options)


def leading_system(messages, tools, options):
    """SmolLM3's, Nemotron's: the first message, and no other."""
    return full(messages[:1], tools, options) + no_system(messages[1:], None, options)


def last_system(messages, tools, options):
    """DeepSeek R1's: the last one, in front."""
    systems = [message for message in messages if message["role"] == "system"]
    return full(systems[-1:], tools, options) + no_system(messages, None, options)


def system_with_the_last_user(messages, tools, options):
    """Mistral Nemo's: it is a part of the user's message that the prompt ends with."""
    if messages[-1]["role"] == "user":
        return full(messages[:1], tools, options) + no_system(messages[1:], None, options)
    return no_system(messages, tools, options)


LATE = [system("a"), system("b"), user("x"), assistant("y"), system("c"), user("z")]


def test_a_system_message_that_would_vanish_is_the_user_s():
    assert given(no_system, [system("a"), user("b")]) == [user("a\n\nb")]
    assert given(no_system, [system("a"), assistant("b")])[0] == user("a")
    assert given(no_system, [system("a")]) == [user("a")]
    assert given(no_system, LATE) == [user("a\n\nb\n\nx"), assistant("y"), user(REMINDER), user("z")]


@pytest.mark.parametrize("template", [leading_system, last_system])
def test_a_second_system_message_that_would_vanish_is_joined_and_a_late_one_the_user_s(template):
    assert given(template, LATE) == [system("a\n\nb"), user("x"), assistant("y"), user(REMINDER), user("z")]


def test_a_system_message_that_is_shown_with_the_last_user_is_not_lost_in_a_loop_of_tools():
    turn = [assistant("", tool_calls=[calling("{}")]), result("1")]
    assert given(system_with_the_last_user, [system("a"), user("x"), *turn])[0] == user("a\n\nx")
    assert given(system_with_the_last_user, [system("a"), user("x")]) == [system("a"), user("x")]


# Calls


TWO_CALLS = assistant("", tool_calls=[calling('{"a": 1}'), calling('{"b": 2}', "f", "second")])


def single_calls(messages, tools, options):
    """Llama 3's."""
    if any(len(message.get("tool_calls", ())) > 1 for message in messages):
        refuse("This model only supports single tool-calls at once!")
    return full(messages, tools, options)


def test_two_calls_are_two_messages_each_with_its_result():
    messages = [user("x"), TWO_CALLS, result("2", "second"), result("1")]
    got = given(single_calls, messages)
    assert [message["role"] for message in got] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [message["content"] for message in got if message["role"] == "tool"] == ["1", "2"]
    assert [call["function"]["name"] for m in got for call in m.get("tool_calls", ())] == ["add", "f"]


def calls_or_text(messages, tools, options):
    """Llama 3's, too: what is said before a call vanishes."""
    return full([{**m, "content": ""} if "tool_calls" in m else m for m in messages], tools, options)


def test_what_is_said_before_a_call_is_a_message_of_its_own_where_it_would_vanish():
    call = calling("{}")
    got = given(calls_or_text, [user("x"), assistant("y", tool_calls=[call]), result("1")])
    assert [message["content"] for message in got] == ["x", "y", "", "1"]
    assert "tool_calls" not in got[1]


def harmony(messages, tools, options):
    """gpt-oss's: one call a message, thoughts or text beside it, and neither once an answer followed."""
    shown = []
    for i, message in enumerate(messages):
        if message["role"] == "system" and i:
            continue
        calls, thoughts = message.get("tool_calls", []), message.get("reasoning_content")
        if calls and message["content"] and thoughts:
            refuse("Cannot pass both content and thinking in an assistant message with tool calls!")
        is_answered = any(m["role"] == "assistant" and "tool_calls" not in m for m in messages[i + 1 :])
        beside = {} if calls and is_answered else {"content": message["content"], "thinking": thoughts}
        shown.append({"role": message["role"], "tool_calls": calls[:1], **beside})
    return full(shown, tools, options)


def test_gpt_oss_gets_one_call_a_message_and_what_led_to_it():
    spoken = assistant("First.", reasoning_content="hm", tool_calls=[calling("{}"), calling("{}", "f", "second")])
    got = given(harmony, [user("x"), spoken, result("two", "second"), result("one")])
    assert [message["role"] for message in got] == ["user", "assistant", "tool", "assistant", "tool"]
    assert (got[1]["content"], got[1]["reasoning_content"]) == ("", "hm\n\nFirst.")
    assert (got[2]["content"], got[4]["content"], got[3].get("reasoning_content")) == ("one", "two", None)
    # The template shows no thoughts once an answer followed: then what was said stands for itself.
    got = given(harmony, [user("x"), spoken, result("one"), result("two", "second"), assistant("Done."), user("y")])
    assert [message["content"] for message in got] == ["x", "First.", "", "one", "", "two", "Done.", "y"]


def test_gpt_oss_is_told_all_that_the_system_says():
    assert given(harmony, LATE) == [system("a\n\nb"), user("x"), assistant("y"), user(REMINDER), user("z")]


def calls_without_content(messages, tools, options):
    """R1-Distill's and DeepSeek V2.5's: a call is shown where the content is null, and vanishes otherwise."""
    shown = []
    for message in messages:
        has_call = "tool_calls" in message and message["content"] is None
        shown.append(message if has_call else {key: value for key, value in message.items() if key != "tool_calls"})
    return full(shown, tools, options)


def test_a_call_vanishes_no_more_where_its_content_must_be_null():
    got = given(calls_without_content, [user("x"), assistant("y", tool_calls=[calling("{}")]), result("1")])
    assert [message["content"] for message in got] == ["x", "y", None, "1"]
    assert got[2]["tool_calls"]


def named(messages, tools, options):
    """FunctionGemma's."""
    if any(message["role"] == "tool" and "name" not in message for message in messages):
        refuse("Results need the name of the function.")
    return full(messages, tools, options)


def test_a_result_gets_its_name_from_its_call():
    messages = [user("x"), TWO_CALLS, result("1"), result("2", "second"), result("3", "second", name="own")]
    got = given(named, messages[:4])
    assert [message["name"] for message in got if message["role"] == "tool"] == ["add", "f"]
    assert all("name" not in message for message in given(full, messages[:4]))


def paired(messages, tools, options):
    """Mistral's of 2512: as many results as calls."""
    n_open = 0
    for message in messages:
        n_open += len(message.get("tool_calls", ())) - (message["role"] == "tool")
        if n_open < 0 or (n_open and message["role"] not in ("assistant", "tool")):
            refuse("Not the same number of function calls and responses")
    return full(messages, tools, options)


@pytest.mark.parametrize(
    "messages",
    [
        [user("x"), result("1"), user("y")],
        [result("1"), user("y")],
        [user("x"), TWO_CALLS, result("1"), user("y")],
        [user("x"), assistant("", tool_calls=[calling("{}")]), user("y")],
    ],
)
def test_results_without_calls_and_calls_without_results_are_text(messages):
    recorder = Recorder(paired)
    chat_prompt(model(render=recorder), messages)
    assert not any("tool_calls" in message or message["role"] == "tool" for message in recorder.messages)
    for message in messages:
        assert message["content"] in recorder.text
        assert all(call["function"]["name"] in recorder.text for call in message.get("tool_calls", ()))


def test_what_a_model_has_to_say_of_calls_is_written_in_the_form_that_it_is_told_to_use():
    def no_calls(messages, tools, options):
        return full([{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "tool"], None, {})

    got = given(no_calls, [user("x"), assistant("", tool_calls=[calling('{"a":1}')]), result("1")], TOOLS)
    assert '<tool_call>\n{"name": "FUNCTION", "arguments": {ARGUMENTS}}\n</tool_call>' in got[0]["content"]
    assert got[2]["content"] == '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>'


# Tools


def test_tools_that_are_shown_in_the_system_message_get_one():
    def in_system(messages, tools, options):
        """Motif's."""
        return full(messages, tools if messages[0]["role"] == "system" else None, options)

    assert given(in_system, [user("x")], TOOLS) == [system(""), user("x")]
    assert given(in_system, [system("a"), user("x")], TOOLS) == [system("a"), user("x")]
    assert given(in_system, [user("x")]) == [user("x")]


def test_tools_that_are_shown_with_the_last_user_have_one():
    def with_last_user(messages, tools, options):
        """Mistral's."""
        return full(messages, tools if messages[-1]["role"] != "assistant" else None, options)

    assert given(with_last_user, [user("x"), assistant("y")], TOOLS)[-1] == user("")
    assert given(with_last_user, [user("x"), assistant("y")])[-1] == assistant("y")


def test_a_template_that_looks_for_a_function_s_fields_in_the_tool_itself_finds_them():
    def flat(messages, tools, options):
        """Apertus'."""
        for tool in tools or ():
            if "description" not in tool:
                refuse("'dict object' has no attribute 'description'")
        return full(messages, [[t["name"], t["description"], t["parameters"]] for t in tools or ()], options)

    recorder = Recorder(flat)
    chat_prompt(model(render=recorder), [user("x")], tools=TOOLS)
    assert [tool["name"] for tool in recorder.tools] == [tool["function"]["name"] for tool in TOOLS]


def test_what_a_tool_leaves_out_is_filled_in_behind_what_it_has():
    def described(messages, tools, options):
        """gpt-oss's: each parameter needs a description."""
        for tool in tools or ():
            if any("description" not in p for p in tool["function"]["parameters"]["properties"].values()):
                refuse("no description")
        return full(messages, tools, options)

    recorder = Recorder(described)
    chat_prompt(model(render=recorder), [user("x")], tools=TOOLS)
    parameters = recorder.tools[0]["function"]["parameters"]
    assert list(parameters) == ["type", "properties"]
    assert parameters["properties"]["city"] == {"type": "string", "description": ""}


def test_a_tool_that_the_template_fails_at_is_described_in_words():
    def typed(messages, tools, options):
        for tool in tools or ():
            if any("type" not in p for p in tool["function"].get("parameters", {}).get("properties", {}).values()):
                refuse("no type")
        return full(messages, tools, options)

    union = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": union}}}
    recorder = Recorder(typed)
    chat_prompt(model(render=recorder), [user("x")], tools=[{"type": "function", "function": function}])
    assert recorder.tools is None
    assert json.dumps(union) in recorder.messages[0]["content"]


# Content and turns


def test_content_is_given_as_parts_where_the_template_reads_nothing_else():
    def parts(messages, tools, options):
        """Llama-Guard-3's."""
        return "".join(part["text"] for m in messages if isinstance(m["content"], list) for part in m["content"])

    assert given(parts, [user("x")]) == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]


def needs_user(messages, tools, options):
    """Qwen3.5's: a user somewhere. Gemma's: a user in front."""
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if roles[:1] != ["user"]:
        refuse("No user query found in messages.")
    return full(messages, tools, options)


def test_an_empty_user_message_stands_where_one_is_demanded():
    call = [assistant("", tool_calls=[calling("{}")]), result("1")]
    got = given(needs_user, [system("a"), *call])
    assert [message["role"] for message in got] == ["system", "user", "assistant", "tool"]
    assert got[1]["content"] == ""
    assert given(needs_user, [assistant("a"), user("b")]) == [user(""), assistant("a"), user("b")]
    assert given(needs_user, [user("b")]) == [user("b")]


def test_empty_answers_are_left_out_where_they_are_refused():
    def never_empty(messages, tools, options):
        """Mistral's of 2512."""
        if any(m["role"] == "assistant" and not m["content"] and not m.get("tool_calls") for m in messages):
            refuse("Assistant message must have either content or tool calls.")
        return full(messages, tools, options)

    assert given(never_empty, [user("a"), assistant(None), user("b")]) == [user("a"), user("b")]


def only_the_last_exchange(messages, tools, options):
    """Granite Guardian's."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    return full(messages[last:], tools, options)


def test_a_template_that_reads_the_last_exchange_finds_the_others_in_it():
    messages = [system("s"), user("a"), assistant("b"), user("c"), assistant("d")]
    first, answer = given(only_the_last_exchange, messages)
    assert all(text in first["content"] for text in ("s", "user: ", "a", "assistant: b"))
    assert first["content"].endswith("\n\nc")
    assert answer == assistant("d")
    assert given(only_the_last_exchange, messages[-2:]) == messages[-2:]


def test_a_template_that_shows_nothing_of_the_user_is_refused():
    """Those of models for speech and ranking."""
    with pytest.raises(ApiError, match="leaves out what users write") as caught:
        chat_prompt(model(render=lambda *_: "<|audio|>"), [user("x")])
    assert (caught.value.status, caught.value.param) == (400, "messages")


# Options


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_thinking_goes_by_the_template_s_own_name(name):
    recorder = Recorder(lambda m, t, options: full(m, t, options) + ("<think>" if options.get(name) else ""))
    tokenizer = model(render=recorder)
    chat_prompt(tokenizer, [user("x")], options={"enable_thinking": True, "b": 1})
    assert recorder.options == {name: True, "b": 1}
    chat_prompt(tokenizer, [user("x")])
    assert recorder.options == {}


def test_a_model_without_a_template_needs_no_probe():
    tokenizer = FakeTokenizer(has_chat_template=False, render=None)
    assert plan(tokenizer, with_tools=True).tools == "described"


# What clients write is text


def test_an_escape_in_a_call_s_arguments_is_guarded_as_what_it_stands_for():
    def arguments_only(messages, tools, options):
        texts = [call["function"]["arguments"] for m in messages for call in m.get("tool_calls", ())]
        return full(messages, tools, options) + "".join(json.dumps(text, ensure_ascii=False) for text in texts)

    tokenizer = model(special=("<|im_end|>",), render=arguments_only)
    turn = assistant("", tool_calls=[calling(r'{"\u003c|im_end|\u003e": ["\u003c|im_end|\u003e"]}')])
    prompt = chat_prompt(tokenizer, [user("x"), turn, result("1")])
    assert "<|im_end|>" in tokenizer.decode(prompt.tokens)
    assert not tokenizer.special_ids & set(prompt.tokens)


# Parameters whose schema says more than a type


def parameters_of(tools) -> list[tuple[str, dict]]:
    functions = [tool["function"] for tool in tools or ()]
    properties = [function["parameters"]["properties"] for function in functions if "parameters" in function]
    return [(name, schema) for one in properties for name, schema in one.items() if isinstance(schema, dict)]


def shallow_tools(messages, tools, options):
    """gpt-oss's, Gemma 4's, Seed-OSS's: a parameter's name, type and description, and nothing that is in it."""
    lines = [f"{tool['function']['name']}: {tool['function'].get('description')}" for tool in tools or ()]
    lines += [f"{name}: {schema.get('type')}, {schema.get('description')}" for name, schema in parameters_of(tools)]
    return "\n".join([full(messages, None, options), *lines])


def with_enums(messages, tools, options):
    """Gemma 4's: also lists what is allowed."""
    listed = [str(schema["enum"]) for _, schema in parameters_of(tools) if "enum" in schema]
    return "\n".join([shallow_tools(messages, tools, options), *listed])


PLACE = {"type": "object", "properties": {"lat": {"type": "number", "description": "North"}}}
UNIT = {"type": "string", "enum": ["celsius", "kelvin"], "description": "The unit"}
NESTED = {
    "place": {**PLACE, "description": "Where"},
    "days": {"type": "array", "items": {"type": "string", "enum": ["monday"]}},
    "unit": UNIT,
    "when": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "also": {"$ref": "#/$defs/Place"},
    "name": {"type": "string", "description": "Who"},
    "odd": True,
}


def nested_tool() -> dict:
    parameters = {"type": "object", "properties": NESTED, "$defs": {"Place": PLACE}}
    return {"type": "function", "function": {"name": "nested", "description": "d", "parameters": parameters}}


def properties_given(template) -> dict:
    recorder = Recorder(template)
    chat_prompt(model(render=recorder), [user("x")], tools=[nested_tool()])
    return recorder.tools[0]["function"]["parameters"]["properties"]


def test_a_nested_schema_that_a_template_leaves_out_is_told_in_the_parameter_s_description():
    got = properties_given(shallow_tools)
    assert got["name"] == NESTED["name"]
    assert got["odd"] is True
    assert got["place"]["properties"] == PLACE["properties"]
    assert got["place"]["description"] == f"Where\nJSON schema: {json.dumps(PLACE)}"
    assert got["days"]["description"] == f"JSON schema: {json.dumps(NESTED['days'])}"
    assert '"enum": ["celsius", "kelvin"]' in got["unit"]["description"]
    assert '{"type": "integer"}' in got["when"]["description"]
    assert '"Place": {"type": "object", "properties": {"lat"' in got["also"]["description"]


def test_what_a_template_shows_of_a_schema_is_not_told_again():
    assert properties_given(with_enums)["unit"] == UNIT
    assert "JSON schema" in properties_given(with_enums)["place"]["description"]
    assert properties_given(full) == NESTED


def test_a_keyword_that_a_template_refuses_has_the_tools_described():
    def without_references(messages, tools, options):
        if "$ref" in str(tools):
            refuse("no type")
        return full(messages, tools, options)

    recorder = Recorder(without_references)
    tokenizer = model(render=recorder)
    chat_prompt(tokenizer, [user("x")], tools=[nested_tool()])
    assert recorder.tools is None
    assert "#/$defs/Place" in recorder.messages[0]["content"]
    chat_prompt(tokenizer, [user("x")], tools=TOOLS)
    assert recorder.tools == TOOLS
