"""The figure of the expert flip study."""

from pathlib import Path

from studies import drawing

SHADES = ("#0072B2", "#009E73", "#D55E00", "#CC79A7")


def draw(record: dict, path: Path, claimed: float) -> None:
  """By learning rate: for each number of experts; and by layer."""
  table = record["table"]
  shallow = [row for row in table if row["layers"] == 2]
  counts = sorted({row["experts"] for row in shallow})
  figure, grid = drawing.axes(1, len(counts) + 1, size=(4.2, 3.4))
  highest = lambda i: drawing.number(i["high"], i["mean"])
  top = max(highest(row["flips"]) for row in table)
  for ax, count in zip(grid[0], counts, strict=False):
    rows = [row for row in shallow if row["experts"] == count]
    ax.set_title(f"{count} experts, 2 layers")
    ax.set_ylim(0, 1.15 * max(top, claimed))
    _by_rate(ax, rows, claimed)
  deepest = max(row["layers"] for row in table)
  _by_layer(grid[0, -1], [r for r in table if r["layers"] == deepest])
  grid[0, 0].set_ylabel("experts flipped by an update")
  drawing.save(figure, path)


def _by_rate(ax, rows, claimed):
  ends, colours = {}, {}
  tops = sorted({row["top"] for row in rows})
  for top, colour in zip(tops, SHADES, strict=False):
    own = [row for row in rows if row["top"] == top]
    apart = 1.05 ** len(ends)  # bars that are not one over another
    rates = [apart * float(row["rate"]) for row in own]
    flips = [row["flips"] for row in own]
    drawing.whiskers(ax, rates, flips, colour=colour)
    ends[f"top-{top}"] = rates[-1], drawing.number(flips[-1]["mean"])
    colours[f"top-{top}"] = colour
  drawing.rates(ax, [row["rate"] for row in rows])
  drawing.claimed(ax, claimed, f"claimed of 48 layers: {claimed:.0%}")
  drawing.names(ax, ends, colours)


def _by_layer(ax, rows):
  for row, colour in zip(rows, SHADES, strict=False):
    layers = range(1, len(row["by layer"]) + 1)
    label = f"rate {row['rate']}"
    drawing.whiskers(ax, layers, row["by layer"], colour=colour, label=label)
  drawing.share(ax)
  first = rows[0]
  ax.set_title(
    f"{first['layers']} layers, {first['experts']} experts, top-{first['top']}"
  )
  ax.set(xlabel="layer", xticks=list(layers))
