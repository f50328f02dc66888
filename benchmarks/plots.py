"""A picture of a throughput run: `python -m benchmarks.plots THROUGHPUT.json OUT.png`. Needs matplotlib (extra `plot`).

Bars are medians of the rounds: each number of clients stands for itself, and a line would compare what no round did.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.children import OURS, THEIRS
from benchmarks.throughput import OFFLINE

_WIDTH = 0.27


def draw(run: dict[str, Any], path: Path) -> None:
    """Output tokens per second, and the time to the first text, over the number of clients. Raises OSError."""
    clients = run["clients"]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    rate, ttft = figure.subplots(1, 2)
    for axes, key, names, title in (
        (rate, "rate", (OFFLINE, OURS, THEIRS), "output tokens/s"),
        (ttft, "ttft_s", (OURS, THEIRS), "time to first text, s"),
    ):
        for i, name in enumerate(names):
            heights = [median(row[name][key] for row in clients[n]["rounds"]) for n in clients]
            places = [place + (i - (len(names) - 1) / 2) * _WIDTH for place in range(len(clients))]
            axes.bar(places, heights, _WIDTH, label=name, color=f"C{(OURS, THEIRS, OFFLINE).index(name)}")
        axes.set_xticks(range(len(clients)), list(clients))
        axes.set_xlabel("clients")
        axes.set_title(title, fontsize="medium")
        axes.grid(axis="y", alpha=0.3)
        # Room for the legend above the bars.
        axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
        axes.legend(loc="upper left", ncols=len(names))
    figure.suptitle(f"{run['model']}, {run['max_tokens']} tokens each")
    figure.savefig(path, format="png", dpi=100)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
