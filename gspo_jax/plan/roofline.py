"""Work and time of one compiled function, for JSON.

Bytes, FLOPs and seconds are of one device and one call.
"""

import dataclasses
import functools

import jax

from gspo_jax.learner import train_batch, train_step
from gspo_jax.logprobs import WANTED_TOKENS
from gspo_jax.model import experts
from gspo_jax.plan import chips, hlo, lower, lower_bounds
from gspo_jax.plan.lower import LEARNING, sampler_mesh
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program

_TOP = 40  # operations that are listed


def work(
  name: str, text: str, config: Config, program: Program, tpu_slice: chips.Slice
) -> dict:
  """The work of a function with its time at best.

  `compiler` has the same times by the compiler's estimate; `share` is the part
  of the operations' time for which it states one.

  Args:
    name: of the function.
    text: libtpu's dump of it.
    config: of the run.
    program: with the function.
    tpu_slice: what it was compiled for.
  """
  report, _ = _cost(name, text, config, program, tpu_slice, by_compiler=False)
  estimate, total = _cost(
    name, text, config, program, tpu_slice, by_compiler=True
  )
  share = total.roofline_seconds and (
    total.estimated_seconds / total.roofline_seconds
  )
  compiler = {"share": share, "clock": tpu_slice.chip.clock}
  compiler |= {k: estimate[k] for k in ("seconds", "mfu")}
  if "parts" in estimate:
    compiler["parts"] = estimate["parts"]
  if "decode" in estimate:
    compiler["decode"] = {"seconds": estimate["decode"]["seconds"]}
  return report | {"compiler": compiler}


def _cost(name, text, config, program, tpu_slice, by_compiler):
  """The report by one of the two estimates, and its cost."""
  mesh = program.mesh if name in LEARNING else sampler_mesh(program)

  def cost_of(micro_batches=0) -> hlo.HloCost:
    """Of a call with that many micro-batches in each minibatch."""
    return hlo.cost_of(
      text,
      tpu_slice.chip,
      _bandwidth(mesh, tpu_slice),
      mesh.size,
      branches={train_step.BACKWARD: name == "update", WANTED_TOKENS: True},
      trips={train_batch.MICRO_BATCHES: micro_batches},
      # Devices that share the experts have room for more rows than the mean.
      filled=1 / experts.SLACK if mesh.shape["expert"] > 1 else 1.0,
      by_compiler=by_compiler,
    )

  report = {}
  if name in LEARNING:
    cost, report["parts"] = _learning(cost_of, config, program)
  else:
    cost = cost_of()
  steps = _steps(name, config, program)
  step = _unroll(cost, steps) if steps else None
  if step is not None and name == "generate":
    report["decode"] = _decode(step, steps, config, program, tpu_slice)
  model_flops = _model_flops(name, config, program) / mesh.size
  return report | _summary(cost, model_flops, tpu_slice), cost


def _learning(cost_of, config, program):
  """The cost with one response a row, and the report of its parts.

  A call costs `rest`, and `micro_batch` for each micro-batch that holds
  responses, of all minibatches. Old log-probs include the first minibatch, as
  rewards may need them.
  """
  rows = program.learner.packing
  rest, one = cost_of(), cost_of(micro_batches=1)
  micro_batch = hlo.HloCost()
  micro_batch.add(one, 1 / rows.minibatches)
  micro_batch.add(rest, -1 / rows.minibatches)
  responses = config.data.prompts * config.rollout.group_size
  micro_batches = responses // rows.micro_batch_size
  whole = cost_of(micro_batches=micro_batches // rows.minibatches)
  part = lambda cost: {
    "flops": cost.flops,
    "hbm_bytes": cost.hbm_bytes,
    "seconds": _seconds(cost),
  }
  return whole, {
    "micro_batch": part(micro_batch),
    "rest": part(rest),
    "most_micro_batches": micro_batches,
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


def _unroll(cost, steps) -> hlo.HloCost | None:
  """Makes `cost` count `steps` of its decoding loop; gives one step's cost."""
  longest = cost.longest_loop()
  if longest is None:
    return None
  loop, listed = longest
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


def _bandwidth(mesh, tpu_slice):
  places = [*map(place, mesh.devices.flat)]

  @functools.cache
  def bandwidth(members, to_all):
    return chips.bandwidth(tpu_slice, [places[n] for n in members], to_all)

  return bandwidth


def _decode(step, steps, config, program, tpu_slice) -> dict:
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
    tokens = lower.cached_tokens(config, program)
    cache = {"prompts": 0, "rows": rows, "slots": tokens / rows}
    cache["prompt_slots"] = 0
    size = lower_bounds.cache_bytes(program.cfg, tokens) / mesh.size
    # Without the TPU kernel the pages are read in a loop of data-dependent
    # length, counted once.
    report = {
      "pages_bytes": size,
      "kernel": "paged_attention" in step.unknown_kernels,
    }
    report["pages_seconds"] = size / tpu_slice.chip.hbm_bandwidth
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
    "least_seconds": least / tpu_slice.chip.hbm_bandwidth,
    "seconds": _seconds(step),
    "collectives": _collectives(step),
    "top": _top(step),
  }


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
  past = lower.cached_tokens(config, program) / rows
  one = lower_bounds.forward_flops(cfg, rows, 1, 1, past=past)
  return paged.batching.segment_steps * one


def _model_flops(name, config, program) -> float:
  if program.sampler.generate.batching and name not in LEARNING:
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


def _summary(cost, model_flops, tpu_slice) -> dict:
  seconds, ideal_seconds = _seconds(cost), model_flops / tpu_slice.chip.flops
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
  kinds = [
    {
      "kind": kind,
      "group": size,
      "asynchronous": asynchronous,
      **dataclasses.asdict(traffic),
    }
    for (kind, size, asynchronous), traffic in cost.collectives.items()
  ]
  return sorted(kinds, key=lambda c: -c["seconds"])


def _top(cost) -> list[dict]:
  """The operations that take longest, by either estimate."""
  longest = lambda item: -max(item[1].seconds, item[1].compiler_seconds)
  ranked = sorted(cost.by_source.items(), key=longest)
  return [
    {"source": source} | operation._asdict()
    for source, operation in ranked[:_TOP]
  ]


def _open(opened) -> list[dict]:
  """By their source: how often they are met, and the seconds of the longest."""
  entries = {}
  for o in opened:
    entry = entries.setdefault(o.source, {"times": 0, "seconds": 0.0})
    entry["times"] += o.times
    entry["seconds"] = max(entry["seconds"], o.cost.no_overlap)
  return [{"source": source, **entry} for source, entry in entries.items()]
