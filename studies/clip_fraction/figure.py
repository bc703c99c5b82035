"""The figure of the clip fraction study."""

from pathlib import Path

from studies import drawing

METHODS = ("gspo", "grpo")


def draw(record: dict, path: Path) -> None:
  """By learning rate: clipped tokens, and GSPO's final pass@1 less GRPO's."""
  table = record["table"]
  rates = [float(row["rate"]) for row in table]
  figure, ((left, right),) = drawing.axes(1, 2, size=(4.8, 3.6))
  for method in METHODS:
    name, share = drawing.NAMES[method], record["claimed"][method]
    shares = [row[method]["clipped tokens"] for row in table]
    colour = drawing.COLOURS[method]
    drawing.whiskers(left, rates, shares, colour=colour, label=name)
    drawing.claimed(left, share, f"claimed of {name}: {100 * share:g} %")
  left.set_title("share of tokens clipped")
  left.set_ylim(0, 1)
  left.set_yscale("symlog", linthresh=1e-3)
  left.yaxis.set_major_formatter(lambda y, _: f"{y:.4g}")
  gaps = [row["pass@1, gspo less grpo"] for row in table]
  drawing.whiskers(right, rates, gaps, colour=drawing.COLOURS["gspo"])
  right.axhline(0, color=drawing.GREY, linewidth=1, linestyle=":")
  right.set_title("final pass@1, GSPO less GRPO")
  for ax in (left, right):
    drawing.rates(ax, [row["rate"] for row in table])
  drawing.save(figure, path)
