"""A PNG of a run: rates and times over the load. Needs matplotlib, which is imported only when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_serve.bench.report import Measured


def draw(rounds: Sequence[Measured], path: Path, title: str) -> None:
    """Write the picture. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would look for a display.
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rate, ttft, itl = figure.subplots(1, 3)
    labels = [measured.label for measured in rounds]
    _line(rate, labels, [m.summary.output_tokens_per_s for m in rounds], "served")
    if any(m.offline for m in rounds):
        _line(rate, labels, [m.offline.rate if m.offline else None for m in rounds], "mlx-lm without a server")
    for axes, spreads in ((ttft, [m.summary.ttft_ms for m in rounds]), (itl, [m.summary.itl_ms for m in rounds])):
        for mark in ("p50", "p99"):
            _line(axes, labels, [getattr(s, mark) if s else None for s in spreads], mark)
    for axes, name in ((rate, "output tokens/s"), (ttft, "time to first token, ms"), (itl, "gap between tokens, ms")):
        axes.set_title(name, fontsize="medium")
        axes.set_ylim(bottom=0)
        axes.tick_params(axis="x", labelrotation=30)
        axes.grid(axis="y", alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)


def _line(axes: Any, labels: Sequence[str], values: Sequence[float | None], name: str) -> None:
    axes.plot(labels, [float("nan") if value is None else value for value in values], marker="o", label=name)
