"""The small faults that a module's syntax tree can have, one place at a time. Text in, texts out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_CALCULATED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}
_JOINED = {ast.And: ast.Or, ast.Or: ast.And}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# What tells people, and changes nothing.
_TELLING = ("log.", "logging.")


@dataclass(frozen=True, slots=True)
class Mutant:
    """``source`` is a module with one change, in a line that was ``was``."""

    line: int
    was: str
    change: str
    source: str


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a change can be made: ``owner``'s field ``name`` becomes ``new``. ``node`` has the line, and is shown."""

    node: Any
    owner: Any
    name: str
    new: Any
    is_drop: bool = False


def mutants(source: str) -> Iterator[Mutant]:
    """All mutants of a module, in the order of its lines."""
    tree = ast.parse(source)
    lines = source.splitlines()
    # How a class is made is not what it does.
    decorators = {
        part for node in ast.walk(tree) for one in getattr(node, "decorator_list", ()) for part in ast.walk(one)
    }
    places = [place for node in ast.walk(tree) if node not in decorators for place in _places(node)]
    for place in sorted(places, key=lambda place: (place.node.lineno, place.node.col_offset)):
        old, before = getattr(place.owner, place.name), _short(place.node)
        setattr(place.owner, place.name, place.new)
        change = f"left out: {before}" if place.is_drop else f"{before} -> {_short(place.node)}"
        yield Mutant(place.node.lineno, lines[place.node.lineno - 1].strip(), change, ast.unparse(tree))
        setattr(place.owner, place.name, old)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else f"{text[:87]}..."


def _places(node: ast.AST) -> Iterator[_Place]:
    for name, new in _changes(node):
        yield _Place(node, node, name, new)
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
            yield _Place(node, node, name, value.operand)
        elif isinstance(value, list):
            yield from _in_list(node, name, value)


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """A field of a node, and what becomes of it."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            yield "ops", [*node.ops[:i], _COMPARED[type(operator)](), *node.ops[i + 1 :]]
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _CALCULATED:
        yield "op", _CALCULATED[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        yield "op", _JOINED[type(node.op)]()
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield "value", (not node.value) if type(node.value) is bool else node.value + 1
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAMES:
        yield "func", ast.Name(_NAMES[node.func.id])
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[1], ast.Starred):
        yield "args", [node.args[1], node.args[0], *node.args[2:]]


def _in_list(node: ast.AST, name: str, parts: list[Any]) -> Iterator[_Place]:
    """``not`` before one of the parts, or, of a body, a statement less."""
    for i, part in enumerate(parts):
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
            # A comprehension, whose condition this may be, has no line of its own.
            yield _Place(part, node, name, [*parts[:i], part.operand, *parts[i + 1 :]], is_drop=True)
        elif isinstance(part, ast.stmt) and not isinstance(node, (ast.Module, ast.ClassDef)) and _may_go(node, part):
            yield _Place(part, node, name, [*parts[:i], ast.Pass(), *parts[i + 1 :]], is_drop=True)


def _may_go(parent: ast.AST, statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and not ast.unparse(statement).startswith(_TELLING)
    if isinstance(statement, (ast.Return, ast.Raise)):
        # At the end of a function it would be missed by whoever calls that.
        return isinstance(parent, ast.If)
    return isinstance(statement, (ast.Assign, ast.AugAssign, ast.Delete, ast.If, ast.Continue, ast.Break))
