"""Compiles a config's real functions for a TPU slice, with no TPU at hand.

  python -m gspo_jax.plan --config=configs/moe_tpu_v5.py --topology=v5p:4x4x4

It takes a command line of gspo_jax.main as it stands (a workdir is not used)
and prints, per function, whether it fits and what it would take at best: a
compiler's roofline, for nothing runs. gspo_jax/hlo/walk.py says what is counted
and how. Of `generate`, whose length only data decides, it tells one decode step
at the longest cache, and the whole as if every answer were of full length and
every step as long as that one. With `paging.slots`, `generate` is a segment,
its steps told with every page full; `prefill` stores the longest prompts, and
`lay_out` prepares the weights once a batch. `score` and `update` are one
program and take the same memory; the time of `score` is that of all
minibatches, though of the first a run scores one micro-batch only.

Exit codes: 0 all fit; 1 one does not; 2 a mistake of the caller's, in one line;
3 a fault, with its traceback.
"""

import json
import sys
import traceback

import jax
from absl import app, flags

from gspo_jax import aot, chips, plan_lower, plan_report, plan_table
from gspo_jax.program import command
from gspo_jax.program import functions as program_functions
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError, nearest

NOTE = "compiler roofline, nothing ran on a chip"
FUNCTIONS = plan_lower.FUNCTIONS

_TOPOLOGY = flags.DEFINE_string(
  "topology", None, "A TPU slice: v5e:4x4, v5p:4x4x4, v6e:8x8, tpu7x:2x2x1."
)
_SLICES = flags.DEFINE_integer("slices", 1, "How many of them.")
_FUNCTIONS = flags.DEFINE_list(
  "functions", [*FUNCTIONS], "Those to compile; each takes up to minutes."
)
_TOP = flags.DEFINE_integer("top", 0, "Show the N most expensive operations.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead.")


def main() -> None:
  """The console's entry."""
  try:
    app.run(_command, flags_parser=_parse)
  except UserError as error:
    sys.exit(command.complain(error))
  except Exception:  # Python's own exit code is 1, which says "does not fit"
    traceback.print_exc()
    sys.exit(3)


def _parse(argv):
  return command.parse(
    argv,
    "python -m gspo_jax.plan --config=configs/tiny_cpu.py --topology=v5e:4x4",
  )


def _command(argv) -> int:
  report = plan(
    flags.FLAGS.config,
    chips.parse(_TOPOLOGY.value),
    slices=_SLICES.value,
    functions=_FUNCTIONS.value,
  )
  report["config"] = flags.FLAGS["config"].config_filename
  if _JSON.value:
    print(json.dumps(report))
  else:
    print(plan_table.render(report, top=_TOP.value))
  return 0 if report["fits"] else 1


def plan(config, where: chips.Slice, *, slices=1, functions=FUNCTIONS) -> dict:
  """Compiles and costs `functions`; what `--json` prints.

  Raises:
    UserError: no libtpu, no such slice or function, or a config that cannot
      work there.
  """
  for name in functions or [""]:
    if name not in FUNCTIONS:
      raise UserError(f"--functions={name}: {nearest(name, FUNCTIONS)}")
  if slices < 1:
    raise UserError(f"--slices={slices}: expected at least 1")
  libtpu = aot.prepare()
  mesh = sharding.make_mesh(aot.devices(where, slices), **config.mesh)
  made = program_functions.build(config, mesh)
  lowered = plan_lower.functions(config, made)
  results, done = {}, {}
  for name in functions:
    if name not in lowered:  # no reference and no critic, or no pages
      continue
    program_id = id(lowered[name])
    if program_id not in done:
      print(f"compiling {name} ...", file=sys.stderr, flush=True)
      done[program_id] = aot.compile_one(lowered[name])
    results[name] = plan_report.function(
      name, done[program_id], config, made, where
    )
  return {
    "topology": str(where),
    "slices": slices,
    "devices": mesh.size,
    "mesh": dict(mesh.shape),
    "sampler_mesh": dict(plan_report.decoding(made).shape),
    "jax": jax.__version__,
    "libtpu": libtpu,
    "note": NOTE,
    "hbm": where.chip.hbm,
    "functions": results,
    "fits": all(result["fits"] for result in results.values()),
  }


if __name__ == "__main__":
  main()
