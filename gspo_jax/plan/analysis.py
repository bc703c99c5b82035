"""What a plan says of one function: memory, work and time, for JSON.

Bytes, FLOPs and seconds are of one device and one call.
"""

import dataclasses
import functools
import math

import jax

from gspo_jax.learner import train_step
from gspo_jax.plan import chips, lower, lower_bounds
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan.hlo import cost as hlo_cost
from gspo_jax.plan.hlo import walk as hlo_walk
from gspo_jax.program.functions import Program
from gspo_jax.sampler.continuous import ContinuousSampler

_KEPT = 40  # operations
_BUFFERS = 8
_LAID_OUT = ("prefill", "generate")  # with pages, these read other weights
_REFILL = ("lay_out", *_LAID_OUT)


def analyze(
  name: str,
  done: plan_compile.Compiled,
  config,
  made: Program,
  where: chips.Slice,
) -> dict:
  """The report of one function of a program.

  Args:
    name: of the function.
    done: what the compiler made of it.
    config: all the keys of configs/common.py.
    made: the program.
    where: what it was compiled for.
  """
  report = {
    "compile_seconds": done.seconds,
    "fits": done.memory is not None,
    "reason": done.reason,
    "buffers": done.buffers[:_BUFFERS],
  }
  if done.memory is not None:
    report |= _memory(name, done.memory, made, where)
    report |= _work(name, done.module, config, made, where)
  return report


def decoding(made: Program) -> jax.sharding.Mesh:
  """Where answers are drawn."""
  paged = isinstance(made.generate, ContinuousSampler)
  return (made.generate.jitted.decode if paged else made.generate).mesh


def _memory(name, memory, made, where) -> dict:
  resident = _bytes(_unread(name, made.abstract))
  if isinstance(made.generate, ContinuousSampler) and name in _LAID_OUT:
    resident += _bytes(made.abstract.params)
  needed, hbm = memory.needed + resident, where.chip.hbm
  sizes = {"resident": resident, "needed": needed, "free": hbm - needed}
  report = {"memory": dataclasses.asdict(memory) | sizes}
  if needed > hbm:
    report["fits"] = False
    report["reason"] = (
      f"{needed / 2**30:.2f} GiB needed, {resident / 2**30:.2f} of it for "
      f"state that {name} does not read, but {hbm / 2**30:.2f} GiB there"
    )
  return report


def _unread(name, state):
  """What of a state stays on the devices while a function runs without it."""
  if name in ("update", "score"):
    return None
  moments = state.opt_state, state.critic and state.critic.opt_state
  if name == "appraise":
    return state.params, moments
  return moments, state.reference, state.critic and state.critic.params


