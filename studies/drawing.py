"""How the figures of the studies look."""

import math
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito 2008: told apart by the colour-blind, too.
COLOURS = {
  "gspo": "#0072B2",
  "grpo": "#D55E00",
  "grpo+r2": "#E69F00",
  "dr_grpo": "#56B4E9",
  "gmpo": "#009E73",
  "rspo": "#CC79A7",
}
NAMES = {
  "gspo": "GSPO",
  "grpo": "GRPO",
  "grpo+r2": "GRPO + R2",
  "dr_grpo": "Dr. GRPO",
  "gmpo": "GMPO",
  "rspo": "RSPO",
}
GREY = "#666666"


def axes(rows: int = 1, columns: int = 1, *, size=(4.2, 3.4), **rest):
  """A figure, and an array [rows, columns] of bare axes of that size."""
  width, height = size
  figure, grid = plt.subplots(
    rows,
    columns,
    figsize=(columns * width, rows * height),
    layout="constrained",
    squeeze=False,
    **rest,
  )
  for one in grid.flat:
    one.spines[["top", "right"]].set_visible(False)
    one.grid(alpha=0.25, linewidth=0.6)
    one.title.set_fontsize(10)
  return figure, grid


def band(ax, x, intervals, *, colour, label: str = "", **style) -> None:
  """Means with their intervals as a band, named at the last point."""
  bound = lambda key: [number(i[key], i["mean"]) for i in intervals]
  means = [number(i["mean"]) for i in intervals]
  ax.plot(x, means, color=colour, **style)
  ax.fill_between(
    x, bound("low"), bound("high"), color=colour, alpha=0.1, linewidth=0
  )
  if label:
    beside(ax, x[-1], means[-1], label, colour)


def whiskers(ax, x, intervals, *, colour, label: str = "", **style) -> None:
  """Means with their intervals as bars, named at the last point."""
  means = [number(i["mean"]) for i in intervals]
  down = [number(i["mean"]) - number(i["low"], i["mean"]) for i in intervals]
  up = [number(i["high"], i["mean"]) - number(i["mean"]) for i in intervals]
  style = {"marker": "o", "markersize": 4, "capsize": 3} | style
  ax.errorbar(x, means, yerr=[down, up], color=colour, **style)
  if label:
    beside(ax, x[-1], means[-1], label, colour)


def beside(ax, x, y, text, colour) -> None:
  """Text to the right of a point."""
  ax.annotate(text, (x, y), **_beside(colour))


def _beside(colour) -> dict:
  return {
    "xytext": (6, 0),
    "textcoords": "offset points",
    "va": "center",
    "color": colour,
    "fontsize": 9,
    "annotation_clip": False,
  }


def names(ax, ends: dict, colours: dict) -> None:
  """Each line's name beside its end (x, y), moved up where they are close.

  The last thing to draw: it freezes the y axis.
  """
  ax.set_ylim(ax.get_ylim())
  to_fraction = ax.transData + ax.transAxes.inverted()
  heights = {k: float(to_fraction.transform(end)[1]) for k, end in ends.items()}
  at = -math.inf
  for name in sorted(heights, key=heights.get):
    at = max(heights[name], at + 0.075)
    ax.annotate(
      name,
      (ends[name][0], at),
      xycoords=("data", "axes fraction"),
      **_beside(colours[name]),
    )


def share(ax) -> None:
  """The y axis within 0 to 1, though an interval may reach beyond."""
  low, high = ax.get_ylim()
  ax.set_ylim(max(low, 0), min(high, 1))


def rates(ax, texts) -> None:
  """An axis of learning rates, with those that were tried."""
  values = sorted({float(text): text for text in texts}.items())
  ax.set(xscale="log", xlabel="learning rate")
  ax.set_xlim(values[0][0] / 1.5, values[-1][0] * 1.5)
  ax.set_xticks(*zip(*values, strict=True))
  ax.set_xticks([], minor=True)


def claimed(ax, y, text) -> None:
  """A dotted line at a number, named below its right end."""
  ax.axhline(y, color=GREY, linestyle=":", linewidth=1)
  ax.annotate(
    text,
    (1, y),
    xycoords=("axes fraction", "data"),
    xytext=(-4, -3),
    textcoords="offset points",
    ha="right",
    va="top",
    color=GREY,
    fontsize=8,
  )


def number(value, otherwise=math.nan) -> float:
  """A number of result.json, where null is none."""
  return number(otherwise) if value is None else value


def save(figure, path: Path) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=110)
  plt.close(figure)
  print(path)
