"""The demo model behind the whole server: what it answers is what mlx-lm generates."""

from concurrent.futures import ThreadPoolExecutor

import mlx_lm
import openai
import pytest
from mlx_lm.sample_utils import greedy_sampler

from mlx_serve import serve
from mlx_serve.demo.model import ensure_demo_model
from mlx_serve.settings import config

pytestmark = pytest.mark.real

FRANCE = "What is the capital of France? Answer in one sentence."
QUESTIONS = [
    FRANCE,
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is two plus two?",
    "Say hello in French.",
    "Who wrote Hamlet?",
    "Count from one to ten.",
    "Describe a dragon in a few words.",
]
N_TOKENS = 24


@pytest.fixture(scope="module")
def offline():
    """mlx-lm's own greedy answers, each generated alone, as token texts."""
    model, tokenizer = mlx_lm.load(str(ensure_demo_model()))

    def answer(question):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        steps = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=N_TOKENS, sampler=greedy_sampler)
        tokens = [step.token for step in steps]
        return [tokenizer.decode([token]) for token in tokens if token not in tokenizer.eos_token_ids]

    return {question: answer(question) for question in QUESTIONS}


@pytest.fixture(scope="module")
def client():
    settings = config.from_args(["--demo", "--port", "0"], {})
    with (
        serve.configured(settings, *serve.open_models(settings)) as server,
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        server.wait_until_ready()
        yield client


def ask(client, question, **fields):
    messages = [{"role": "user", "content": question}]
    fields = {"model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": N_TOKENS, **fields}
    return client.chat.completions.create(messages=messages, **fields)


def token_texts(client, question):
    content = ask(client, question, logprobs=True).choices[0].logprobs.content
    return [entry.token for entry in content]


def test_alone_it_is_token_for_token_what_mlx_lm_generates(client, offline):
    for question in QUESTIONS[:3]:
        assert token_texts(client, question) == offline[question]


def test_in_a_mixed_batch_of_eight_too(client, offline):
    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(QUESTIONS, pool.map(lambda q: token_texts(client, q), QUESTIONS), strict=True))
    assert answers == offline


def test_the_openai_client_gets_paris_whole_and_streamed(client):
    assert ask(client, FRANCE).choices[0].message.content == "The capital of France is Paris."
    chunks = list(ask(client, FRANCE, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert chunks[-1].usage.prompt_tokens == 42


def test_the_openai_client_gets_openai_s_errors(client):
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, "x", model="no-such-model")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, "word " * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(client, "x", temperature=3)
    assert wrong.value.param == "temperature"


def test_a_completion_keeps_the_space_that_the_text_needs(client):
    completion = client.completions.create(
        model="SmolLM2-135M-Instruct", prompt="The capital of France is", max_tokens=1, temperature=0
    )
    assert completion.choices[0].text == " Paris"


def test_a_seed_gives_one_text_again(client):
    def seeded(seed):
        return ask(client, "Write one sentence about the sea.", temperature=1, seed=seed).choices[0].message.content

    # Alone, so that the passes have the same shapes: beside others the last bits of the probabilities may differ.
    assert seeded(5) == seeded(5)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(seeded, [5, 6, 7, 8]))) > 1


def test_the_bytes_of_the_tokens_join_to_the_text(client):
    answer = ask(client, "Repeat exactly: naïve 🐉🔥 你好", logprobs=True, max_tokens=32)
    entries = answer.choices[0].logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert joined.decode(errors="ignore").startswith(answer.choices[0].message.content)
