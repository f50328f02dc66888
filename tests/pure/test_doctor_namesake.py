"""The doctor notices PyPI's other mlx-serve, whose files have the same names."""

import pytest

from mlx_serve.commands.doctor import checks


@pytest.fixture
def installed(tmp_path, monkeypatch):
    def install(files):
        about = tmp_path / "mlx_serve-0.3.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-serve\nVersion: 0.3.0\n")
        (about / "RECORD").write_text("".join(f"{name},,\n" for name in files))
        monkeypatch.syspath_prepend(tmp_path)
        return [finding for finding in checks.versions() if "of PyPI" in finding.text]

    return install


def test_the_other_mlx_serve_is_a_problem(installed):
    (finding,) = installed(["mlx_serve/__init__.py", "mlx_serve-0.3.0.dist-info/METADATA"])
    assert (finding.level, "0.3.0" in finding.text) == ("problem", True)
    assert "mlx-serve-http" in finding.advice


def test_this_project_under_its_former_name_is_none(installed):
    assert not installed(["__editable__.mlx_serve-0.1.0.pth", "mlx_serve-0.1.0.dist-info/METADATA"])
