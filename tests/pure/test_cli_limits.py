"""The limit on open files, which connections need."""

import resource

import pytest

from mlx_serve import cli

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "wanted", "warns"),
    [
        ((256, NO_LIMIT), (768, NO_LIMIT), False),
        ((256, 4096), (768, 4096), False),
        ((256, 300), (300, 300), True),
        ((1024, 1024), None, False),
        ((NO_LIMIT, NO_LIMIT), None, False),
    ],
)
def test_the_limit_is_raised_and_one_that_is_too_low_is_told(limits, wanted, warns, monkeypatch, caplog):
    made = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: made.append(pair))
    cli._raise_descriptor_limit(512)
    assert made == ([wanted] if wanted else [])
    assert ("300 files may be open" in caplog.text and "--max-connections 512" in caplog.text) == warns
