"""The prompts of a request, as token ids, within the model's context. Raises ApiError 400 when one cannot fit.

Knows no dialect and no jobs.
"""

from __future__ import annotations

from functools import partial

from mlx_serve.api.cost import MAX_CUT_TOKENS, length_check, n_content_chars
from mlx_serve.api.generation_request import ChatConversation, PlainTexts
from mlx_serve.api.serving import Services, context_tokens, template_options
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.engine.token_ids import check_ids
from mlx_serve.text.prompt import can_continue, chat_text, text_prompt
from mlx_serve.text.templates.rendering import guard_of
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import Prompt, RawRequest


def chat_prompt(
    services: Services, request: RawRequest, entry: ModelEntry, tokenizer: Tokenizer, asked: ChatConversation
) -> Prompt:
    """The prompt of a conversation. Raises ApiError also when the template refuses it."""
    most = context_tokens(services, entry)
    check = length_check(request, most, asked.param)
    is_begun = asked.last_is_begun == "yes" or (asked.last_is_begun == "allowed" and can_continue(tokenizer))
    render = partial(
        chat_text,
        tokenizer,
        tools=asked.tools,
        options=template_options(services, entry, asked.template_options),
        role_mapping=asked.role_mapping,
        begun=asked.messages[-1] if is_begun else None,
        is_open=asked.is_open or is_begun,
        check=check,
    )
    messages = asked.messages[:-1] if is_begun else asked.messages
    if asked.shorten is not None and most is not None:
        # If the answer may take more than half of the context, the prompt still gets half.
        return asked.shorten(messages, render, tokenizer, check, most - min(asked.reserved, most // 2))
    check(n_content_chars(asked.messages) // tokenizer.max_token_chars)
    return render(messages).prompt(check)


def prediction_tokens(
    services: Services, request: RawRequest, entry: ModelEntry, tokenizer: Tokenizer, text: str
) -> tuple[int, ...]:
    """The tokens of a predicted answer, which has to fit in the context as a prompt does."""
    if not text:
        return ()
    check = length_check(request, context_tokens(services, entry), "prediction", "prediction")
    check(len(text) // tokenizer.max_token_chars)
    # Encoded as an answer is: a control token that is spelled out in the prediction is text.
    return tuple(tokenizer.encode(guard_of(tokenizer, is_own=False).text(text), special=False, check=check))


def text_prompts(
    services: Services, request: RawRequest, entry: ModelEntry, tokenizer: Tokenizer, asked: PlainTexts
) -> list[Prompt]:
    """The prompts of plain texts and lists of token ids."""
    return [_text_prompt(services, request, entry, tokenizer, asked, given) for given in asked.prompts]


def echoes(tokenizer: Tokenizer, asked: PlainTexts) -> list[str]:
    """The text of each prompt that is echoed."""
    return [p if isinstance(p, str) else tokenizer.decode(p) for p in asked.prompts] if asked.is_echoed else []


def _text_prompt(
    services: Services,
    request: RawRequest,
    entry: ModelEntry,
    tokenizer: Tokenizer,
    asked: PlainTexts,
    given: str | list[int],
) -> Prompt:
    most = context_tokens(services, entry)
    if isinstance(given, str):
        # A prompt over the context is refused. One that the request wants truncated is tokenized up to a limit.
        check = length_check(request, most if asked.kept_tokens is None else MAX_CUT_TOKENS, "prompt")
        prompt = text_prompt(tokenizer, given, check, special=asked.special)
    else:
        # The ids are checked before anything decodes them: tokenizers check ids no better than MLX does.
        check_ids(given, entry.vocab_size or tokenizer.n_tokens, "prompt")
        prompt = Prompt(tuple(given))
    return _last_tokens(prompt, asked.kept_tokens, most)


def _last_tokens(prompt: Prompt, n_tokens: int | None, most: int | None) -> Prompt:
    """The prompt's last ``n_tokens``; None: all of them, -1: as many as leave room for a token."""
    kept = n_tokens if n_tokens != -1 else most - 1 if most is not None else None
    return prompt if kept is None else Prompt(prompt.tokens[max(0, len(prompt.tokens) - kept) :])
