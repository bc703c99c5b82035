"""The figure of the mismatch study."""

from pathlib import Path

from studies import drawing

COLOURS = {
  "gspo": "#0072B2",
  "grpo": "#D55E00",
  "cispo": "#009E73",
  "dppo_tv": "#CC79A7",
}
STYLES = {
  "": "-",
  "r2": "--",
  "r3": ":",
  "tis": "-.",
  "mis": (0, (1, 3)),
  "wide": "--",
  "dual": "--",
}


def draw(record: dict, path: Path) -> None:
  """Final pass@1 of each arm by error, old log-probs recomputed and sampled."""
  figure, grid = drawing.axes(1, 2, size=(5.6, 4.0), sharey=True)
  panels = zip(grid[0], ("recompute", "sampler"), strict=True)
  for ax, old in panels:
    rows = [row for row in record["table"] if row["old"] == old]
    with_rows = {row["error"] for row in rows}
    sizes = [s for s in record["sizes"] if s["error"] in with_rows]
    errors = [size["error"] for size in sizes]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for i, method in enumerate(methods):
      own = [row for row in rows if row["method"] == method]
      # Side by side, so that no interval hides another.
      places = [errors.index(row["error"]) + 0.04 * i for row in own]
      base, _, remedy = method.partition("+")
      drawing.whiskers(
        ax,
        places,
        [row["final"] for row in own],
        colour=COLOURS[base],
        linestyle=STYLES[remedy],
      )
      ax.plot([], [], color=COLOURS[base], ls=STYLES[remedy], label=method)
    ax.set_xticks(range(len(errors)), [_label(size) for size in sizes])
    whose = "recomputed" if old == "recompute" else "of the sampler"
    ax.set(title=f"old log-probs {whose}", xlabel="error of the sampler")
    ax.legend(fontsize=8)
  grid[0, 0].set_ylabel("final pass@1")
  drawing.save(figure, path)


def _label(size: dict) -> str:
  return f"{size['error']}\n{drawing.number(size['nats a token']['mean']):.2g}"
