"""The figure of the expert flip study."""

from pathlib import Path

from studies import drawing

SHADES = ("#0072B2", "#D55E00")


def draw(record: dict, path: Path) -> None:
  """Of each setting; and by layer, of those that differ in depth alone."""
  table, claimed = record["table"], record["claimed"]
  figure, ((left, right),) = drawing.axes(1, 2, size=(5.2, 3.6))
  _settings(left, table, claimed)
  base = {key: table[0][key] for key in ("experts", "top", "rate")}
  alike = [row for row in table if base.items() <= row.items()]
  for row, colour in zip(alike, SHADES, strict=False):
    layers = range(1, len(row["by layer"]) + 1)
    label = f"{row['layers']} layers"
    if layers:
      drawing.whiskers(
        right, layers, row["by layer"], colour=colour, label=label
      )
  right.set(xlabel="layer", title="by layer, top-2 of 8 experts")
  drawing.share(right)
  drawing.save(figure, path)


def _settings(ax, table, claimed) -> None:
  for y, row in enumerate(reversed(table)):
    found = row["flips"]
    center = drawing.number(found["mean"])
    low, high = (drawing.number(found[k], center) for k in ("low", "high"))
    ax.plot([low, high], [y, y], color=SHADES[0], linewidth=2)
    ax.plot(center, y, "o", color=SHADES[0])
  names = [
    f"top-{r['top']} of {r['experts']}, {r['layers']} layers, {r['rate']}"
    for r in reversed(table)
  ]
  ax.axvline(claimed, color=drawing.GREY, linestyle=":", linewidth=1)
  ax.set_title(f"experts flipped by an update; dotted: claimed, {claimed:.0%}")
  ax.set_yticks(range(len(names)), names, fontsize=8)
  ax.set_xlim(left=0)
