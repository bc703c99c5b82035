"""The figure of the ratio spread study."""

from pathlib import Path

from studies import drawing


def draw(record: dict, path: Path) -> None:
  table = record["table"]
  lengths = [row["length"] for row in table]
  column = lambda key: [row[key] for row in table]
  grpo, gspo = drawing.COLOURS["grpo"], drawing.COLOURS["gspo"]
  figure, ((left, right),) = drawing.axes(1, 2, size=(4.8, 3.8))
  left.set_title("standard deviation of log-ratios")
  for key, colour, label in (
    ("token_std", grpo, "token"),
    ("sequence_std", gspo, "sequence"),
  ):
    drawing.whiskers(left, lengths, column(key), colour=colour, label=label)
  independent = [
    row["token_std"]["mean"] / row["length"] ** 0.5 for row in table
  ]
  left.plot(lengths, independent, color=drawing.GREY, linestyle="--")
  left.annotate(
    "token / √length",
    (lengths[0], independent[0]),
    xytext=(0, -6),
    textcoords="offset points",
    va="top",
    color=drawing.GREY,
    fontsize=9,
  )
  for unit, method in (("token", "GRPO"), ("sequence", "GSPO")):
    low, high = record["clips"][unit]
    middle = (low * high) ** 0.5
    drawing.claimed(left, middle, f"{method} clips at −{low:g}, +{high:g}")
  left.set(yscale="log", ylabel="std of x − o")
  right.set_title("share of ratios outside the clip range")
  for key, colour, label in (
    ("token_outside", grpo, "tokens,\nGRPO's range"),
    ("sequence_outside", gspo, "sequences,\nGSPO's range"),
  ):
    drawing.whiskers(right, lengths, column(key), colour=colour, label=label)
  right.set(ylim=(-0.02, 1), ylabel="share")
  for ax in (left, right):
    ax.set(xscale="log", xlabel="length of the responses, tokens")
    ax.set_xticks(lengths, [f"{n:.0f}" for n in lengths], minor=False)
    ax.minorticks_off()
  drawing.save(figure, path)
