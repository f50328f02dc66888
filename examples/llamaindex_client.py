"""LlamaIndex against mlx-serve: pip install llama-index-llms-openai-like, then run this. BASE_URL as in the others."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    api_base=os.environ.get("BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("MLX_SERVE_API_KEY", "not-needed"),
    model="default_model",
    # Any model is taken for a plain completion model without tools until it is told better.
    is_chat_model=True,
    is_function_calling_model=True,
    # Of the model that is served: it cuts longer prompts itself.
    context_window=8192,
    temperature=0,
    max_tokens=64,
)
messages = [ChatMessage(role="user", content="What is the capital of France? Answer in one sentence.")]

print(model.chat(messages).message.content)

for chunk in model.stream_chat(messages):
    print(chunk.delta, end="", flush=True)
print()
