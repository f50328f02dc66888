"""What people write for a path or a repository."""

from pathlib import Path

import pytest

from mlx_serve.paths import closed_folder, expanded, is_repository, why_missing
from tests.pure.strangerkit import stranger


def test_the_home_directory_is_filled_in(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert expanded("~/models") == Path("/home/someone/models")
    assert expanded(Path("~/models")) == Path("/home/someone/models")
    assert expanded("/a/~b") == Path("/a/~b")


def test_the_home_of_nobody_is_left_as_it_is():
    assert expanded("~nobody-has-this-name/models") == Path("~nobody-has-this-name/models")


def test_a_folder_that_this_user_may_not_enter(tmp_path):
    inner = tmp_path / "closed" / "folder" / "file"
    inner.parent.mkdir(parents=True)
    assert closed_folder(inner) is None
    assert why_missing(inner) == ""
    with stranger(tmp_path / "closed"):
        closed = closed_folder(inner)
        assert closed is not None
        assert closed in inner.parents
        assert why_missing(inner) == f" (this user may not enter {closed})"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("mlx-community/Qwen3-4B-4bit", True),
        ("a.b/c_d", True),
        ("model", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("./b", False),
        ("../b", False),
        ("~nobody/b", False),
        ("a/", False),
        ("a/b c", False),
    ],
)
def test_a_repository_is_an_owner_and_a_name(name, is_one):
    assert is_repository(name) == is_one
