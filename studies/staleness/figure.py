"""The figure of the staleness study."""

from pathlib import Path

from studies import drawing

NAMES = {
  "recompute": "recomputed",
  "sampler": "the sampler's",
  "exact": "the sampler's, model.exact",
}
COLOURS = {"recompute": "#0072B2", "sampler": "#CC79A7", "exact": "#009E73"}


def draw(record: dict, path: Path) -> None:
  """Final pass@1, and the share of clipped tokens, by staleness."""
  figure, ((left, right),) = drawing.axes(1, 2, size=(4.8, 3.6))
  panels = (left, "final", "pass@1"), (right, "clipped tokens", "share")
  for ax, key, label in panels:
    for old, colour in COLOURS.items():
      rows = [row for row in record["table"] if row["old"] == old]
      steps = [row["staleness"] for row in rows]
      found = [row[key] for row in rows]
      # On the left the two lines lie close together.
      name = NAMES[old] if ax is right else ""
      drawing.whiskers(ax, steps, found, colour=colour, label=name)
    ax.set(xlabel="rollout.max_staleness", ylabel=label, title=key)
    ax.set_xticks(steps)
  drawing.save(figure, path)
