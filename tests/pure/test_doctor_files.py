"""What the doctor and the server say of files and folders that the server's user may not read, enter or write to."""

from pathlib import Path

import pytest

from mlx_serve.commands.doctor import files
from mlx_serve.engine import model_files
from mlx_serve.engine.model_files import look_into
from mlx_serve.settings import config, http
from mlx_serve.settings import models as model_options
from mlx_serve.values import StartError
from tests.pure.strangerkit import stranger


@pytest.fixture
def closed(tmp_path):
    folder = tmp_path / "closed"
    (folder / "model").mkdir(parents=True)
    return folder


def test_a_folder_that_is_writable_or_can_be_made_is_fine(tmp_path):
    assert list(files.unwritable(tmp_path, "topic", "")) == []
    assert list(files.unwritable(tmp_path / "a" / "b", "topic", "")) == []
    assert not (tmp_path / "a").exists()


def test_a_folder_in_a_closed_one(closed):
    wanted = closed / "prompts"
    settings = config.from_args(["--prompt-cache-dir", str(wanted)], {})
    with stranger(closed):
        (fault,) = files.unwritable(wanted, "topic", "choose another")
        (problem,) = files.prompt_cache(settings)
        (note,) = files.log_file({"MLX_SERVE_LOG_FILE": str(wanted / "log")})
    assert "may not enter /" in fault.text
    assert fault.advice == "choose another"
    assert (problem.level, problem.text) == ("problem", fault.text)
    assert (note.level, note.text) == ("note", f"{fault.text}: the log goes to stderr")


def test_a_folder_that_root_has_to_make(closed):
    wanted = Path("/no-such-folder/prompts")
    with stranger(closed):
        (fault,) = files.unwritable(wanted, "topic", "choose another")
    assert "cannot write to /, where /no-such-folder/prompts should be" in fault.text
    assert f"-m 700 {wanted}; or choose another. If the server runs as another USER: sudo -H -u USER" in fault.advice


def test_a_folder_of_somebody_else_is_not_given_away(closed):
    with stranger(closed):
        (fault,) = files.unwritable(Path("/"), "topic", "choose another")
    assert "sudo" not in fault.advice


def test_a_file_in_a_folder_s_place(tmp_path):
    (tmp_path / "file").touch()
    (fault,) = files.unwritable(tmp_path / "file" / "prompts", "topic", "choose another")
    assert f"{tmp_path / 'file'} is a file" in fault.text


def test_a_model_whose_files_are_closed(tmp_path, monkeypatch):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert len(look_into(tmp_path).faults) > 1
    monkeypatch.setattr(model_files.os, "access", lambda path, _: path.name != "model.safetensors")
    (fault,) = look_into(tmp_path).faults
    assert (fault.text, fault.fatal) == ("this user may not read model.safetensors", True)
    assert str(tmp_path) in fault.advice


@pytest.mark.parametrize(
    ("flags", "find"),
    [
        (["--model-dir", "{}/model"], model_options.directories),
        (["--model", "x", "--adapter-path", "{}/model"], lambda settings: model_options.catalog(settings, Path)),
        (["--tls-cert", "{}/model/cert"], http.options),
    ],
)
def test_the_server_names_the_folder_that_it_may_not_enter(closed, tmp_path, flags, find):
    settings = config.from_args([flag.format(closed) for flag in flags], {})
    with stranger(closed), pytest.raises(StartError, match=r"\(this user may not enter /"):
        find(settings)
