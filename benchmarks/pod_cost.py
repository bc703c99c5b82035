"""The planned cost of an iteration, by the length of responses and the chips.

  python -m benchmarks.pod_cost --out=benchmarks/pod_cost.json [--cells NAME...]

Qwen3-30B-A3B on v5p, 8,192 responses with a mean of a quarter of their longest,
as `gspo_jax.plan` compiles and costs `configs/moe_tpu_v5.py`; nothing runs on a
chip. Writes OUT.json and OUT.png. A cell takes 10 CPU minutes; those in OUT
are kept. Cells: tokens of the longest response @ chips.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import record

_TOPOLOGY = {64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
_LENGTHS = "lognormal:mean=.25,sigma=1,group=.5"
_PROMPT = 1024
# Responses of 16k on more chips, and longer ones whose rows are split.
_CELLS = [
  *((tokens, 64) for tokens in (4096, 16384, 32768, 65536)),
  *((16384, chips) for chips in (128, 256, 512)),
]
_PARTS = {"steps", "reading", "waiting", "score", "update"}


def keys(tokens: int, chips: int) -> dict[str, int]:
  """Config keys of a cell; prompt and response together fill a row."""
  context = max(1, tokens // 16384)
  new = tokens if context == 1 else tokens - _PROMPT
  fsdp = min(32, chips // 4 // context)
  return {
    "sampler.max_new_tokens": new,
    "mesh.fsdp": fsdp,
    "mesh.context": context,
    "learner.micro_batch_size": chips // context,
    # As many as the pool holds of responses of the mean length.
    "continuous_batching.slots": 8192 // context,
    "continuous_batching.num_pages": 6000 * chips,
  }


def plan(tokens: int, chips: int) -> dict:
  overrides = [f"--config.{k}={v}" for k, v in keys(tokens, chips).items()]
  command = [
    *(sys.executable, "-m", "gspo_jax.plan", "--json"),
    "--config=configs/moe_tpu_v5.py",
    *(f"--topology=v5p:{_TOPOLOGY[chips]}", f"--lengths={_LENGTHS}"),
    *overrides,
  ]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
  report = json.loads(done.stdout)
  cell = {"tokens": tokens, "chips": chips, "fits": report["fits"]}
  if (found := report["iteration"]) is None:
    return cell | {
      "reasons": [x["reason"] for x in report["functions"].values()]
    }
  expected = found["expected"]
  whole = "seconds", "mfu", "tokens_per_second_per_chip", "seconds_of"
  beside = "added", "loads", "evaluation", "checkpoint"
  return cell | {
    **{key: found[key] for key in whole},
    "by_libtpu": found["compiler"]["seconds"],
    "by_libtpu_of": found["compiler"]["seconds_of"],
    "expected": {key: expected[key] for key in (*whole, *beside)},
  }


def draw(cells: list[dict], path: Path) -> None:
  """Seconds by part, over response tokens and over chips."""
  import matplotlib as mpl

  mpl.use("Agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
  cells = [cell for cell in cells if "seconds" in cell]
  for ax, x, fixed, at in (
    (axes[0], "tokens", "chips", 64),
    (axes[1], "chips", "tokens", 16384),
  ):
    shown = sorted(
      (cell for cell in cells if cell[fixed] == at), key=lambda cell: cell[x]
    )
    labels = [f"{cell[x]:,}" for cell in shown]
    bottom = [0.0] * len(shown)
    for part in sorted(_PARTS):
      heights = [cell["seconds_of"][part] for cell in shown]
      ax.bar(labels, heights, bottom=bottom, label=part)
      bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    ax.plot(labels, [cell["by_libtpu"] for cell in shown], "k_", ms=18)
    # A cell of an older plan has none.
    expected = [cell.get("expected", {}).get("seconds") for cell in shown]
    ax.plot(labels, [x or float("nan") for x in expected], "kD", ms=5)
    name = "tokens of the longest response" if x == "tokens" else x
    ax.set(xlabel=f"{name}, {at:,} {fixed}", ylabel="seconds an iteration")
  axes[0].legend()
  figure.suptitle(
    "planned, at best; line: by libtpu's cycles; diamond: expected"
  )
  figure.savefig(path, dpi=110)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  names = {f"{tokens}@{chips}": (tokens, chips) for tokens, chips in _CELLS}
  parser.add_argument("--cells", nargs="+", choices=names, default=[*names])
  parser.add_argument("--out", type=Path, required=True)
  args = parser.parse_args()
  cells = {}
  if args.out.exists():
    cells = json.loads(args.out.read_text())["cells"]
  for name in args.cells:
    if name not in cells:
      cells[name] = {"commit": record.commit()} | plan(*names[name])
      record.write("pod_cost", {"cells": cells}, args.out)
      print(name, cells[name], flush=True)
  draw([*cells.values()], args.out.with_suffix(".png"))


if __name__ == "__main__":
  main()
