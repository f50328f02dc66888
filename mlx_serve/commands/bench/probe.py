"""Finds out, before any load is sent, how the server counts tokens and whether it accepts ignore_eos."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_serve.client.answer import Answer
from mlx_serve.client.connection import Client
from mlx_serve.client.errors import Failure
from mlx_serve.commands.bench.load import LoadTarget
from mlx_serve.commands.bench.workload import Message, Sizes, words

_N_FEW = 4
# More words give a more accurate mean, but may not fit in a short context.
_MORE_WORDS = (10, 100)
_REFUSED = (400, 422)


@dataclass(frozen=True, slots=True)
class Probed:
    """The target for all later requests. ``ignores_eos``: whether they include ignore_eos."""

    target: LoadTarget
    sizes: Sizes
    ignores_eos: bool


def probe(target: LoadTarget, ignore_eos: bool | None, input_tokens: int) -> Probed:
    """Sends two requests for one token each: one of few words, one of more. Raises Failure.

    Both are shorter than a prompt of ``input_tokens``. If ``ignore_eos`` is None, it is used if the server
    accepts it.
    """
    n_many = _N_FEW + min(max(input_tokens // 2, _MORE_WORDS[0]), _MORE_WORDS[1])
    asked = ignore_eos is not False
    eager = _with(target, {"ignore_eos": True}) if asked else target
    try:
        few = _ask(eager, _N_FEW)
    except Failure as failure:
        if ignore_eos is not None or failure.status not in _REFUSED:
            raise
        few, asked, eager = _ask(target, _N_FEW), False, target
    many = _ask(eager, n_many)
    per_word = (many.prompt_tokens - few.prompt_tokens) / (n_many - _N_FEW)
    if per_word <= 0:
        raise Failure("no usage", f"usage.prompt_tokens is {many.prompt_tokens} for {n_many} words and for {_N_FEW}")
    return Probed(eager, Sizes(per_word, max(0.0, few.prompt_tokens - _N_FEW * per_word)), asked)


def _with(target: LoadTarget, fields: Mapping[str, Any]) -> LoadTarget:
    # The user's fields override ignore_eos.
    return replace(target, fields={**fields, **target.fields})


def _ask(target: LoadTarget, n_words: int) -> Answer:
    message: Message = {"role": "user", "content": words(random.Random(f"probe {n_words}"), n_words)}
    with Client(target.server) as client:
        return client.ask(target.path, target.body(target.prompt([message]), 1))
