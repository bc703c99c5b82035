"""The figure of the stability study."""

from pathlib import Path

from studies import drawing

TITLES = {
  "routing": "top-1 of 32 experts, 4 layers",
  "off_policy": "16 updates a rollout",
  "long": "responses of 87 tokens",
  "learning": "top-1 of 32 experts, 2 layers",
}


def draw(record: dict, path: Path) -> None:
  """By regime: training reward, and each method's pass@1 less GRPO's."""
  regimes = list(dict.fromkeys(row["regime"] for row in record["table"]))
  figure, grid = drawing.axes(2, len(regimes), size=(4.4, 2.9))
  for column, regime in zip(grid.T, regimes, strict=True):
    here = [row for row in record["table"] if row["regime"] == regime]
    curves = [row for row in record["curves"] if row["regime"] == regime]
    _curves(column[0], curves)
    std = drawing.number(here[0]["token ratio std"]["mean"])
    name = drawing.NAMES[here[0]["method"]]
    column[0].set_title(f"{TITLES[regime]}\ntoken ratio std, {name}: {std:.2g}")
    _differences(column[1], here)
  grid[0, 0].set_ylabel("training reward")
  drawing.save(figure, path)


def _curves(ax, curves):
  ends, colours = {}, {}
  for row in curves:
    name, colour = drawing.NAMES[row["method"]], drawing.COLOURS[row["method"]]
    steps, points = zip(*row["points"], strict=True)
    drawing.band(ax, steps, points, colour=colour)
    ends[name] = steps[-1], drawing.number(points[-1]["mean"])
    colours[name] = colour
  drawing.share(ax)
  drawing.names(ax, ends, colours)
  ax.set_xlabel("RL iteration")


def _differences(ax, rows):
  for y, row in enumerate(reversed(rows)):
    name, colour = drawing.NAMES[row["method"]], drawing.COLOURS[row["method"]]
    found = row["against grpo"]
    text = f"{name}: collapsed {row['collapses']} of {row['final']['n']}"
    if "verdict" in found:  # GRPO against itself has none
      center = drawing.number(found["mean"])
      low, high = (drawing.number(found[k], center) for k in ("low", "high"))
      ax.plot([low, high], [y, y], color=colour, linewidth=2)
      ax.plot(center, y, "o", color=colour)
      text += f", {found['verdict']}"
    ax.text(
      0.01,
      y + 0.18,
      text,
      transform=ax.get_yaxis_transform(),
      color=colour,
      fontsize=8,
    )
  ax.axvline(0, color=drawing.GREY, linewidth=1, linestyle=":")
  ax.set(yticks=[], ylim=(-0.5, len(rows) - 0.2))
  ax.set_xlabel("final pass@1 less GRPO's, 95 % interval")
