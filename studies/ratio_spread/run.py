"""How far token and sequence ratios spread, by the responses' length.

  python -m studies.ratio_spread.run

Each policy that a run of GSPO saved after an iteration responds to held-out
problems, and the next one, four updates on, scores the responses: x - o of each
token, and its mean over a response. None of these responses was learnt from, as
none is that a minibatch still holds when ratios are clipped there; that sees
the policy after three updates at most.

Length goes with the task here: longer responses are of longer chains.

Fixed before the runs, of exponents in the length, with 95 % intervals over
seeds:
- independent tokens would give that of sequence_std / token_std as -1/2:
  refuted where the interval excludes it;
- one clip range fits all lengths where the whole interval of that of
  sequence_std is within -.1 to .1, and does not where it is wholly outside.
"""

import functools

import jax
import numpy as np

from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from studies import intervals, measures, saved, seeds
from studies.runs import Run
from studies.study import Study, command

FIRST = 3  # iteration; the learning rate is below its peak in the first two
BATCHES = 2  # of 256 responses, an iteration
BINS = ((1, 24), (25, 45), (46, 73), (74, 96))  # tokens
QUICK_BINS = ((1, 11), (12, 12))
QUANTITIES = ("token_std", "sequence_std", "token_outside", "sequence_outside")
# Clip ranges (l, h) of arXiv 2507.18071, sec. 5.1: GRPO's and GSPO's.
CLIPS = {"token": (0.2, 0.27), "sequence": (3e-4, 4e-4)}
INDEPENDENT, ALIKE = -0.5, (-0.1, 0.1)  # exponents


def plan(quick: bool) -> list[dict]:
  return [{"seed": seed} for seed in range(1 if quick else 3)]


def measure(run: Run, first: int, bins) -> dict:
  found = spreads(run, first, bins)
  return {
    "pass@1": run.curve("eval/pass@1"),
    "exponents": exponents(found),
    "bins": found,
  }


def spreads(run: Run, first: int, bins) -> list[dict]:
  """The spread over all iterations, of each bin that has responses."""
  config, mesh = run.config, sharding.make_mesh(**run.config.mesh)
  with jax.set_mesh(mesh):
    functions = build_program(parse(config), mesh)
    batches = saved.prompts(config, functions)
    weights = functools.partial(saved.weights, config, functions, run.folder)
    found, old = [], weights(first - 1)
    for step in range(first, config.num_steps + 1):
      new = weights(step)
      gaps, mask = _gaps(functions, old, new, batches, step)
      clips = CLIPS["token"], CLIPS["sequence"]
      found.append([measures.spread(gaps, mask, b, *clips) for b in bins])
      old = new
  each = (measures.pooled(column) for column in zip(*found, strict=True))
  return [
    {"tokens from": low, "to": high} | one
    for (low, high), one in zip(bins, each, strict=True)
    if one
  ]


def _gaps(functions, old, new, batches, step):
  """x - o of the old policy's responses under the new one, and their mask."""
  gaps, masks = [], []
  for i in range(BATCHES):
    prompts, key = next(batches), jax.random.key(step * BATCHES + i)
    _, before = saved.responses(functions, old, prompts, key)
    after = saved.log_probs(new, functions.cfg, before)
    gaps.append(np.asarray(after - before.old_logps))
    masks.append(np.asarray(before.response_mask))
  return np.concatenate(gaps), np.concatenate(masks)


def exponents(bins: list[dict]) -> dict[str, float]:
  """By which the spreads of one seed go with length."""
  lengths = [b["length"] for b in bins]
  spread = lambda key: [b[key] for b in bins]
  against = [b["sequence_std"] / b["token_std"] for b in bins]
  return {
    "token_std": measures.power(lengths, spread("token_std")),
    "sequence_std": measures.power(lengths, spread("sequence_std")),
    "sequence_std / token_std": measures.power(lengths, against),
  }


def summarize(results: list[dict]) -> dict:
  """Means over seeds, with their intervals, and what they say."""
  own = {r["seed"]: r["exponents"] for r in results}
  found = {
    key: intervals.mean(seeds.values(own, key))
    for key in next(iter(own.values()))
  }
  ratio, sequence = found["sequence_std / token_std"], found["sequence_std"]
  table = []
  for low in sorted({b["tokens from"] for r in results for b in r["bins"]}):
    rows = [b for r in results for b in r["bins"] if b["tokens from"] == low]
    table.append(
      {
        "tokens from": low,
        "length": sum(b["length"] for b in rows) / len(rows),
        **{key: intervals.mean([b[key] for b in rows]) for key in QUANTITIES},
      }
    )
  return {
    "clips": CLIPS,
    "exponents": found,
    "against -1/2": intervals.place(ratio, INDEPENDENT, INDEPENDENT),
    "one range for all": intervals.place(sequence, *ALIKE),
    "table": table,
  }


def main(argv=None) -> None:
  study = Study("ratio_spread", __doc__, argv)
  how = {"first": FIRST, "bins": BINS}
  if study.quick:
    how = {"first": 2, "bins": QUICK_BINS}
  study.sweep(
    plan(study.quick),
    functools.partial(measure, **how),
    summarize,
    kept=how | {"batches": BATCHES},
  )


if __name__ == "__main__":
  command(main)
