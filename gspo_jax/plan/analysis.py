"""Memory, work and time of one compiled function, for JSON.

Bytes, FLOPs and seconds are of one device and one call.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax

from gspo_jax.learner import train_batch, train_step
from gspo_jax.logprobs import WANTED_TOKENS
from gspo_jax.model import experts
from gspo_jax.plan import chips, lower, lower_bounds, pages
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan.hlo import cost as hlo_cost
from gspo_jax.plan.hlo import module as hlo_module
from gspo_jax.plan.hlo import walk as hlo_walk
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program

# The functions that loop over the micro-batches of packed rows.
LEARNING = ("update", "old_logps", "reference_and_values")
_KEPT = 40  # operations
_BUFFERS = 8
# The functions of a continuous sampler; the last two read weights of their own.
_DECODING = ("prefill", "generate")
_CONTINUOUS = ("decode_params", *_DECODING)


def analyze(
  name: str,
  done: plan_compile.Compiled,
  config: Config,
  program: Program,
  where: chips.Slice,
) -> dict:
  """The report of one function of a program.

  Args:
    name: of the function.
    done: what the compiler made of it.
    config: from `config.parse`.
    program: with the function.
    where: what it was compiled for.
  """
  report = {
    "compile_seconds": done.seconds,
    "fits": done.memory is not None,
    "reason": done.reason,
    "buffers": done.buffers[:_BUFFERS],
  }
  if done.memory is not None:
    staleness = config.rollout.max_staleness
    report |= memory(name, done.memory, program, where, staleness)
    if has_pages(name, program):
      report["pages"] = pages.room(
        report["memory"]["needed"],
        where.chip.hbm,
        program.cfg,
        program.sampler.generate,
      )
    report |= _work(name, done.module, config, program, where)
  return report


def sampler_mesh(program: Program) -> jax.sharding.Mesh:
  """The mesh that responses are sampled on."""
  return program.sampler.generate.mesh


def has_pages(name: str, program: Program) -> bool:
  """Whether a function reads or writes the pages of a continuous sampler."""
  return program.sampler.generate.batching is not None and name in _DECODING


def memory(
  name: str,
  compiled: plan_compile.Memory,
  program: Program,
  where: chips.Slice,
  max_staleness: int = 0,
) -> dict:
  """The part of a report that is about memory, and whether it is enough."""
  separate = program.sampler.separate
  if separate and name not in LEARNING:
    # Batches ahead wait with the weights that will sample them, and functions
    # of pages do not have those of their own batch as an argument.
    copies = max_staleness + has_pages(name, program)
    resident = copies * _bytes(separate.weights)
  else:
    resident = _bytes(_unread(name, program.learner.abstract))
    if has_pages(name, program):
      resident += _bytes(program.abstract_policy)
    if separate:
      resident += _bytes(separate.in_transit)
  needed, hbm = compiled.needed + resident, where.chip.hbm
  sizes = {"resident": resident, "needed": needed, "free": hbm - needed}
  report = {"memory": dataclasses.asdict(compiled) | sizes}
  if needed > hbm:
    report["fits"] = False
    report["reason"] = (
      f"{needed / 2**30:.2f} GiB needed, {resident / 2**30:.2f} of it for "
      f"state that {name} does not read, but {hbm / 2**30:.2f} GiB there"
    )
  return report


def _unread(name, state):
  """The part of a state that a function does not read, but that stays."""
  if name in ("update", "old_logps"):
    return None
  moments = state.opt_state, state.critic and state.critic.opt_state
  if name == "reference_and_values":
    return state.params, moments
  return moments, state.reference, state.critic and state.critic.params


def _bytes(tree) -> int:
  """On one device, of a tree of shapes with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def _work(name, module, config, program, where) -> dict:
  """The work at best, with the same by the compiler's estimate in `compiler`.

  There `share` is the part of the operations' time for which it has one.
  """
  cost = functools.partial(_cost, name, module, config, program, where)
  report, _ = cost(by_compiler=False)
  estimate, total = cost(by_compiler=True)
  share = total.roofline_seconds and (
    total.estimated_seconds / total.roofline_seconds
  )
  compiler = {"share": share, "clock": where.chip.clock}
  compiler |= {k: estimate[k] for k in ("seconds", "mfu")}
  if "parts" in estimate:
    compiler["parts"] = estimate["parts"]
  if "decode" in estimate:
    compiler["decode"] = {"seconds": estimate["decode"]["seconds"]}
  return report | {"compiler": compiler}


def _cost(name, module, config, program, where, by_compiler):
  """The report of one of the two estimates, and its cost."""
  walk = functools.partial(
    _walk, name, module, program, where, by_compiler=by_compiler
  )
  report = {}
  if name in LEARNING:
    cost, report["parts"] = _learning(walk, config, program)
  else:
    cost = walk()
  steps = _steps(name, config, program)
  step = _unroll(cost, steps) if steps else None
  if step is not None and name == "generate":
    report["decode"] = _decode(step, steps, config, program, where)
  devices = _mesh_of(name, program).size
  model_flops = _model_flops(name, config, program) / devices
  return report | _summary(cost, model_flops, where), cost


