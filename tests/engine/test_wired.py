"""The wired limit as the store keeps it. The device is a fake: this machine may have no Metal."""

import importlib

import pytest

from mlx_serve.engine.models.wired import WiredLimit, limit
from tests.engine.test_models import opened, store_of
from tests.engine.tinymodel import write_model

RECOMMENDED = 10**12


class Device:
    """Has a wired limit, which begins as MLX's own default."""

    def __init__(self):
        self.limit = 0

    def set_limit(self, n_bytes):
        former, self.limit = self.limit, n_bytes
        return former


@pytest.fixture
def root(tmp_path):
    write_model(tmp_path / "one")
    write_model(tmp_path / "two")
    return tmp_path


def wired_store(root, device, wanted="weights"):
    return store_of(root, wired=WiredLimit(wanted, RECOMMENDED, device.set_limit))[1]


@pytest.mark.parametrize(
    ("wanted", "n_bytes"),
    [("weights", 300), ("recommended", 1000), ("none", 0), (500, 500), (0, 0), (5000, 1000)],
)
def test_what_the_flag_says(wanted, n_bytes):
    assert limit(wanted, 300, 1000) == n_bytes


def test_weights_that_are_too_large_are_wired_as_far_as_is_recommended():
    assert limit("weights", 5000, 1000) == 1000


def test_the_limit_follows_the_models_in_memory(root):
    device = Device()
    store = wired_store(root, device)
    opened(store, "one")
    assert device.limit == store.weights_bytes("one") == store.memory().wired_limit_bytes > 0
    opened(store, "two")
    assert device.limit == store.weights_bytes("one") + store.weights_bytes("two")
    store.unload("one")
    assert device.limit == store.weights_bytes("two")
    store.unload("two")
    assert device.limit == 0


@pytest.mark.parametrize("wanted", ["weights", "none", 12345])
def test_what_mlx_lm_sets_does_not_last(root, monkeypatch, wanted):
    device = Device()
    # mlx-lm makes batches with this: it sets the limit, and a batch that ends sets it back.
    mlx_lm = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(mlx_lm, "maybe_set_recommended_wired_limit", lambda: device.set_limit(RECOMMENDED))
    store = wired_store(root, device, wanted)
    opened(store, "one")
    expected = limit(wanted, store.weights_bytes("one"), RECOMMENDED)
    assert device.limit == expected
    device.limit = RECOMMENDED
    store.rest()
    assert device.limit == expected


def test_without_metal_there_is_no_limit(root):
    device = Device()
    store = store_of(root, wired=WiredLimit("recommended", None, device.set_limit))[1]
    opened(store, "one")
    assert (device.limit, store.memory().wired_limit_bytes) == (0, 0)
