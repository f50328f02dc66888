"""``mlx-serve completion``: completion of commands, flags and their values for bash, zsh and fish.

The scripts are written from the argument parsers themselves, so they know every flag.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from mlx_serve.commands import COMMANDS, WITH_SERVER_FLAGS, WORDS
from mlx_serve.settings import config

# Both names of the command.
_PROGRAMS = ("mlx-serve", "mlx-serve-http")


@dataclass(frozen=True, slots=True)
class Option:
    """A flag: its spellings, what it does, whether a value follows, and the values that it may have ((): any)."""

    names: tuple[str, ...]
    about: str
    takes_value: bool
    values: tuple[str, ...]


def main(argv: Sequence[str]) -> int:
    """Prints the script and returns 0."""
    shell: str = parser().parse_args(argv).shell
    print(_SHELLS[shell]({word: list(_options(word)) for word in WORDS}))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    top = argparse.ArgumentParser(
        prog="mlx-serve completion",
        description="Print a script that makes a shell complete mlx-serve's commands and flags.",
        epilog='bash: eval "$(mlx-serve completion bash)" in ~/.bashrc. zsh: the same with zsh in ~/.zshrc, after '
        "compinit. fish: mlx-serve completion fish > ~/.config/fish/completions/mlx-serve.fish",
    )
    top.add_argument("shell", choices=list(_SHELLS))
    return top


def _options(word: str) -> Iterator[Option]:
    """The flags that may follow a word of the command line."""
    parsers = [import_module(COMMANDS[word]).parser()] if word in COMMANDS else []
    parsers += [config.parser()] if word in WITH_SERVER_FLAGS else []
    seen: set[str] = set()
    for action in (action for each in parsers for action in each._actions):
        names = tuple(name for name in action.option_strings if name not in seen)
        seen.update(names)
        if names:
            # argparse fills in "%(default)s" and turns "%%" into "%".
            about = " ".join((action.help or "").replace("%%", "%").split())
            values = tuple(map(str, action.choices or ()))
            yield Option(names, about, action.nargs != 0, values)


def _bash(options: dict[str, list[Option]]) -> str:
    flags = "\n".join(f"    {word}) flags='{' '.join(_names(options[word]))}' ;;" for word in WORDS)
    return f"""_mlx_serve() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} flags
  if [ "$COMP_CWORD" = 1 ] && [[ $word != -* ]]; then
    COMPREPLY=($(compgen -W '{" ".join(WORDS)}' -- "$word"))
    return
  fi
  case "$before" in
{_values_of(options)}
  esac
  case "$command" in
{flags}
    *) flags='{" ".join(_names(options["serve"]))}' ;;
  esac
  if [[ $word == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$word")); else COMPREPLY=(); fi
}}
complete -o default -F _mlx_serve {" ".join(_PROGRAMS)}"""


def _values_of(options: dict[str, list[Option]]) -> str:
    """The cases of bash for flags with a list of values."""
    lines = {
        f"    {'|'.join(option.names)}) COMPREPLY=($(compgen -W '{' '.join(option.values)}' -- \"$word\")); return ;;"
        for each in options.values()
        for option in each
        if option.values
    }
    return "\n".join(sorted(lines))


def _zsh(options: dict[str, list[Option]]) -> str:
    specs = {word: " ".join(_spec(name, option) for option in options[word] for name in option.names) for word in WORDS}
    cases = "\n".join(f"    {word}) _arguments -S {specs[word]} '*:file:_files' ;;" for word in WORDS)
    return f"""_mlx_serve() {{
  local command=$words[2]
  if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then
    compadd {" ".join(WORDS)}
    _files
    return
  fi
  if [[ $command == -* || $command == */* ]]; then command=serve; else (( CURRENT-- )); shift words; fi
  case $command in
{cases}
  esac
}}
compdef _mlx_serve {" ".join(_PROGRAMS)}"""


def _spec(name: str, option: Option) -> str:
    """A flag as zsh's _arguments takes it: '*--flag[what it does]:value:(one two)'."""
    about = re.sub(r"[\[\]:'\\\\]", " ", option.about)
    value = f":value:({' '.join(option.values)})" if option.values else ":value:_files"
    return f"'*{name}[{about}]{value if option.takes_value else ''}'"


def _fish(options: dict[str, list[Option]]) -> str:
    lines = []
    for program in _PROGRAMS:
        lines.append(f"complete -c {program} -n __fish_use_subcommand -a '{' '.join(WORDS)}'")
        for word in WORDS:
            when = f"__fish_seen_subcommand_from {word}"
            # The server's flags may come without "serve".
            when = f"not __fish_seen_subcommand_from {' '.join(COMMANDS)}" if word == "serve" else when
            lines += [_fish_line(program, when, option) for option in options[word]]
    return "\n".join(lines)


def _fish_line(program: str, when: str, option: Option) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
    about = option.about.replace("\\", " ").replace("'", " ")
    value = " -r" if option.takes_value else ""
    value += f" -f -a '{' '.join(option.values)}'" if option.values else ""
    return f"complete -c {program} -n '{when}' {names} -d '{about}'{value}"


def _names(options: Sequence[Option]) -> list[str]:
    return [name for option in options for name in option.names]


_SHELLS: dict[str, Callable[[dict[str, list[Option]]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
