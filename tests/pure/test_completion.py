"""The scripts of ``mlx-serve completion``, as the shells read them."""

import shutil
import subprocess

import pytest

from mlx_serve.commands import completion


@pytest.fixture
def script(tmp_path, capsys):
    def write(shell):
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        assert completion.main([shell]) == 0
        path = tmp_path / f"script.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return write


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


CASES = [
    (["mod"], ["models"]),
    (["vers"], ["version"]),
    (["bench", "--range-r"], ["--range-ratio"]),
    (["--log-format", "j"], ["json"]),
    (["serve", "--log-form"], ["--log-format"]),
    (["doctor", "--max-que"], ["--max-queue"]),
    (["completion", "--he"], ["--help"]),
    (["owner/model", "--max-que"], ["--max-queue"]),
    (["chat", "--max-que"], []),
]


@pytest.mark.parametrize(("words", "found"), CASES)
def test_bash(script, words, found):
    ask = f'''source {script("bash")}; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _mlx_serve; echo "${{COMPREPLY[@]}}"'''
    assert output("bash", "-c", ask, "-", "mlx-serve", *words).split() == found


@pytest.mark.parametrize(("words", "found"), CASES)
def test_fish(script, words, found):
    line = " ".join(["mlx-serve-http", *words])
    ask = f'source {script("fish")}; complete -C "{line}"'
    # A line for each, with what it does behind a tab.
    assert [line.split("\t")[0] for line in output("fish", "-N", "-c", ask).splitlines()] == found


def test_zsh_reads_it(script):
    ask = f"autoload -U compinit; compinit -u -D; source {script('zsh')} && echo ${{_comps[mlx-serve]}}"
    assert output("zsh", "-fc", ask) == "_mlx_serve\n"
