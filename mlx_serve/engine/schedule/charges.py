"""How many tokens of KV cache a job is charged: what it uses and will soon use, not all that its limit allows.

``usual``: the length that the model's outputs have come to of late. Only numbers.
"""

from __future__ import annotations

from mlx_serve.values import Job

# What a sequence may grow by before memory is checked again: mlx-lm's caches grow in steps of so many tokens.
_GROWTH = 256


def tokens_now(job: Job) -> int:
    """What a running job may use soon: its prompt, its output so far, and a step's growth."""
    return _tokens(job, job.n_output + _GROWTH)


def tokens_expected(job: Job, usual: int) -> int:
    """What a job will use if its output comes to what is usual, or to a little more than it has."""
    return _tokens(job, max(usual, job.n_output + _GROWTH))


def tokens_to_return(job: Job, usual: int) -> int:
    """What a paused job needs to come back: as much again as is usual, so that it is unlikely to be paused again."""
    return _tokens(job, job.n_output + max(usual, _GROWTH))


def _tokens(job: Job, n_output: int) -> int:
    return len(job.prompt.tokens) + min(job.sampling.max_tokens, n_output)
