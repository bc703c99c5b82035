"""Work and time of one compiled function, for JSON.

Bytes, FLOPs and seconds are of one device and one call.
"""

import dataclasses
import functools

import jax

from gspo_jax.learner import reference_pass, train_batch, train_step
from gspo_jax.logprobs import WANTED_TOKENS
from gspo_jax.model import experts, paged_kernel
from gspo_jax.plan import chips, hlo, lower_bounds
from gspo_jax.plan.compile import Compiled
from gspo_jax.plan.lower import LEARNING, Planned
from gspo_jax.runtime import sharding

_TOP = 40  # how many operations are listed


def work(name: str, done: Compiled, planned: Planned) -> dict:
  """The work of a compiled function, and its time at best.

  `compiler` has the times by the compiler's estimate; its `share` is the part
  of the operations' time that the compiler states. It is None for a GPU.
  """
  report, _ = _cost(name, done, planned, by_compiler=False)
  clock = planned.topology.chip.clock
  if clock is None:
    return report | {"compiler": None}
  estimate, total = _cost(name, done, planned, by_compiler=True)
  share = total.roofline_seconds and (
    total.estimated_seconds / total.roofline_seconds
  )
  keys = [k for k in ("seconds", "mfu", "parts") if k in estimate]
  compiler = {"share": share, "clock": clock} | {k: estimate[k] for k in keys}
  if "decode" in estimate:
    decode = estimate["decode"]
    compiler["decode"] = {k: decode[k] for k in ("seconds", "without_cache")}
  return report | {"compiler": compiler}


def _cost(name, done, planned, by_compiler):
  _, program, topology = planned
  mesh = program.mesh if name in LEARNING else program.sampler.generate.mesh
  bandwidth, latency = _links(mesh, topology)

  def cost_of(micro_batches=0) -> hlo.HloCost:
    return hlo.cost_of(
      done.text,
      topology.chip,
      bandwidth,
      mesh.size,
      latency=latency,
      kernels=done.kernels,
      block_pages=paged_kernel.block_pages,
      branches={
        train_step.BACKWARD: name == "update",
        reference_pass.TEACHERS: True,
        WANTED_TOKENS: True,
      },
      trips={train_batch.MICRO_BATCHES: micro_batches},
      # With expert parallelism, buffers hold more rows than the mean load.
      filled=1 / experts.SLACK if mesh.shape["expert"] > 1 else 1.0,
      by_compiler=by_compiler,
    )

  report = {}
  if name in LEARNING:
    cost, report["parts"] = _learning(cost_of, planned)
  else:
    cost = cost_of()
  steps = _steps(name, planned)
  step = _unroll(cost, steps) if steps else None
  if step is not None and name == "generate":
    report["decode"] = _decode(step, steps, planned)
  model_flops = _model_flops(name, planned) / mesh.size
  return report | _summary(cost, model_flops, topology), cost


