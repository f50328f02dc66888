"""A request's constraint on its text, as JSON for the process that compiles it (``api/grammar_child.py``).

This module compiles only in that process, so writing a task needs no llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_serve.text.grammar import Function, Rule, compile_forced_call, compile_rule, refused


def task_text(rule: Rule | None, functions: Sequence[Function]) -> str:
    """The JSON for ``compile_task``: a call of one of ``functions``, if there are any, or else ``rule``.

    Equal constraints have equal text. Raises ApiError 400 for a value that JSON cannot hold.
    """
    task: dict[str, Any] = {"functions": [(f.name, f.parameters, f.param, f.strict) for f in functions]}
    if not functions and rule is not None:
        task = {"rule": (rule.kind, rule.value, rule.param, rule.strict)}
    try:
        return json.dumps(task)
    except RecursionError:
        raise refused(task_param(rule, functions), "the JSON schema is nested too deeply.") from None


def task_param(rule: Rule | None, functions: Sequence[Function]) -> str:
    """The request's field that sets the constraint."""
    return "tools" if functions or rule is None else rule.param


def compile_task(task: Mapping[str, Any]) -> str:
    """The grammar of a text from ``task_text``. Raises ApiError 400 that names its field."""
    if "rule" in task:
        return compile_rule(Rule(*task["rule"]))
    return compile_forced_call([Function(*function) for function in task["functions"]])
