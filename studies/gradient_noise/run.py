"""How noisy a group's gradient is, by the length of its responses.

  python -m studies.gradient_noise.run

An old policy, saved by a run of GSPO, responds to held-out problems; the new
one, 4 updates on in the same run, is differentiated. Half of a group's
responses are right, by lot, so that advantages are +1 and -1, none is deserved,
and the expected gradient at ratio 1 is 0. Responses have one length each time:
- whole: no stop token is sampled before they are n tokens long;
- windows: all have 512 tokens, and only n in a row, at random, count.

With g a group's gradient of a loss and g1 that with all ratios set to 1:
- added, sqrt(E|g - g1|^2 / E|g1|^2): what ratios, and clipping, put into it;
- noise, E|g - E g|^2, the trace of the covariance over groups, by that of g1,
  and by the share of tokens not clipped: 1 is what dropping as many at random
  would leave.

Fixed before the runs: what is tested is `added` without a clip range, by its
exponent in the length, with intervals over seeds of 95 % for three tests
together (Bonferroni). GRPO's grows, GSPO's grows, GRPO's grows faster: each
holds where the interval lies above 0 for whole responses and for windows, and
is not shown otherwise. All else is there to be looked at.
"""

import functools
from typing import NamedTuple

import jax

from gspo_jax.runtime import sharding
from studies import intervals, seeds
from studies.gradient_noise import gradients, points, quantities
from studies.runs import Run
from studies.study import Study, command

ANSWERS = ("whole", "windows")
UNCLIPPED = ("grpo unclipped", "gspo unclipped")
LEVEL = 1 - 0.05 / 3


class Plan(NamedTuple):
  """How much is measured.

  Attributes:
    lengths: of the responses, in tokens.
    old: the iteration after which the policy responds.
    new: that after which it is differentiated.
    pairs: of groups, for each length; of windows half as many.
  """

  lengths: tuple[int, ...]
  old: int
  new: int
  pairs: int


FULL = Plan((16, 64, 256, 512), 4, 5, 16)
QUICK = Plan((4, 8), 1, 2, 4)


def plan(quick: bool) -> list[dict]:
  return [{"seed": seed} for seed in range(1 if quick else 4)]


def measure(run: Run, how: Plan) -> dict:
  """Each point's quantities, and how what is added goes with length."""
  whole, windows, control = gradients_of(run, how)
  rows = [
    {"answers": answers, "length": n} | quantities.describe(*point)
    for answers, found in zip(ANSWERS, (whole, windows), strict=True)
    for n, point in found.items()
  ]
  return {
    "pass@1": run.curve("eval/pass@1"),
    "rows": rows,
    "exponents": {
      answers: quantities.exponents({n: p.grams for n, p in found.items()})
      for answers, found in zip(ANSWERS, (whole, windows), strict=True)
    },
    # All ratios are 1 here: what is added must be 0.
    "control": quantities.describe(*control)["added"],
  }


def gradients_of(run: Run, how: Plan):
  """Points by length: whole responses, windows; and one of the old policy."""
  whole, control = {}, None
  mesh = sharding.make_mesh(**run.config.mesh)
  with jax.set_mesh(mesh):
    for n in how.lengths:
      bench = points.bench(run.config, run.folder, mesh, n)
      sampled = list(bench.sample(how.old, how.pairs))
      control = control or bench.point(sampled[:1], how.old)
      whole[n] = bench.point(sampled, how.new)
    # The last bench is that of the longest responses, all of whose windows cost
    # what they do; the longest window is the response.
    windows = {
      n: bench.point(points.windows(sampled[:1], n), how.new)
      for n in how.lengths[:-1]
    }
  return whole, windows | {n: whole[n]}, control


def summarize(results: list[dict]) -> dict:
  """Exponents: means over seeds, with Student's intervals; and what holds."""
  table = []
  for answers in ANSWERS:
    own = {r["seed"]: r["exponents"][answers] for r in results}
    values = {m: seeds.values(own, m) for m in gradients.METHODS}
    found = {m: intervals.mean(v, LEVEL) for m, v in values.items()}
    grpo, gspo = (
      {seed: {"exponent": e[m]} for seed, e in own.items()} for m in UNCLIPPED
    )
    faster = intervals.paired(*seeds.pairs(grpo, gspo, "exponent"), LEVEL)
    table.append({"answers": answers, "grpo less gspo": faster} | found)
  holds = {
    test: all(intervals.place(row[test], 0, 0) == "above" for row in table)
    for test in (*UNCLIPPED, "grpo less gspo")
  }
  return {"exponents of added": table, "above 0 in both": holds}


def main(argv=None) -> None:
  study = Study("gradient_noise", __doc__, argv)
  how = QUICK if study.quick else FULL
  study.sweep(
    plan(study.quick),
    functools.partial(measure, how=how),
    summarize,
    kept=how._asdict(),
  )


if __name__ == "__main__":
  command(main)