def _bytes(tree) -> int:
  """On one device, of a tree of shapes with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def _work(name, module, config, made, where) -> dict:
  cost = hlo_walk.walk(
    module,
    where.chip,
    _bandwidth(made.mesh, where),
    made.mesh.size,
    branches={
      train_step.BACKWARD: name == "update",
      train_step.SCORES: name == "score",
    },
  )
  report = {}
  steps = _steps(name, config, made)
  step = _unroll(cost, steps) if steps else None
  if step is not None and name == "generate":
    report["decode"] = _decode(step, steps, config, made, where)
  model_flops = _model_flops(name, config, made) / made.mesh.size
  return report | _summary(cost, model_flops, where)


def _steps(name, config, made) -> int:
  """Trips of the function's loop that data decides, at most."""
  if not isinstance(made.generate, ContinuousSampler):
    return config.sampler.max_new_tokens - 1 if name == "generate" else 0
  chunks = (
    lower.longest(config, made.generate)
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


def _bandwidth(mesh, where) -> hlo_walk.Bandwidth:
  places = [
    chips.DeviceCoordinates(getattr(d, "slice_index", 0), tuple(d.coords))
    for d in mesh.devices.flat
  ]

  @functools.cache
  def bandwidth(collective):
    group = [places[n] for n in collective.members]
    return chips.bandwidth(where, group, "to-all" in collective.kind)

  return bandwidth


def _decode(step, steps, config, made, where) -> dict:
  group = decoding(made).shape
  prompts = config.data.prompts
  cache = {
    "prompts": prompts,
    "rows": prompts * config.rollout.group_size,
    "slots": steps,
    "prompt_slots": config.data.max_prompt_length,
  }
  report = {}
  if isinstance(made.generate, ContinuousSampler):
    rows = config.continuous_batching.slots
    tokens = _tokens(made.generate)
    cache = {"prompts": 0, "rows": rows, "slots": tokens / rows}
    cache["prompt_slots"] = 0
    size = lower_bounds.cache_bytes(made.cfg, tokens) / made.mesh.size
    # By blocks, a loop as long as data makes it, of which one trip is counted.
    report = {"pages_bytes": size, "kernel": "paged_attention" in step.unknown}
    report["pages_seconds"] = size / where.chip.hbm_bandwidth
  least = lower_bounds.decode_bytes(
    made.cfg,
    **cache,
    devices=made.mesh.size,
    expert=group["expert"],
    tensor=group["tensor"],
  )
  return report | {
    "steps": steps,
    "hbm_bytes": step.hbm,
    "least_bytes": least,
    "ratio": step.hbm / least,
    "least_seconds": least / where.chip.hbm_bandwidth,
    "seconds": _seconds(step),
    "collectives": _collectives(step),
    "top": _top(step),
  }


def _tokens(paged) -> int:
  """Those that all pages hold."""
  return paged.sizes.num_pages * paged.sizes.page_size * paged.shards


def _refill_flops(name, config, made) -> float:
  """Of what a `PagedSampler` calls, its pages full."""
  cfg, paged = made.cfg, made.generate
  if name == "lay_out":
    return 0.0
  if name == "prefill":
    T = lower.longest(config, paged)
    return lower_bounds.forward_flops(
      cfg, paged.prefill_batch(T) * paged.shards, T, 0
    )
  rows = paged.paging.slots
  past = _tokens(paged) / rows
  one = lower_bounds.forward_flops(cfg, rows, 1, 1, past=past)
  return paged.paging.segment_steps * one


def _model_flops(name, config, made) -> float:
  if isinstance(made.generate, ContinuousSampler) and name in _REFILL:
    return _refill_flops(name, config, made)
  P, S = config.data.prompts, config.data.max_prompt_length
  B, R = P * config.rollout.group_size, config.sampler.max_new_tokens
  if name == "generate":
    prefill = lower_bounds.forward_flops(made.cfg, P, S, 1)
    return prefill + lower_bounds.forward_flops(
      made.cfg, B, R - 1, R - 1, past=S
    )
  forward = lower_bounds.forward_flops(made.cfg, B, S + R, R)
  judge = 0.0  # a critic's head is a vector
  if made.abstract.critic is not None:
    judge = lower_bounds.forward_flops(made.cfg, B, S + R, 0)
  if name == "appraise":
    return judge + (forward if made.abstract.reference is not None else 0.0)
  return 3 * (forward + judge) if name == "update" else forward


def _summary(cost, model_flops, where) -> dict:
  seconds, ideal_seconds = _seconds(cost), model_flops / where.chip.flops
  return {
    "model_flops": model_flops,
    "flops": cost.flops,
    "attention_flops": cost.attention,
    "hbm_bytes": cost.hbm,
    "seconds": seconds,
    "mfu": {
      k: ideal_seconds / seconds[k] for k in ("perfect", "scheduled", "serial")
    },
    "collectives": _collectives(cost),
    "top": _top(cost),
    "unknown_kernels": dict(cost.unknown),
    "loops": _open(cost.loops),
    "branches": _open(cost.branches),
  }


def _seconds(cost) -> dict:
  return {
    "roofline": cost.seconds,
    "collectives": cost.wire_seconds,
    "stalled": cost.stalled,
    "perfect": cost.perfect,
    "scheduled": cost.scheduled,
    "serial": cost.serial,
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
  """The operations that take longest."""
  ranked = sorted(cost.by_source.items(), key=lambda item: -item[1][0])
  return [
    {"source": source, "seconds": s, "flops": f, "hbm_bytes": b}
    for source, (s, f, b) in ranked[:_KEPT]
  ]


def _open(opened: list[hlo_cost.Open]) -> list[dict]:
  """By their source: how often they are met, and the seconds of the longest."""
  found = {}
  for o in opened:
    entry = found.setdefault(o.source, {"times": 0, "seconds": 0.0})
    entry["times"] += o.times
    entry["seconds"] = max(entry["seconds"], o.cost.serial)
  return [{"source": source, **entry} for source, entry in found.items()]
