"""LangChain against mlx-serve: pip install langchain-openai, then run this. BASE_URL says where the server is."""

import os

from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("MLX_SERVE_API_KEY", "not-needed"),
    model="default_model",
    temperature=0,
    max_tokens=64,
    # Servers other than OpenAI's are asked for the usage of a stream only when this is set.
    stream_usage=True,
)
question = "What is the capital of France? Answer in one sentence."

print(model.invoke(question).content)

used = None
for chunk in model.stream(question):
    print(chunk.content, end="", flush=True)
    used = chunk.usage_metadata or used
print(f"\n{used['output_tokens']} tokens")
