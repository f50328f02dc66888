"""Prints docs/commands.md: every command with every flag, from the argument parsers. `make docs` writes the page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module

from mlx_serve.commands import COMMANDS
from mlx_serve.settings import config

HEAD = """# Commands

Written from the commands' own parsers (`make docs`). A flag is given once here; what it is for is told in
[operating](operating.md), [models](models.md), [bench](bench.md) and the other pages.
"""


def page() -> str:
    """The whole page."""
    parsers = [config.parser(), *(import_module(module).parser() for module in COMMANDS.values())]
    return "\n".join([HEAD, *(line for parser in parsers for line in section(parser))])


def section(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A command: what it does, and a table for each group of its flags."""
    yield f"## {parser.prog}\n"
    yield f"{text(parser.description)}\n"
    if parser.epilog:
        yield f"{text(parser.epilog)}\n"
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if actions:
            title = {"positional arguments": "arguments", "options": "flags"}.get(group.title or "", group.title)
            yield f"| {title} | |\n| --- | --- |"
            yield from (row(action, about(parser, action)) for action in actions)
            yield ""


def about(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Its help, with the default in place of %(default)s."""
    return parser._get_formatter()._expand_help(action) if action.help else ""


def row(action: argparse.Action, what: str) -> str:
    names = action.option_strings or [str(action.metavar or action.dest).upper()]
    value = "" if action.nargs == 0 or not action.option_strings else f" {placeholder(action)}"
    return f"| `{', '.join(names)}{value}` | {text(what)} |"


def placeholder(action: argparse.Action) -> str:
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def text(help_text: str | None) -> str:
    return " ".join((help_text or "").split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
