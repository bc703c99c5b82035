"""The figure of the gradient noise study."""

from pathlib import Path

import numpy as np

from studies import drawing

# What a panel is of: quantity, title, and its lines as (method, dashes).
_ROWS = (
  (
    "added",
    "|g − g1| / |g1|, rms",
    (
      ("grpo unclipped", ":"),
      ("gspo unclipped", ":"),
      ("grpo", "-"),
      ("gspo", "-"),
      ("gmpo", "-"),
    ),
  ),
  (
    "noise",
    "noise of g / noise of g1",
    (("grpo", "-"), ("gspo", "-"), ("gmpo", "-")),
  ),
)

_ANSWERS = {"whole": "whole answers", "windows": "windows of one text"}


def draw(record: dict, path: Path) -> None:
  """Rows: what is added, and the noise; columns: answers, and updates off.

  A dot is a seed with its bootstrap interval, a line the mean over seeds.
  """
  places = [(e["answers"], e["moved"]) for e in record["exponents"]]
  figure, grid = drawing.axes(
    len(_ROWS), len(places), size=(4.6, 3.4), sharex=True, sharey="row"
  )
  for axes, (quantity, label, lines) in zip(grid, _ROWS, strict=True):
    axes[0].set_ylabel(label)
    for ax, place in zip(axes, places, strict=True):
      seeds = [_rows(run, place) for run in record["runs"]]
      for method, dashes in lines:
        _line(ax, seeds, quantity, method, dashes)
      if quantity == "noise":
        ax.axhline(1, color=drawing.GREY, linewidth=0.8)
      ax.set(xscale="log", yscale="log" if quantity == "added" else "linear")
      lengths = record["plan"]["lengths"]
      ax.set_xticks(lengths, [f"{n}" for n in lengths])
      ax.minorticks_off()
  for ax, (answers, moved) in zip(grid[0], places, strict=True):
    ax.set_title(f"{_ANSWERS[answers]}, {4 * moved} updates off")
  for ax in grid[-1]:
    ax.set_xlabel("response length, tokens")
  # Beside the lines the names would cover each other.
  handles, names = grid[0, 0].get_legend_handles_labels()
  figure.legend(handles, names, loc="outside lower center", ncols=len(names))
  drawing.save(figure, path)


def _rows(run, place):
  return [r for r in run["rows"] if (r["answers"], r["moved"]) == place]


def _line(ax, seeds, quantity, method, dashes) -> None:
  """A method's seeds side by side, and their mean."""
  base = method.split()[0]
  colour = drawing.COLOURS[base]
  means = []
  for seed, own in enumerate(seeds):
    # Beside each other on a log axis.
    x = np.array([r["length"] for r in own]) * 1.06 ** (seed - len(seeds) // 2)
    found = [r[quantity][method] for r in own]
    style = {"linestyle": "", "markersize": 3, "capsize": 0, "linewidth": 0.8}
    drawing.whiskers(ax, x, found, colour=colour, **style)
    means.append([f["mean"] for f in found])
  lengths = [r["length"] for r in seeds[0]]
  mean = np.mean(means, axis=0)
  name = drawing.NAMES[base] + (", no clip" if base != method else "")
  ax.plot(lengths, mean, color=colour, linestyle=dashes, label=name)
