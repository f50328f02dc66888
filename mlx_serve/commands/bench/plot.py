"""Draws a run as PNG: rates and times over the load. Imports matplotlib only when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mlx_serve.commands.bench.report import Measured

Value = Callable[[Measured], float | None]


def draw(rounds: Sequence[Measured], path: Path, title: str) -> None:
    """Writes the picture. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # pyplot is avoided because it looks for a display.
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rate, ttft, itl = figure.subplots(1, 3)
    _line(rate, rounds, lambda m: m.summary.output_tokens_per_s, "served", "C0")
    if any(m.offline for m in rounds):
        _line(rate, rounds, lambda m: m.offline.rate if m.offline else None, "mlx-lm without a server", "C1")
    for mark, color in (("p50", "C0"), ("p99", "C1")):
        _line(ttft, rounds, _mark("ttft_ms", mark), mark, color)
        _line(itl, rounds, _mark("itl_ms", mark), mark, color)
    for axes, name in ((rate, "output tokens/s"), (ttft, "time to first token, ms"), (itl, "gap between tokens, ms")):
        axes.set_title(name, fontsize="medium")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        axes.tick_params(axis="x", labelrotation=30)
        axes.grid(axis="y", alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)


def _mark(spread: str, mark: str) -> Value:
    return lambda measured: getattr(getattr(measured.summary, spread), mark, None)


def _line(axes: Any, rounds: Sequence[Measured], value: Value, name: str, color: str) -> None:
    """Draws one line for closed loops and one for open loops, because their loads have different units."""
    for _, group in groupby(rounds, key=lambda measured: measured.open_loop):
        some = list(group)
        values = [value(measured) for measured in some]
        numbers = [float("nan") if v is None else v for v in values]
        axes.plot([measured.label for measured in some], numbers, marker="o", label=name, color=color)
        name = "_"  # matplotlib leaves this name out of the legend
