"""``mlx-serve ps`` and ``stop``, and the route behind the latter, on the fake backend."""

import json

from mlx_serve import cli
from mlx_serve.testing import FakeBackend
from tests.sockets.apikit import serving
from tests.waiting import until

UNLOAD = "/v1/models/unload"


def run(server, *words):
    return cli.main([*words, "--url", f"http://127.0.0.1:{server.port}"])


def test_a_model_is_listed_unloaded_and_loaded_again(capsys):
    with serving() as server:
        assert server.chat()[0] == 200
        assert run(server, "ps") == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split() == ["NAME", "WEIGHTS", "KV", "RUNNING", "WAITING", "IDLE"]
        assert row.split()[0] == "fake"
        assert run(server, "stop", "fake") == 0
        assert capsys.readouterr().out == "fake is unloaded.\n"
        until(lambda: server.scheduler.health().models == (), "an empty memory")
        assert run(server, "ps") == 0
        assert capsys.readouterr().out == "No model is loaded.\n"
        assert run(server, "stop", "fake") == 1
        assert "not loaded" in capsys.readouterr().err
        assert server.chat()[0] == 200
        assert run(server, "ps", "--json") == 0
        assert json.loads(capsys.readouterr().out)[0]["idle_s"] >= 0


def test_a_model_in_use_stays(capsys):
    def endless(job):
        while True:
            yield ord("x")

    with serving(lambda _: FakeBackend(answer=endless)) as server:
        connection = server.connection()
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        until(lambda: server.scheduler.health().running == 1, "a running request")
        status, _, answer = server.request("POST", UNLOAD, {"model": "fake"})
        assert (status, answer["error"]["code"]) == (409, "model_busy")
        assert run(server, "stop", "fake") == 1
        assert "run or wait" in capsys.readouterr().err
        connection.close()


def test_a_wrong_name_is_told():
    with serving() as server:
        assert server.request("POST", UNLOAD, {"model": "other"})[0] == 404
        assert server.request("POST", UNLOAD, {"model": 5})[0] == 400
        assert server.request("POST", UNLOAD, {})[0] == 400
