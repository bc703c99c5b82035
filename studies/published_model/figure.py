"""The figure of the published model study."""

from pathlib import Path

from studies import drawing


def draw(record: dict, path: Path) -> None:
  """pass@1 of each seed, the final one less GRPO's, and clipped tokens."""
  figure, (axes,) = drawing.axes(1, 3, size=(4.4, 3.2))
  _seeds(axes[0], record["runs"], [row["method"] for row in record["table"]])
  _differences(axes[1], record["table"])
  _clipped(axes[2], record["table"])
  drawing.save(figure, path)


def _seeds(ax, runs, methods):
  reported = [run for run in runs if "final" in run]
  for seed in sorted({run["seed"] for run in reported}):
    own = {run["method"]: run for run in reported if run["seed"] == seed}
    start = next(iter(own.values()))["start"]
    found = [start, *(own[m]["final"] if m in own else None for m in methods)]
    points = [drawing.number(x) for x in found]
    ax.plot(points, "o-", color=drawing.GREY, linewidth=1, markersize=4)
    drawing.beside(ax, len(methods), points[-1], f"seed {seed}", drawing.GREY)
  ax.set_ylim(0)
  names = (drawing.NAMES[method] for method in methods)
  ax.set_xticks(range(1 + len(methods)), ["start", *names])
  ax.set_title("pass@1 at the start and of the last policies")


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
