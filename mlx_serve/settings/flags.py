"""What a flag is, and how its value is read from a command line or from a TOML file. Knows no single flag.

The same limits hold in both, and an error is a ValueError that says what is allowed.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from mlx_serve.values import RESERVED_TEMPLATE_OPTIONS

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZES = {unit.upper(): n for unit, n in (_UNITS | _BINARY_UNITS).items()}
# How much of a wrong value an error shows.
_MAX_SHOWN_CHARS = 60


def size(text: str) -> int:
    """Bytes, as 1048576, 512M, 2GB (powers of ten, as in mlx_lm) or 32MiB (powers of two)."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]?I?)B?", text.strip().upper(), re.ASCII)
    if match is None or match[2] not in _SIZES:
        raise ValueError(f"not a size: {_shown(text)} (write 1048576, 512M, 2GB or 32MiB)")
    return int(float(match[1]) * _SIZES[match[2]])


def size_text(n_bytes: int) -> str:
    """A size in the form that ``size`` reads, in the largest unit that leaves a whole number."""
    fitting = {name: n for name, n in (_UNITS | _BINARY_UNITS).items() if n <= n_bytes and n_bytes % n == 0}
    name = max(fitting, key=lambda name: fitting[name], default="")
    return f"{n_bytes // fitting[name]}{name}B" if name else str(n_bytes)


def wired_limit(text: str) -> Any:
    """``weights``, ``recommended``, ``none``, or a size in bytes."""
    return text if text in ("weights", "recommended", "none") else size(text)


def comma_list(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list, without spaces around them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def path_list(text: str) -> tuple[str, ...]:
    """Directories joined as in PATH."""
    return tuple(part for part in text.split(os.pathsep) if part)


def file_path(text: str) -> str:
    """A path with ``~`` replaced, since no shell has done so in a file, or in ``--flag=~/x``."""
    return os.path.expanduser(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def template_arguments(given: str | dict[str, Any]) -> dict[str, Any]:
    """Arguments for the chat template: a JSON object, or a table of a file."""
    value = json_object(given) if isinstance(given, str) else given
    taken = sorted(RESERVED_TEMPLATE_OPTIONS & value.keys())
    if taken:
        raise ValueError(f"'{taken[0]}' is not for the chat template")
    return value


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE; the value may contain "="."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{_shown(text)} is not of the form NAME=VALUE")
    return name, value


def penalty(text: str) -> float:
    """A repetition penalty. It divides and multiplies logits, so values near 0 would make infinities."""
    value = float(text)
    if value != 0 and not 0.01 <= value <= 100:
        raise ValueError(f"{value} is not 0 (off) or between 0.01 and 100")
    return value


# For each way to read text: the TOML types that it accepts, and their description.
_TOML_TYPES: dict[Callable[[str], Any], tuple[tuple[type, ...], str]] = {
    str: ((str,), "a string"),
    str.upper: ((str,), "a string"),
    file_path: ((str,), "a string"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    penalty: ((int, float), "a number"),
    wired_limit: ((int, str), "weights, recommended, none or a size"),
    size: ((int, str), "a size (an integer, or a string as '2GB' or '32MiB')"),
    comma_list: ((str, list), "a string or a list of strings"),
    path_list: ((str, list), "a string or a list of strings"),
    template_arguments: ((dict,), "a table"),
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting: its help, default, and allowed values. ``many``: it may be given several times."""

    group: str
    help: str
    default: Any
    parse: Callable[[Any], Any]
    low: float | None
    high: float | None
    choices: tuple[Any, ...]
    many: bool
    env: str | None

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off and takes no value."""
        return isinstance(self.default, bool)

    @property
    def default_text(self) -> str:
        """The default in a readable form; "" for none, and for a switch that is off."""
        if self.default is True:
            return "on"
        if self.default is None or self.default is False or self.default in ((), {}, ""):
            return ""
        if self.parse is size:
            return size_text(self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def allowed(self) -> str:
        """A description of the allowed values."""
        if self.is_switch:
            return "true or false"
        if self.many:
            return "a string or a list of strings"
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        return _TOML_TYPES[self.parse][1] + self._range

    def from_text(self, text: str) -> Any:
        """The value of one argument. Raises ValueError."""
        try:
            value = self.parse(text)
        except ValueError:
            if self.parse not in (int, float):
                raise
            # Python's own message is not for users.
            raise ValueError(f"{_shown(text)} is not {self.allowed}") from None
        if not self._holds(value):
            raise ValueError(f"{value} is not {self.allowed}")
        return value

    def from_toml(self, value: Any) -> Any:
        """The value of a TOML key. Raises ValueError."""
        if self.is_switch:
            return self._typed(value, (bool,))
        if self.many:
            items = [value] if isinstance(value, str) else self._strings(value)
            return tuple(self.from_text(item) for item in items)
        if isinstance(value, bool):
            self._refuse(value)
        value = self._typed(value, _TOML_TYPES[self.parse][0])
        if isinstance(value, list):
            return tuple(self._strings(value))
        return self.parse(value) if isinstance(value, dict) else self.from_text(str(value))

    @property
    def _range(self) -> str:
        if self.low is None:
            return ""
        return f" of at least {self.low}" if self.high is None else f" between {self.low} and {self.high}"

    def _holds(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if not isinstance(value, int | float):
            return True
        # NaN is less than or equal to nothing, and no limit allows infinity.
        return (
            math.isfinite(value)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
        )

    def _typed(self, value: Any, types: tuple[type, ...]) -> Any:
        return value if isinstance(value, types) else self._refuse(value)

    def _strings(self, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._refuse(value)
        return list(value)

    def _refuse(self, value: Any) -> Any:
        raise ValueError(f"must be {self.allowed}, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def flag(
    group: str,
    default: Any,
    help: str,
    *,
    parse: Callable[[Any], Any] = str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] = (),
    many: bool = False,
    env: str | None = None,
) -> Any:
    """A dataclass field that is also a flag; ``env`` names an environment variable with the same meaning."""
    about = Flag(group, help, default, parse, low, high, choices, many, env)
    if default == {}:
        return field(default_factory=dict, metadata={"flag": about})
    return field(default=default, metadata={"flag": about})


def flags_of(settings: type) -> dict[str, Flag]:
    """The flags among a dataclass's fields, by field name."""
    return {f.name: f.metadata["flag"] for f in fields(settings) if "flag" in f.metadata}


def option_of(name: str) -> str:
    """The command line's spelling of a field's name."""
    return "--" + name.replace("_", "-")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint with the most similar known word; "" if none is similar."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1) or [other for other in words if word and other.startswith(word)]
    return f" (did you mean {near[0]}?)" if near else ""
