"""The figure of the published model study."""

from pathlib import Path

from studies import drawing


def draw(record: dict, path: Path) -> None:
  """pass@1 of each seed, the final one less GRPO's, and clipped tokens."""
  figure, (axes,) = drawing.axes(1, 3, size=(4.4, 3.2))
  _seeds(axes[0], record["runs"], record["table"])
  _differences(axes[1], record["table"])
  _clipped(axes[2], record["table"])
  drawing.save(figure, path)


def _seeds(ax, runs, table):
  for x, row in enumerate(table):
    _, colour = _style(row)
    for run in runs:
      if run["method"] == row["method"] and "final" in run:
        at = x + 0.12 * (run["seed"] - 2)
        ends = [drawing.number(run[key]) for key in ("start", "final")]
        ax.plot([at, at], ends, color=colour, linewidth=1.5)
        ax.plot(at, ends[1], "o", color=colour, markersize=5)
  ax.set_ylim(0)
  ax.set_xticks(range(len(table)), [_style(row)[0] for row in table])
  ax.set_xlabel("a line for each seed, a dot at its end")
  ax.set_title("held-out pass@1, start to end")


def _differences(ax, table):
  for y, row in enumerate(reversed(table)):
    name, colour = _style(row)
    start, final, found = row["start"], row["final"], row["against grpo"]
    text = (
      f"{name}: {drawing.number(start['mean']):.2f} to "
      f"{drawing.number(final['mean']):.2f}, {final['n']} seeds"
    )
    if row["method"] != "grpo":
      center = drawing.number(found["mean"])
      low, high = (drawing.number(found[k], center) for k in ("low", "high"))
      ax.plot([low, high], [y, y], color=colour, linewidth=2)
      ax.plot(center, y, "o", color=colour)
    ax.text(
      0.01,
      y + 0.18,
      text,
      transform=ax.get_yaxis_transform(),
      color=colour,
      fontsize=8,
    )
  ax.axvline(0, color=drawing.GREY, linewidth=1, linestyle=":")
  ax.set(yticks=[], ylim=(-0.5, max(len(table), 1) - 0.2))
  ax.set(xlabel="95 % interval, not adjusted", title="final pass@1 less GRPO's")


def _clipped(ax, table):
  for x, row in enumerate(table):
    _, colour = _style(row)
    drawing.whiskers(ax, [x], [row["clipped tokens"]], colour=colour)
  ax.set_yscale("symlog", linthresh=1e-3)
  ax.yaxis.set_major_formatter(lambda y, _: f"{y:.4g}")
  ax.set_ylim(0, 1)
  ax.set_xticks(range(len(table)), [_style(row)[0] for row in table])
  ax.set_title("share of tokens clipped")


def _style(row) -> tuple[str, str]:
  return drawing.NAMES[row["method"]], drawing.COLOURS[row["method"]]
