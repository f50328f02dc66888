"""The openai package against mlx-serve: pip install openai, then run this. BASE_URL says where the server is."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8080/v1"), api_key="not-needed")
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]

answer = client.chat.completions.create(model=model, messages=question, temperature=0)
print(answer.choices[0].message.content)

for chunk in client.chat.completions.create(model=model, messages=question, temperature=0, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
