"""Random request bodies, a few hundred of them. ``python -m tests.sockets.bodyfuzz`` sends any number."""

import pytest

from tests.sockets import bodyfuzz
from tests.sockets.apikit import serving


@pytest.mark.parametrize("seed", [1, 2])
def test_no_body_makes_the_server_fail(seed):
    with serving() as server:
        outcome = bodyfuzz.run("127.0.0.1", server.port, 250, seed)
        assert not outcome.faults, "\n".join(outcome.faults)
        assert server.chat()[0] == 200
    # Neither are all refused nor all taken, or little of the server was reached.
    assert outcome.statuses[200] > 50
    assert outcome.statuses[400] > 50


def test_a_fault_is_found(monkeypatch):
    def fail(self, found, request):
        raise RuntimeError

    monkeypatch.setattr("mlx_serve.api.endpoints.Api._answer", fail)
    with serving() as server:
        assert len(bodyfuzz.run("127.0.0.1", server.port, 3, 1).faults) == 3
