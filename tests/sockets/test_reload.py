"""SIGHUP: keys and models change under a running server, and nothing is interrupted. On the fake backend."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_serve import testing
from mlx_serve.engine.catalog import Catalog
from mlx_serve.reload import Reload
from mlx_serve.settings import config, http
from mlx_serve.testing import ENTRY
from mlx_serve.values import ApiError
from tests.sockets.apikit import Running

CHAT = "/v1/chat/completions"


def asked(model="fake", **more):
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}


@contextmanager
def reloading(keys, catalog=None, make_catalog=None):
    """A server with a key file, and what reloads it; the keys that are in the file at the start are read."""

    def read():
        return config.from_args(["--api-key-file", str(keys), "--port", "0"], {})

    catalog = catalog or Catalog(ENTRY)
    with testing.serving(catalog=catalog, options=http.options(read())) as running:
        reload = Reload(read(), catalog, read, make_catalog)
        reload.server = running
        yield Running(running), reload


def status(server, key, **more):
    return server.request("POST", CHAT, asked(**more), headers={"Authorization": f"Bearer {key}"})[0]


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one\n")
    return path


def test_keys_change_between_two_requests(keys):
    with reloading(keys) as (server, reload):
        assert (status(server, "one"), status(server, "two")) == (200, 401)
        keys.write_text("two\n")
        reload.run()
        assert (status(server, "one"), status(server, "two")) == (401, 200)


def test_what_is_wrong_changes_nothing(keys, caplog):
    with reloading(keys) as (server, reload):
        keys.write_text("")
        reload.run()
        assert status(server, "one") == 200
    assert "nothing is changed" in caplog.text


def test_models_come_and_go(keys):
    catalog = Catalog(ENTRY)
    other = replace(ENTRY, name="other", path=Path("other"))
    with reloading(keys, catalog, lambda _: Catalog(other)) as (server, reload):
        assert (status(server, "one"), status(server, "one", model="other")) == (200, 404)
        reload.run()
        assert (status(server, "one"), status(server, "one", model="other")) == (404, 200)


def test_a_name_keeps_its_directory():
    catalog = Catalog(ENTRY)
    moved = replace(ENTRY, path=Path("elsewhere"))
    assert catalog.become(Catalog(moved)) == [ENTRY.name]
    assert catalog.find(ENTRY.name).path == ENTRY.path
    assert catalog.default is catalog.find(None)


def test_a_model_that_is_no_longer_offered_is_known_to_what_runs():
    catalog = Catalog(ENTRY)
    catalog.become(Catalog())
    with pytest.raises(ApiError):
        catalog.find(ENTRY.name)
    assert catalog.entry(ENTRY.name) == ENTRY
    # It comes back with its directory.
    assert catalog.become(Catalog(replace(ENTRY, path=Path("elsewhere")))) == [ENTRY.name]


def test_a_server_that_starts_has_read_its_settings(caplog):
    def read():
        raise AssertionError("read again")

    Reload(config.Config(), Catalog(), read, None).run()
    assert "still starting" in caplog.text
