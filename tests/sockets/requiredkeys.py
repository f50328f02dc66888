"""The keys that every object and event has to have, whatever their values: typed clients fail without them.

From OpenAI's API description (Response, its items, parts and events), Open Responses (its ResponseResource requires
more of them) and Anthropic's packages (what is not optional in TypeScript).
"""

_RESPONSE = """
    id object created_at completed_at status incomplete_details model previous_response_id instructions output error
    tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key
"""
_USAGE = "input_tokens input_tokens_details output_tokens output_tokens_details total_tokens"
_ITEMS = {
    "message": "id type status role content",
    "reasoning": "id type summary",
    "function_call": "id type status call_id name arguments",
    "custom_tool_call": "id type status call_id name input",
    "function_call_output": "id type status call_id output",
    "custom_tool_call_output": "id type status call_id output",
    "compaction": "id type encrypted_content",
}
_PARTS = {
    "output_text": "type text annotations logprobs",
    "input_text": "type text",
    "reasoning_text": "type text",
    "summary_text": "type text",
}
_FORMATS = {"text": "type", "json_object": "type", "json_schema": "type name description schema strict"}
_TOOLS = {"function": "type name description parameters strict", "custom": "type name"}
_STATE = "response"
_IN_ITEM = "item_id output_index"
_EVENTS = {
    "created": _STATE,
    "in_progress": _STATE,
    "completed": _STATE,
    "incomplete": _STATE,
    "failed": _STATE,
    "output_item.added": "output_index item",
    "output_item.done": "output_index item",
    "content_part.added": f"{_IN_ITEM} content_index part",
    "content_part.done": f"{_IN_ITEM} content_index part",
    "output_text.delta": f"{_IN_ITEM} content_index delta logprobs",
    "output_text.done": f"{_IN_ITEM} content_index text logprobs",
    "reasoning_text.delta": f"{_IN_ITEM} content_index delta",
    "reasoning_text.done": f"{_IN_ITEM} content_index text",
    "reasoning_summary_part.added": f"{_IN_ITEM} summary_index part",
    "reasoning_summary_part.done": f"{_IN_ITEM} summary_index part",
    "reasoning_summary_text.delta": f"{_IN_ITEM} summary_index delta",
    "reasoning_summary_text.done": f"{_IN_ITEM} summary_index text",
    "function_call_arguments.delta": f"{_IN_ITEM} delta",
    "function_call_arguments.done": f"{_IN_ITEM} name arguments",
    "custom_tool_call_input.delta": f"{_IN_ITEM} delta",
    "custom_tool_call_input.done": f"{_IN_ITEM} input",
}


def check_response(response: dict) -> None:
    _has(response, _RESPONSE)
    _has(response["text"], "format")
    _has(response["text"]["format"], _FORMATS[response["text"]["format"]["type"]])
    _has(response["reasoning"], "effort summary")
    if response["usage"] is not None:
        check_usage(response["usage"])
    for tool in response["tools"]:
        _has(tool, _TOOLS.get(tool["type"], "type"))
    for item in response["output"]:
        check_item(item)


def check_usage(usage: dict) -> None:
    _has(usage, _USAGE)
    _has(usage["input_tokens_details"], "cached_tokens cache_write_tokens")
    _has(usage["output_tokens_details"], "reasoning_tokens")


def check_item(item: dict) -> None:
    _has(item, _ITEMS[item["type"]])
    for part in (*item.get("content", ()), *item.get("summary", ())):
        check_part(part)


def check_part(part: dict) -> None:
    _has(part, _PARTS[part["type"]])
    for entry in part.get("logprobs", ()):
        _has(entry, "token logprob bytes top_logprobs")


def check_event(event: dict) -> None:
    _has(event, "type sequence_number " + _EVENTS[event["type"].removeprefix("response.")])
    if "response" in event:
        check_response(event["response"])
    if "item" in event:
        check_item(event["item"])
    if "part" in event:
        check_part(event["part"])


_MESSAGE = "id type role model content stop_reason stop_sequence stop_details container diagnostics usage"
_MESSAGE_USAGE = """
    cache_creation cache_creation_input_tokens cache_read_input_tokens inference_geo input_tokens output_tokens
    output_tokens_details server_tool_use service_tier
"""
_BLOCKS = {
    "text": "type text citations",
    "thinking": "type thinking signature",
    "tool_use": "type id name input",
}
_MESSAGE_EVENTS = {
    "message_start": "message",
    "content_block_start": "index content_block",
    "content_block_delta": "index delta",
    "content_block_stop": "index",
    "message_delta": "delta usage",
    "message_stop": "",
    "ping": "",
    "error": "error",
}
MODEL = """
    id object created owned_by type display_name created_at lifecycle capabilities deprecated_at retires_at line
    max_input_tokens max_tokens
"""


def check_message(message: dict) -> None:
    _has(message, _MESSAGE)
    _has(message["usage"], _MESSAGE_USAGE)
    for block in message["content"]:
        _has(block, _BLOCKS[block["type"]])


def check_message_event(event: dict) -> None:
    _has(event, "type " + _MESSAGE_EVENTS[event["type"]])
    if event["type"] == "message_start":
        check_message(event["message"])
    elif event["type"] == "content_block_start":
        _has(event["content_block"], _BLOCKS[event["content_block"]["type"]])
    elif event["type"] == "message_delta":
        _has(event["delta"], "container stop_details stop_reason stop_sequence")
        _has(event["usage"], _MESSAGE_USAGE)


def check_model(model: dict) -> None:
    _has(model, MODEL)


def _has(value: dict, keys: str) -> None:
    missing = set(keys.split()) - value.keys()
    assert not missing, f"{value.get('type', value.get('object'))} has no {sorted(missing)}"
