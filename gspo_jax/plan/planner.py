"""Compiles the functions of a config for TPUs or GPUs, and costs them."""

import sys
from collections.abc import Sequence

import jax

from gspo_jax.plan import chips, lower, roofline
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan import memory as plan_memory
from gspo_jax.plan import skew as plan_skew
from gspo_jax.plan.derates import Derates
from gspo_jax.plan.iteration import cost as iteration_cost
from gspo_jax.plan.iteration import lengths as plan_lengths
from gspo_jax.program import settings
from gspo_jax.program.config import ConfigDict, parse
from gspo_jax.program.functions import Program, build_program
from gspo_jax.record.progress import Progress
from gspo_jax.runtime.errors import UserError, nearest

FUNCTIONS = lower.FUNCTIONS
_BUFFERS = 8  # how many of the largest are listed


def plan(
  config: ConfigDict,
  topology: chips.Topology,
  *,
  slices: int = 1,
  functions: Sequence[str] = FUNCTIONS,
  lengths: str = "",
  speculation: float = 1.0,
  skew: str = "",
) -> dict:
  """Compiles and costs `functions`; returns the report that `--json` prints.

  `lengths` (see `plan.iteration.lengths`) adds the cost of an iteration,
  whose steps with drafts add `speculation` tokens to a response, and whose
  experts are as uneven as `skew` says (see `plan.skew`). Raises UserError if
  the compiler is missing, an argument is invalid, or the config cannot work on
  the topology.
  """
  if slices < 1:
    raise UserError(f"--slices={slices}: expected at least 1")
  for name in functions or [""]:
    if name not in FUNCTIONS:
      raise UserError(f"--functions={name}: {nearest(name, FUNCTIONS)}")
  if lengths and set(functions) != set(FUNCTIONS):
    raise UserError(
      f"--functions={','.join(functions)}: expected all of them, the default, "
      "with --lengths"
    )
  compiler = plan_compile.prepare(topology.platform)
  config = parse(config)
  drafts = config.continuous_batching.speculation
  if not 1 <= speculation <= 1 + drafts:
    raise UserError(
      f"--speculation={speculation:g}: expected the tokens of a step, from 1 "
      f"to 1 + continuous_batching.speculation={drafts}"
    )
  mesh, sampler_devices = settings.make_meshes(
    config, plan_compile.devices(topology, slices)
  )
  program = build_program(config, mesh, sampler_devices=sampler_devices)
  plan_memory.reward_model_bytes(config, mesh)  # raises before it compiles
  derates = Derates()
  if skew:
    derates = derates._replace(skew=plan_skew.parse(skew, program.cfg))
  transfer = _transfer(program, topology) if sampler_devices else None
  drawn = lengths and plan_lengths.draw(lengths, config, program.tokenizer)
  planned = lower.Planned(config, program, topology)
  results = _analyze(functions, planned, fewer_slots=bool(lengths))
  _add_advice(results, program)
  fits = all(result["fits"] for result in results.values())
  iteration = None
  if drawn and fits:
    print("scheduling an iteration ...", file=sys.stderr, flush=True)
    with Progress("scheduling", file=sys.stderr):
      iteration = iteration_cost.cost(
        results, planned, drawn, derates, transfer, speculation
      )
  return {
    "topology": str(topology),
    "slices": slices,
    "devices": mesh.size + len(sampler_devices),
    "mesh": dict(mesh.shape),
    "sampler_mesh": dict(program.sampler.generate.mesh.shape),
    "jax": jax.__version__,
    "compiled_by": compiler,
    "note": topology.note,
    "hbm": topology.chip.hbm,
    "functions": results,
    "fits": fits,
    **({"transfer": transfer} if transfer else {}),
    **({"lengths": lengths, "iteration": iteration} if lengths else {}),
  }


