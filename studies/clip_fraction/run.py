"""How many tokens GSPO and GRPO clip, by learning rate.

  python -m studies.clip_fraction.run

A token is clipped where its gradient is zero because its ratio, or in GSPO its
sequence's, left the range on the side that its advantage pulls to. Of the four
minibatches of an iteration the first has ratio 1 everywhere, so that a share of
3/4 is the most there can be.
"""

from studies import arguments, intervals
from studies.runs import Run, Study, command

METHODS = ("gspo", "grpo")
KEYS = {
  "clipped tokens": "clip_frac/token",
  "sequence ratio std": "ratio/sequence_std",
  "token ratio std": "ratio/token_std",
  "reward": "reward/mean",
}
# Iterations; the first few begin with an empty Adam.
WINDOWS = {"1 to 10": (1, 10), "5 to 10": (5, 10)}
CLAIMED = {
  "gspo": 0.15,
  "grpo": 0.0013,
}  # of tokens, arXiv 2507.18071, sec. 5.2


def plan(quick: bool) -> list[dict]:
  rates = ("3e-4",) if quick else ("3e-5", "1e-4", "3e-4", "1e-3")
  seeds = range(2 if quick else 3)
  return [
    {"method": method, "rate": rate, "seed": seed}
    for seed in seeds
    for rate in rates
    for method in METHODS
  ]


def measure(run: Run) -> dict:
  """Curves, and each window's mean of each key."""
  steps = len(run.rows) - 1
  windows = {
    window: {
      name: run.mean(key, min(first, steps), last) for name, key in KEYS.items()
    }
    for window, (first, last) in WINDOWS.items()
  }
  return {
    "windows": windows,
    "clipped tokens": run.curve("clip_frac/token"),
    "pass@1": run.curve("eval/pass@1"),
    "failure": run.failure,
  }


def summarize(results: list[dict]) -> list[dict]:
  """Of each method and rate, the means over seeds; and their ratio."""
  table = []
  for rate in dict.fromkeys(r["rate"] for r in results):
    for window in WINDOWS:
      found = {"rate": rate, "iterations": window}
      for method in METHODS:
        rows = [
          r for r in results if (r["method"], r["rate"]) == (method, rate)
        ]
        if rows:
          found[method] = {
            name: intervals.mean([r["windows"][window][name] for r in rows])
            for name in KEYS
          }
      table.append(found)
  return table


def draw(record: dict, path) -> None:
  from studies import drawing

  figure, grid = drawing.axes(1, len(WINDOWS), size=(4.8, 3.6), sharey=True)
  for ax, window in zip(grid[0], WINDOWS, strict=True):
    rows = [r for r in record["table"] if r["iterations"] == window]
    for method in METHODS:
      own = [r for r in rows if method in r]
      drawing.whiskers(
        ax,
        [float(r["rate"]) for r in own],
        [r[method]["clipped tokens"] for r in own],
        colour=drawing.COLOURS[method],
        label=drawing.NAMES[method],
      )
      drawing.claimed(
        ax,
        CLAIMED[method],
        f"claimed of {drawing.NAMES[method]}: {100 * CLAIMED[method]:g}%",
      )
    ax.set_title(f"iterations {window}")
    drawing.rates(ax, [r["rate"] for r in rows])
    ax.set_ylim(0, 1)
    ax.set_yscale("symlog", linthresh=1e-3)
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.4g}")
  figure.suptitle("share of tokens clipped, mean and 95 % interval over seeds")
  drawing.save(figure, path)


def main() -> None:
  study = Study("clip_fraction", __doc__)
  if not study.plot:
    results, planned = [], plan(study.quick)
    for one in planned:
      run = study.train(arguments.write(**one))
      results.append(one | measure(run))
      study.write(planned=len(planned), table=summarize(results), runs=results)
  draw(study.read(), study.figure)


if __name__ == "__main__":
  command(main)