def _learning(cost_of, planned):
  """The cost with one response a row, and the report of its parts.

  A call costs `rest`, plus `micro_batch` for each micro-batch with responses.
  """
  rows = planned.program.learner.packing
  rest, one = cost_of(), cost_of(micro_batches=1)
  micro_batch = hlo.HloCost()
  micro_batch.add(one, 1 / rows.minibatches)
  micro_batch.add(rest, -1 / rows.minibatches)
  micro_batches = planned.responses // rows.micro_batch_size
  whole = cost_of(micro_batches=micro_batches // rows.minibatches)
  part = lambda cost: {
    "flops": cost.flops,
    "hbm_bytes": cost.hbm_bytes,
    "seconds": _seconds(cost),
    "block_seconds": cost.block_seconds,
  }
  return whole, {
    "micro_batch": part(micro_batch),
    "rest": part(rest),
    "most_micro_batches": micro_batches,
  }


def _steps(name, planned) -> int:
  """The largest trip count of the loop whose length depends on data."""
  config, program, _ = planned
  batching = config.continuous_batching
  if name == "prefill":
    return planned.longest // batching.prefill_chunk
  if name != "generate":
    return 0
  if program.sampler.generate.batching:
    return batching.segment_steps
  return config.sampler.max_new_tokens - 1


def _unroll(cost, steps) -> hlo.HloCost | None:
  """Makes `cost` count `steps` decode steps; returns the cost of one."""
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
  return chips.DeviceCoordinates(
    getattr(device, "slice_index", 0), tuple(device.coords)
  )


def _links(mesh, topology):
  """Bandwidth and latency between devices of the mesh, by their numbers."""
  places = [*map(place, mesh.devices.flat)]
  group = lambda members: [places[n] for n in members]
  return (
    functools.cache(lambda m, to_all: topology.bandwidth(group(m), to_all)),
    functools.cache(lambda m: topology.latency(group(m))),
  )


def _decode(step, steps, planned) -> dict:
  """The report of a decode step.

  `reading` has the seconds to read a row and a block, `without_cache` those of
  the rest. Without a kernel for a TPU, only the bytes of the blocks count.
  """
  _, program, topology = planned
  generate, chip = program.sampler.generate, topology.chip
  mesh, tokens = generate.mesh, planned.cached_tokens
  rows, tensor = planned.decode_rows, mesh.shape["tensor"]
  size = lower_bounds.cache_bytes(program.cfg, tokens, rows=rows, tensor=tensor)
  size /= mesh.size
  full, kernel = size / chip.hbm_bandwidth, step.reading
  # Without a kernel the pages are read in a loop of data-dependent length,
  # counted once.
  has_kernel = "paged_attention" in step.unknown_kernels
  if kernel.block:
    reading, counted = {"row": kernel.row, "block": kernel.block}, kernel.full
  else:
    shards = sharding.batch_shards(mesh)
    block = full / (tokens / shards)  # without pages: of one token
    block *= generate.sizes.page_size if generate.batching else 1
    reading = {"row": 0.0, "block": block}
    counted = full if has_kernel or not generate.batching else 0.0
  report = {}
  if generate.batching:
    report = {
      "pages_bytes": size,
      "kernel": has_kernel,
      "pages_seconds": full,
      "move": _move(generate, program.cfg, topology),
    }
  least = lower_bounds.decode_bytes(
    program.cfg,
    rows=rows,
    tokens=tokens,
    devices=mesh.size,
    expert=mesh.shape["expert"],
    tensor=tensor,
  )
  return report | {
    "steps": steps,
    "without_cache": max(step.scheduled - counted, 0.0),
    "reading": reading,
    "hbm_bytes": step.hbm_bytes,
    "least_bytes": least,
    "ratio": step.hbm_bytes / least,
    "least_seconds": least / chip.hbm_bandwidth,
    "seconds": _seconds(step),
  }


def _move(sampler, cfg, topology) -> float:
  """Seconds of a call that moves pages between shards: two all-to-alls."""
  mesh, sizes = sampler.mesh, sampler.sizes
  tokens = sizes.pages_per_slot * sizes.page_size  # that each shard may send
  size = lower_bounds.cache_bytes(cfg, tokens) / mesh.shape["tensor"]
  bandwidth, _ = _links(mesh, topology)
  return 2 * size / bandwidth(range(mesh.size), True)


def _model_flops(name, planned) -> float:
  """Model FLOPs of a call; the pages of a continuous sampler are full."""
  config, program, _ = planned
  flops = functools.partial(lower_bounds.forward_flops, program.cfg)
  P, S = config.data.prompts, config.data.max_prompt_length
  B, R = planned.responses, config.sampler.max_new_tokens
  sampler, state = program.sampler.generate, program.learner.abstract
  if name == "decode_params":
    return 0.0
  if name == "prefill":
    T = planned.longest
    return flops(sampler.prefill_batch(T) * sampler.shards, T, 0)
  if name == "generate" and sampler.batching:
    rows = sampler.batching.slots
    past = planned.cached_tokens / rows
    return sampler.batching.segment_steps * flops(rows, 1, 1, past=past)
  if name == "generate":
    return flops(P, S, 1) + flops(B, R - 1, R - 1, past=S)
  forward = flops(B, S + R, R)
  # A critic's head is a vector.
  critic = flops(B, S + R, 0) if state.critic is not None else 0.0
  if name == "reference_and_values":
    total = critic + (forward if state.reference is not None else 0.0)
    # Several teachers are counted as if each had the same share of the rows.
    teachers = [
      lower_bounds.forward_flops(teacher.cfg, B, S + R, R)
      for teacher in program.teachers
    ]
    return total + sum(teachers) / max(len(teachers), 1)
  if name == "update":
    return lower_bounds.update_passes(program.cfg) * (forward + critic)
  return forward


def _summary(cost, model_flops, topology) -> dict:
  seconds = _seconds(cost)
  collectives = [
    kind._asdict() | dataclasses.asdict(traffic)
    for kind, traffic in cost.collectives.items()
  ]
  return {
    "model_flops": model_flops,
    "flops": cost.flops,
    "attention_flops": cost.attention_flops,
    "padding_flops": cost.padding_flops,
    "hbm_bytes": cost.hbm_bytes,
    "seconds": seconds,
    "mfu": model_flops / topology.chip.flops / seconds["scheduled"],
    "collectives": sorted(collectives, key=lambda c: -c["seconds"]),
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
    "scheduled": cost.scheduled,
  }


def _top(cost) -> list[dict]:
  longest = lambda item: -max(item[1].seconds, item[1].compiler_seconds)
  ranked = sorted(cost.by_source.items(), key=longest)
  return [{"source": source} | vars(o) for source, o in ranked[:_TOP]]


def _open(opened) -> list[dict]:
  """Source -> how often it runs, and the seconds of the longest."""
  entries = {}
  for o in opened:
    entry = entries.setdefault(o.source, {"times": 0, "seconds": 0.0})
    entry["times"] += o.times
    entry["seconds"] = max(entry["seconds"], o.cost.scheduled)
  return [{"source": source, **entry} for source, entry in entries.items()]