def _analyze(functions, planned: lower.Planned, *, fewer_slots=False) -> dict:
  config, program, topology = planned
  lowered = lower.functions(config, program, fewer_slots=fewer_slots)
  absent = [name for name in functions if name not in lowered]
  if absent and set(functions) != set(FUNCTIONS):
    raise UserError(
      f"--functions={','.join(functions)}: this config has no "
      f"{' and no '.join(absent)}; choose of {', '.join(lowered)} "
      "(decode_params and prefill come with continuous_batching.slots, "
      "reference_and_values with objective.kl_coef or ppo, old_logps with "
      "several learner.minibatches)"
    )
  results, done = {}, {}
  for name in functions:
    if name not in lowered:  # no reference and no critic, or no pages
      continue
    program_id = id(lowered[name])
    if program_id not in done:
      done[program_id] = _compile(name, lowered[name], topology)
    results[name] = _report(name, done[program_id], planned)
  if "generate" in results:
    _add_fewer_slots(results["generate"], lowered, planned)
  return results


def _add_fewer_slots(report, lowered, planned):
  """Adds the steps of segments that compute fewer slots, by their number.

  Of a step, the seconds without reading the cache, and those of reading it.
  """
  steps = report["fewer_slots"] = {}
  for name, one in lowered.items():
    _, _, slots = name.partition("generate ")
    if not slots:
      continue
    done = _compile(f"{name} slots", one, planned.topology)
    if done.memory is None:
      report |= {"fits": False, "reason": f"{slots} slots: {done.reason}"}
      return
    work = roofline.work("generate", done, planned)
    compiler = work["compiler"]
    steps[int(slots)] = {
      "without_cache": work["decode"]["without_cache"],
      "compiler": compiler and compiler["decode"]["without_cache"],
      "reading": work["decode"]["reading"],
    }


def _report(name, done, planned) -> dict:
  config, program, topology = planned
  report = {
    "compile_seconds": done.seconds,
    "fits": done.memory is not None,
    "reason": done.reason,
    "buffers": done.buffers[:_BUFFERS],
  }
  beside = plan_memory.resident(
    name,
    program,
    config.rollout.max_staleness,
    plan_memory.reward_model_bytes(config, program.mesh),
  )
  needed = done.too_much and done.too_much + beside
  if done.memory:
    report |= plan_memory.memory(name, done.memory, beside, topology)
    report |= roofline.work(name, done, planned)
    needed = report["memory"]["needed"]
  if lower.has_pages(name, program) and needed:
    report["pages"] = plan_memory.room(
      needed, topology.chip.hbm, program.cfg, program.sampler.generate
    )
  return report


def _transfer(program, topology) -> dict:
  """The least bytes and seconds to send weights to a separate sampler."""
  size = plan_memory.array_bytes(program.sampler.separate.weights)
  here, there = (
    [*map(roofline.place, m.devices.flat)]
    for m in (program.mesh, program.sampler.mesh)
  )
  total = size * len(there)
  return {
    "bytes_per_device": size,
    "seconds": total / topology.bandwidth_between(here, there),
  }


def _compile(label: str, lowered, topology) -> plan_compile.Compiled:
  print(f"compiling {label} ...", file=sys.stderr, flush=True)
  with Progress(f"compiling {label}", file=sys.stderr):
    return plan_compile.compile_one(lowered, topology.platform)


def _add_advice(results: dict, program: Program) -> None:
  """Reports one room for all functions, and advises the largest pool."""
  with_pages = [result for result in results.values() if "pages" in result]
  least = min(
    (result["pages"] for result in with_pages),
    key=lambda room: room["largest"],
    default=None,
  )
  for result in with_pages:
    result["pages"] = least
    if not result["fits"]:
      result["reason"] += f"; {plan_memory.advice(least)}"
  # No pool is small enough where the states of the slots take too much.
  cfg, generate = program.cfg, program.sampler.generate
  for name, result in results.items():
    if result["fits"] or not lower.has_pages(name, program):
      continue
    if size := plan_memory.state_bytes(cfg, generate):
      result["reason"] += (
        f"; continuous_batching.slots={generate.batching.slots}: their states "
        f"take {size / 2**30:.2f} GiB of a device"
      )