def _walk(
  name, module, program, where, micro_batches=0, by_compiler=False
) -> hlo_cost.HloCost:
  """The cost of a call, with that many micro-batches in each minibatch."""
  mesh = _mesh_of(name, program)
  return hlo_walk.walk(
    module,
    where.chip,
    _bandwidth(mesh, where),
    mesh.size,
    branches={train_step.BACKWARD: name == "update", WANTED_TOKENS: True},
    trips={train_batch.MICRO_BATCHES: micro_batches},
    # Devices that share the experts have room for more rows than the mean.
    filled=1 / experts.SLACK if mesh.shape["expert"] > 1 else 1.0,
    by_compiler=by_compiler,
  )


def _mesh_of(name, program) -> jax.sharding.Mesh:
  return program.mesh if name in LEARNING else sampler_mesh(program)


class Parts(NamedTuple):
  """What a call of a function of `LEARNING` costs a device, in parts.

  A call costs `rest`, and `micro_batch` for each micro-batch that holds
  responses, of all minibatches. Old log-probs leave out the first minibatch
  but for one micro-batch.

  Attributes:
    micro_batch: of an update, forward and backward; of the other functions,
      forward. It does not list what depends on data.
    rest: of an update, all its optimizer steps.
  """

  micro_batch: hlo_cost.HloCost
  rest: hlo_cost.HloCost


def parts(
  name: str, module: hlo_module.Module, program: Program, where: chips.Slice
) -> Parts:
  """The cost of a function of `LEARNING`, by micro-batch.

  Args:
    name: of the function.
    module: compiled.
    program: with the function.
    where: what it was compiled for.
  """
  return _parts(functools.partial(_walk, name, module, program, where), program)


def _parts(walk, program) -> Parts:
  M = program.learner.packing.minibatches
  rest, one = walk(), walk(micro_batches=1)
  micro_batch = hlo_cost.HloCost()
  micro_batch.add(one, 1 / M)
  micro_batch.add(rest, -1 / M)
  micro_batch.loops, micro_batch.branches = [], []
  return Parts(micro_batch, rest)


