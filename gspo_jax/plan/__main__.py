"""Compiles a config's functions for TPUs or GPUs; none is needed.

  python -m gspo_jax.plan --config=configs/moe_tpu_v5.py --topology=v5p:4x4x4
  python -m gspo_jax.plan --config=configs/tiny_cpu.py --topology=l4:1

It takes the command line of gspo_jax.main unchanged; the workdir is not used.
For each function it prints whether it fits, its time at best, and for TPUs its
time by libtpu's cycles; docs/scaling.md says what is counted. `generate` is
shown twice: one decode step at the longest cache, and the whole call with
responses of full length. With `continuous_batching.slots`, the call is a
segment of decode steps with all pages full, and the largest
`continuous_batching.num_pages` that fits into HBM is printed. The time of
`old_logps` is for all minibatches, although a run needs only one micro-batch of
the first.

`--lengths` adds the cost of an iteration whose responses have these lengths
(plan/iteration/lengths.py has the formats):

  --lengths=lognormal:mean=.25,sigma=1,group=.5
  --lengths=runs/tiny/lengths.txt

Of TPUs it has three columns: at best, by libtpu's cycles, and expected, by the
numbers of plan/derates.py. `--skew=.8` is how unevenly experts are chosen, the
coefficient of variation of their popularity; `--skew=runs/a/metrics.jsonl`, as
the last `moe/load_max` of a run says. `--measured=runs/a/metrics.jsonl` sets
the times of a run beside it, with the derates that would have expected them.

With `continuous_batching.speculation`, `--speculation=1.3` adds 1.3 tokens to a
response in a step that drafts.

Exit codes: 0 every function fits; 1 one does not; 2 a mistake of the user, in
one line; 3 a fault, with its traceback.
"""

import json
import sys
import traceback

from absl import flags

from gspo_jax.plan import chips, lower, measured
from gspo_jax.plan import table as plan_table
from gspo_jax.plan.planner import plan
from gspo_jax.program import command
from gspo_jax.runtime.errors import UserError

_TOPOLOGY = flags.DEFINE_string(
  "topology",
  None,
  "A TPU slice: v5e:4x4, v5p:4x4x4, v6e:8x8, tpu7x:2x2x1; or a type: v5p-128. "
  "Or GPUs of a host: h100:8, h200:8, a100:8, a100-40gb:1, l4:1, t4:1.",
)
_SLICES = flags.DEFINE_integer("slices", 1, "How many of them.")
_FUNCTIONS = flags.DEFINE_list(
  "functions",
  None,
  f"Those to compile, of {', '.join(lower.FUNCTIONS)}, all by default; each "
  "takes up to minutes.",
)
_LENGTHS = flags.DEFINE_string(
  "lengths",
  "",
  "Also cost an iteration: lognormal:mean=.25,sigma=1,group=.5, shares of "
  "sampler.max_new_tokens; or a file with a length a line.",
)
_SPECULATION = flags.DEFINE_float(
  "speculation", 1.0, "Tokens of a response in a step that drafts."
)
_SKEW = flags.DEFINE_string(
  "skew",
  "",
  "Coefficient of variation of the experts' popularity, 0: even, default .8; "
  "or metrics.jsonl of a run, for its moe/load_max.",
)
_MEASURED = flags.DEFINE_string(
  "measured", "", "metrics.jsonl of a run, whose times are set beside the plan."
)
_TOP = flags.DEFINE_integer("top", 0, "Show the N most expensive operations.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead.")
_START = (
  "python -m gspo_jax.plan --config=configs/tiny_cpu.py --topology=v5e:4x4"
)


def main() -> None:
  try:
    command.run(_plan, _START, __doc__)
  except Exception:  # Python's own exit code is 1, which says "does not fit"
    traceback.print_exc()
    sys.exit(3)


def _plan() -> int:
  if _MEASURED.value and not _LENGTHS.value:
    raise UserError(
      f"--measured={_MEASURED.value}: expected --lengths, those of the run"
    )
  rows = measured.read(_MEASURED.value) if _MEASURED.value else []
  report = plan(
    flags.FLAGS.config,
    chips.parse(_TOPOLOGY.value),
    slices=_SLICES.value,
    functions=lower.FUNCTIONS if _FUNCTIONS.value is None else _FUNCTIONS.value,
    lengths=_LENGTHS.value,
    speculation=_SPECULATION.value,
    skew=_SKEW.value,
  )
  if rows and report.get("iteration"):
    expected = report["iteration"]["expected"]
    report["measured"] = measured.compare(rows, expected)
  report["config"] = flags.FLAGS["config"].config_filename
  if _JSON.value:
    print(json.dumps(report))
  else:
    print(plan_table.render(report, top=_TOP.value))
  return 0 if report["fits"] else 1


if __name__ == "__main__":
  main()
