"""The prompt of a chat request."""

from __future__ import annotations

from mlx_serve.api.cost import n_content_chars
from mlx_serve.api.openai.schema import ChatRequest
from mlx_serve.api.serving import Services, context_check, template_options
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.text.prompt import can_continue, chat_prompt
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import Prompt, RawRequest


def request_prompt(
    services: Services, request: RawRequest, entry: ModelEntry, tokenizer: Tokenizer, body: ChatRequest
) -> Prompt:
    """The prompt of a chat request. Raises ApiError 400 when it cannot fit, or the template refuses it."""
    messages = [message.as_dict() for message in body.messages]
    check = context_check(services, request, entry, "messages")
    check(n_content_chars(messages) // tokenizer.max_token_chars)
    continues = body.continue_final_message or (body.ends_in_answer and can_continue(tokenizer))
    begun = messages.pop() if continues else None
    return chat_prompt(
        tokenizer,
        messages,
        tools=body.offered_tools,
        options=template_options(services, entry, body.template_options),
        role_mapping=body.role_mapping,
        begun=begun,
        is_open=body.add_generation_prompt is not False or continues,
        check=check,
    )
