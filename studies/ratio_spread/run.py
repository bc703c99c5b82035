"""How far token and sequence ratios spread, by the answers' length.

  python -m studies.ratio_spread.run

Each policy that a run of GSPO saved after an iteration answers held-out
questions, and the next one, four updates on, scores the answers: x - o of each
token, and its mean over an answer. None of these answers was learnt from, as
none is that a minibatch still holds when ratios are clipped there; that sees
the policy after three updates at most.

If the x - o of an answer's tokens were independent and of one spread, that of
the mean would be smaller by sqrt(length): an exponent of -1/2.
"""

from pathlib import Path

import jax
import numpy as np

from gspo_jax import program, sharding
from studies import arguments, intervals, measures, saved
from studies.ratio_spread import figure
from studies.ratio_spread.config import get_config
from studies.runs import Study

SEEDS = (0, 1, 2)
FIRST = 3  # iteration; the learning rate is below its peak in the first two
BATCHES = 4  # of 256 answers, an iteration
BINS = ((1, 24), (25, 45), (46, 73), (74, 101), (102, 128))  # tokens
QUICK_BINS = ((1, 11), (12, 12))
QUANTITIES = ("token_std", "sequence_std", "token_outside", "sequence_outside")
# Clip ranges (l, h) of arXiv 2507.18071, sec. 5.1: GRPO's and GSPO's.
CLIPS = {"token": (0.2, 0.27), "sequence": (3e-4, 4e-4)}


def measure(config, workdir: Path, first: int, bins) -> list[dict]:
  """Of each bin that has answers, the spread over all iterations."""
  mesh = sharding.make_mesh(**config.mesh)
  with jax.set_mesh(mesh):
    functions = program.build(config, mesh)
    questions = saved.questions(config, functions)
    old = saved.weights(config, functions, workdir, first - 1)
    found = []
    for step in range(first, config.num_steps + 1):
      new = saved.weights(config, functions, workdir, step)
      gaps, mask = _gaps(functions, old, new, questions, step)
      found.append(
        [
          measures.spread(gaps, mask, b, CLIPS["token"], CLIPS["sequence"])
          for b in bins
        ]
      )
      old = new
  each = (measures.pooled(column) for column in zip(*found, strict=True))
  return [
    {"tokens from": low, "to": high} | one
    for (low, high), one in zip(bins, each, strict=True)
    if one
  ]


def _gaps(functions, old, new, questions, step):
  """x - o of the old policy's answers under the new one, and their mask."""
  gaps, masks = [], []
  for i in range(BATCHES):
    prompts, key = next(questions), jax.random.key(step * BATCHES + i)
    samples, before = saved.answers(functions, old, prompts, key)
    after, _ = functions.score(new, prompts, samples)
    gaps.append(np.asarray(after.old_logps - before.old_logps))
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
  """Means over seeds, with their intervals."""
  every = [r["exponents"] for r in results]
  table = []
  for low in dict.fromkeys(
    b["tokens from"] for r in results for b in r["bins"]
  ):
    rows = [b for r in results for b in r["bins"] if b["tokens from"] == low]
    mean = lambda key, rows=rows: intervals.mean([b[key] for b in rows])
    table.append(
      {"tokens from": low, "length": mean("length")["mean"]}
      | {key: mean(key) for key in QUANTITIES}
      | {
        "sequence_std * sqrt(length) / token_std": intervals.mean(
          [
            b["sequence_std"] * b["length"] ** 0.5 / b["token_std"]
            for b in rows
          ]
        )
      }
    )
  return {
    "exponents": {k: intervals.mean([e[k] for e in every]) for k in every[0]},
    "table": table,
  }


def main() -> None:
  study = Study("ratio_spread", __doc__)
  seeds = SEEDS[:1] if study.quick else SEEDS
  first, bins = (2, QUICK_BINS) if study.quick else (FIRST, BINS)
  results = []
  for seed in () if study.plot else seeds:
    argument = arguments.write(seed=seed)
    run = study.train(argument)
    config = get_config(arguments.write(seed=seed, quick=int(study.quick)))
    found = measure(config, saved.workdir(study, argument), first, bins)
    results.append(
      {
        "seed": seed,
        "pass@1": run.curve("eval/pass@1"),
        "greedy": run.curve("eval/greedy"),
        "exponents": exponents(found),
        "bins": found,
      }
    )
    study.write(
      planned=len(seeds), clips=CLIPS, runs=results, **summarize(results)
    )
  figure.draw(study.read(), study.figure)


if __name__ == "__main__":
  main()
