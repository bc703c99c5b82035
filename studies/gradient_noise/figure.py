"""The figure of the gradient noise study."""

from pathlib import Path

import numpy as np

from studies import drawing

LINES = {
  "grpo": "-",
  "gspo": "-",
  "grpo unclipped": ":",
  "gspo unclipped": ":",
}
ROWS = {
  "added": "|g − g1| / |g1|, rms",
  "noise": "noise of g / noise of g1\n/ share of tokens not clipped",
}
TITLES = {"whole": "whole responses", "windows": "windows of one text"}


def draw(record: dict, path: Path) -> None:
  """Rows: what is added, and the noise; columns: whole responses and windows.

  A dot is a seed with its bootstrap interval, a line the mean over seeds.
  """
  figure, grid = drawing.axes(
    len(ROWS), len(TITLES), size=(4.6, 3.4), sharex=True, sharey="row"
  )
  for axes, (quantity, label) in zip(grid, ROWS.items(), strict=True):
    axes[0].set_ylabel(label)
    for ax, answers in zip(axes, TITLES, strict=True):
      every = [
        [r for r in run["rows"] if r["answers"] == answers]
        for run in record["runs"]
      ]
      for method, dashes in LINES.items():
        _line(ax, every, quantity, method, dashes)
      if quantity == "noise":
        ax.axhline(1, color=drawing.GREY, linewidth=0.8)
      ax.set(xscale="log", yscale="log")
      lengths = [r["length"] for r in every[0]]
      ax.set_xticks(lengths, [f"{n}" for n in lengths])
      ax.minorticks_off()
  for column, title in zip(grid.T, TITLES.values(), strict=True):
    column[0].set_title(title)
    column[-1].set_xlabel("length, tokens")
  # Beside the lines the names would cover each other.
  handles, names = grid[0, 0].get_legend_handles_labels()
  figure.legend(handles, names, loc="outside lower center", ncols=len(names))
  drawing.save(figure, path)


def _line(ax, every, quantity, method, dashes) -> None:
  """A method's seeds side by side, and their mean."""
  base = method.split()[0]
  colour = drawing.COLOURS[base]
  lengths = [r["length"] for r in every[0]]
  means = []
  for seed, own in enumerate(every):
    x = np.array(lengths) * 1.06 ** (seed - len(every) // 2)  # on a log axis
    nothing = {"mean": None, "low": None, "high": None}  # all were clipped
    found = [r[quantity].get(method, nothing) for r in own]
    style = {"linestyle": "", "markersize": 3, "capsize": 0, "linewidth": 0.8}
    drawing.whiskers(ax, x, found, colour=colour, **style)
    means.append([drawing.number(f["mean"]) for f in found])
  name = drawing.NAMES[base] + (", no clip" if base != method else "")
  mean = np.mean(means, axis=0)
  ax.plot(lengths, mean, color=colour, linestyle=dashes, label=name)