def _learning(walk, config, program):
  """The cost with one response a row, and the report of its parts.

  Of old log-probs, with those of the first minibatch, as rewards may need them.
  """
  rows, found = program.learner.packing, _parts(walk, program)
  most = config.data.prompts * config.rollout.group_size
  most //= rows.micro_batch_size
  whole = walk(micro_batches=most // rows.minibatches)
  part = lambda cost: {
    "flops": cost.flops,
    "hbm_bytes": cost.hbm_bytes,
    "seconds": _seconds(cost),
  }
  return whole, {
    "micro_batch": part(found.micro_batch),
    "rest": part(found.rest),
    "most_micro_batches": most,
  }


def _steps(name, config, program) -> int:
  """Most trips of the loop whose length depends on data."""
  if not program.sampler.generate.batching:
    return config.sampler.max_new_tokens - 1 if name == "generate" else 0
  chunks = (
    lower.longest(config, program.sampler.generate)
    // config.continuous_batching.prefill_chunk
  )
  return {
    "prefill": chunks,
    "generate": config.continuous_batching.segment_steps,
  }.get(name, 0)


def _unroll(cost, steps) -> hlo_cost.HloCost | None:
  """Makes `cost` count `steps` of its decoding loop; gives one step's cost."""
  loop, listed = hlo_cost.longest_loop(cost)
  if loop is None:
    return None
  others = lambda opened: [o for o in opened if o is not listed]
  cost.loops, cost.branches = others(cost.loops), others(cost.branches)
  summed = 1 if loop is listed else 0
  cost.add(loop.cost, steps - summed)
  return loop.cost


def place(device: jax.Device) -> chips.DeviceCoordinates:
  """Where a device of a topology is."""
  return chips.DeviceCoordinates(
    getattr(device, "slice_index", 0), tuple(device.coords)
  )


def _bandwidth(mesh, where) -> hlo_walk.Bandwidth:
  places = [*map(place, mesh.devices.flat)]

  @functools.cache
  def bandwidth(collective):
    group = [places[n] for n in collective.members]
    return chips.bandwidth(where, group, "to-all" in collective.kind)

  return bandwidth


def _decode(step, steps, config, program, where) -> dict:
  mesh = sampler_mesh(program)
  prompts = config.data.prompts
  cache = {
    "prompts": prompts,
    "rows": prompts * config.rollout.group_size,
    "slots": steps,
    "prompt_slots": config.data.max_prompt_length,
  }
  report = {}
  if program.sampler.generate.batching:
    rows = config.continuous_batching.slots
    tokens = _tokens(program.sampler.generate)
    cache = {"prompts": 0, "rows": rows, "slots": tokens / rows}
    cache["prompt_slots"] = 0
    size = lower_bounds.cache_bytes(program.cfg, tokens) / mesh.size
    # By blocks, a loop as long as data makes it, of which one trip is counted.
    report = {
      "pages_bytes": size,
      "kernel": "paged_attention" in step.unknown_kernels,
    }
    report["pages_seconds"] = size / where.chip.hbm_bandwidth
  least = lower_bounds.decode_bytes(
    program.cfg,
    **cache,
    devices=mesh.size,
    expert=mesh.shape["expert"],
    tensor=mesh.shape["tensor"],
  )
  return report | {
    "steps": steps,
    "hbm_bytes": step.hbm_bytes,
    "least_bytes": least,
    "ratio": step.hbm_bytes / least,
    "least_seconds": least / where.chip.hbm_bandwidth,
    "seconds": _seconds(step),
    "collectives": _collectives(step),
    "top": _top(step),
  }


def _tokens(paged) -> int:
  """Tokens that all pages hold."""
  return paged.sizes.num_pages * paged.sizes.page_size * paged.shards


def _continuous_flops(name, config, program) -> float:
  """FLOPs of a part of a continuous sampler, with full pages."""
  cfg, paged = program.cfg, program.sampler.generate
  if name == "decode_params":
    return 0.0
  if name == "prefill":
    T = lower.longest(config, paged)
    return lower_bounds.forward_flops(
      cfg, paged.prefill_batch(T) * paged.shards, T, 0
    )
  rows = paged.batching.slots
  past = _tokens(paged) / rows
  one = lower_bounds.forward_flops(cfg, rows, 1, 1, past=past)
  return paged.batching.segment_steps * one


def _model_flops(name, config, program) -> float:
  if program.sampler.generate.batching and name in _CONTINUOUS:
    return _continuous_flops(name, config, program)
  P, S = config.data.prompts, config.data.max_prompt_length
  B, R = P * config.rollout.group_size, config.sampler.max_new_tokens
  if name == "generate":
    prefill = lower_bounds.forward_flops(program.cfg, P, S, 1)
    return prefill + lower_bounds.forward_flops(
      program.cfg, B, R - 1, R - 1, past=S
    )
  forward = lower_bounds.forward_flops(program.cfg, B, S + R, R)
  critic = 0.0  # without its head, which is a vector
  if program.learner.abstract.critic is not None:
    critic = lower_bounds.forward_flops(program.cfg, B, S + R, 0)
  if name == "reference_and_values":
    return critic + (
      forward if program.learner.abstract.reference is not None else 0.0
    )
  if name == "update":
    return lower_bounds.update_passes(program.cfg) * (forward + critic)
  return forward


def _summary(cost, model_flops, where) -> dict:
  seconds, ideal_seconds = _seconds(cost), model_flops / where.chip.flops
  return {
    "model_flops": model_flops,
    "flops": cost.flops,
    "attention_flops": cost.attention_flops,
    "padding_flops": cost.padding_flops,
    "hbm_bytes": cost.hbm_bytes,
    "seconds": seconds,
    "mfu": {
      k: ideal_seconds / seconds[k] for k in ("perfect", "scheduled", "serial")
    },
    "collectives": _collectives(cost),
    "top": _top(cost),
    "unknown_kernels": dict(cost.unknown_kernels),
    "loops": _open(cost.loops),
    "branches": _open(cost.branches),
  }


def _seconds(cost) -> dict:
  return {
    "roofline": cost.roofline_seconds,
    "collectives": cost.collective_seconds,
    "stalled": cost.stalled_seconds,
    "perfect": cost.perfect_overlap,
    "scheduled": cost.scheduled,
    "serial": cost.no_overlap,
  }


def _collectives(cost) -> list[dict]:
  found = [
    {
      "kind": kind,
      "group": size,
      "asynchronous": asynchronous,
      **dataclasses.asdict(traffic),
    }
    for (kind, size, asynchronous), traffic in cost.collectives.items()
  ]
  return sorted(found, key=lambda c: -c["seconds"])


def _top(cost) -> list[dict]:
  """The operations that take longest, by either estimate."""
  longest = lambda item: -max(item[1].seconds, item[1].compiler_seconds)
  ranked = sorted(cost.by_source.items(), key=longest)
  return [
    {"source": source} | operation._asdict()
    for source, operation in ranked[:_KEPT]
  ]


def _open(opened: list[hlo_cost.DataDependent]) -> list[dict]:
  """By their source: how often they are met, and the seconds of the longest."""
  found = {}
  for o in opened:
    entry = found.setdefault(o.source, {"times": 0, "seconds": 0.0})
    entry["times"] += o.times
    entry["seconds"] = max(entry["seconds"], o.cost.no_overlap)
  return [{"source": source, **entry} for source, entry in found.items()]
