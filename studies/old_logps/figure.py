"""The figure of the old log-prob study."""

from pathlib import Path

from studies import drawing, seeds

WAYS = {"recompute": "recomputed", "sampler": "the sampler's"}
# What the method clips, and so what a gap has to be small against.
UNITS = {"gspo": "sequence", "grpo": "token"}
COLOURS = {"recompute": "#666666", "sampler": "#CC79A7"}


def draw(record: dict, path: Path) -> None:
  """By method: reward by iteration, and the gap beside the clip range."""
  methods = [row["method"] for row in record["table"]]
  figure, grid = drawing.axes(2, len(methods), size=(4.6, 3.0))
  for column, row in zip(grid.T, record["table"], strict=True):
    runs = [r for r in record["runs"] if r["method"] == row["method"]]
    column[1].set_yscale("log")
    clip = row["clip range"]
    drawing.claimed(column[1], clip, f"lower clip range: {clip:g}")
    _curves(column[0], runs, "reward")
    unit = UNITS[row["method"]]
    _curves(column[1], runs, f"gap of a {unit}")
    column[1].set_ylabel(f"sampler less trainer,\nlog-prob of a {unit}")
    column[0].set_title(f"{drawing.NAMES[row['method']]}, {_said(row)}")
  grid[0, 0].set_ylabel("training reward")
  drawing.save(figure, path)


def _said(row) -> str:
  shares = " and ".join(
    f"{drawing.number(row[old]['clipped tokens']['mean']):.2%}" for old in WAYS
  )
  low, high = (drawing.number(row["harm"][key]) for key in ("low", "high"))
  return f"{shares} clipped\nharm, pass@1: {low:+.3f} to {high:+.3f}"


def _curves(ax, runs, name):
  ends = {}
  for old, label in WAYS.items():
    curves = [run["curves"] for run in runs if run["old"] == old]
    steps, means = zip(*seeds.curve(curves, name), strict=True)
    drawing.band(ax, steps, means, colour=COLOURS[old])
    ends[label] = steps[-1], means[-1]["mean"]
  if name == "reward":
    drawing.share(ax)
  drawing.names(ax, ends, {WAYS[old]: c for old, c in COLOURS.items()})
  ax.set_xlabel("RL iteration")
