"""What an iteration costs with responses of given lengths.

The time of a function is that of its compiled program, as scheduled; how often
its parts run comes from the lengths. The rows of the update and of the score
are packed as a run packs them, and its sampler schedules the decode steps.

A decode step takes what the compiled one does, but reads only the cached tokens
that there are. A prefill takes its share of tokens of the compiled one. Not
counted: rewards, packing, advantages, and the host between segments. So
`rollout.max_staleness`, which hides the rewards, gains nothing here. With
dynamic sampling it is an iteration of one round.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.learner import packing
from gspo_jax.learner.packing import RowTokens
from gspo_jax.plan import lower, lower_bounds
from gspo_jax.plan.chips import Slice
from gspo_jax.plan.iteration.decoding import Decoding, decode
from gspo_jax.plan.iteration.lengths import Lengths
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program, build_program
from gspo_jax.runtime.errors import UserError

_SAMPLING = "generate", "weights"  # parts of an iteration


class _SamplerCost(NamedTuple):
  """Seconds of the parts of a sampler, on all devices together."""

  weights: float  # to prepare the weights, once an iteration
  prefill: float  # of a token
  weights_read: float  # of a decode step, the least to read the weights
  row: float  # of a decode step, all else but the cache, for each row
  cached: float  # to read a cached token
  cache: float  # bytes of the cache on each device
  free: float  # bytes of HBM on each device that the sampler leaves free

  def with_cache(self, size: float) -> "_SamplerCost":
    """With a cache of this many bytes on each device."""
    return self._replace(cache=size, free=self.free + self.cache - size)

  def seconds(self, decoding: Decoding) -> float:
    """Of the prefills and the decode steps.

    The weights are read in every step; all else but the cache grows with the
    rows.
    """
    step = self.weights_read + self.row * decoding.rows
    return (
      decoding.prefilled * self.prefill
      + decoding.steps * step
      + decoding.cached * self.cached
    )


def cost(
  functions: Mapping[str, dict],
  config: Config,
  program: Program,
  tpu_slice: Slice,
  lengths: Lengths,
  transfer: Mapping[str, float] | None = None,
) -> dict:
  """The cost of an iteration, for JSON.

  If the sampler has devices of its own, it samples while the others train,
  unless `rollout.max_staleness` is 0: an iteration takes as long as the slower
  side.

  Seconds are of the whole iteration, MFU of the model FLOPs of real tokens
  alone, each response with its own causal attention.

  Args:
    functions: the report of each function that the program has.
    config: of the run.
    program: with the functions.
    tpu_slice: what it was compiled for.
    lengths: of the prompts and responses.
    transfer: `seconds` to send the weights to a sampler with its own devices;
      None without such.
  """
  decoding = decode(program, config, lengths)
  tokens = _row_tokens(config, program, lengths)
  flops = _flops(program, lengths)
  peak_of = lambda name: (
    tpu_slice.chip.flops
    * (program.sampler.mesh.size if name in _SAMPLING else program.mesh.size)
  )
  devices = program.mesh.size + len(lower.sampler_devices(program))
  peak = tpu_slice.chip.flops * devices
  combine = functools.partial(_combine, config, transfer)

  def parts_of(functions):
    sampler = _sampler_cost(functions, config, program, tpu_slice)
    return sampler, _parts(
      functions, sampler, config, program, decoding, lengths, tokens, flops
    )

  sampler, parts = parts_of(functions)
  _, by_compiler = parts_of(_by_compiler(functions))
  for name, part in parts.items():
    if "model_flops" in part:
      at_peak = part["seconds"] * peak_of(name)
      part["mfu"] = _ratio(part["model_flops"], at_peak)
  total, compiler_total = (combine(*_sides(p)) for p in (parts, by_compiler))
  model_flops = sum(part.get("model_flops", 0.0) for part in parts.values())
  real, computed = (
    sum(part.get(key, 0) for part in parts.values())
    for key in ("real_tokens", "computed_tokens")
  )
  return {
    "prompts": _summary(lengths.prompts),
    "responses": _summary(lengths.responses),
    "parts": parts,
    "seconds": total,
    "real_tokens": real,
    "computed_tokens": computed,
    "useful_fraction": _ratio(real, computed),
    "mfu": _ratio(model_flops, total * peak),
    "tokens_per_second": int(lengths.responses.sum()) / total,
    "compiler": {
      "seconds": compiler_total,
      "mfu": _ratio(model_flops, compiler_total * peak),
      "parts": {name: part["seconds"] for name, part in by_compiler.items()},
    },
    "alternatives": _alternatives(
      functions, config, program, lengths, sampler, parts, combine
    ),
  }


def _sides(parts) -> tuple[float, float]:
  """Seconds of sampling, and of all else."""
  sampling = sum(parts[name]["seconds"] for name in _SAMPLING)
  return sampling, sum(p["seconds"] for p in parts.values()) - sampling


def _combine(config, transfer, sampling: float, learning: float) -> float:
  """Seconds of an iteration."""
  if transfer is None:
    return sampling + learning
  sampling += transfer["seconds"]
  ahead = config.rollout.max_staleness > 0
  return max(sampling, learning) if ahead else sampling + learning


def _by_compiler(functions) -> dict:
  """The reports with the seconds of the compiler's estimate."""
  reports = {}
  for name, report in functions.items():
    compiler = report["compiler"]
    reports[name] = report | compiler
    if "decode" in report:
      reports[name]["decode"] = report["decode"] | compiler["decode"]
  return reports


def _parts(
  functions, sampler, config, program, decoding, lengths, tokens, flops
) -> dict:
  """The report of each part of an iteration."""
  score = {k: rows for k, rows in tokens.items() if k != "update"}
  update = functions["update"]["parts"]
  return {
    "generate": _generate(sampler, decoding, lengths, flops),
    "weights": {"seconds": sampler.weights},
    "score": _rows(functions, score)
    | {"model_flops": _score_flops(tokens, flops, program)},
    "update": _rows(functions, {"update": tokens["update"]})
    | {
      "model_flops": lower_bounds.update_passes(program.cfg)
      * (flops.whole + flops.critic),
      "micro_batch_seconds": update["micro_batch"]["seconds"]["scheduled"],
      "optimizer_step_seconds": update["rest"]["seconds"]["scheduled"]
      / config.learner.minibatches,
    },
  }


def _ratio(a, b):
  return a / b if b else 0.0


def _summary(lengths) -> dict:
  return {
    "count": len(lengths),
    "tokens": int(lengths.sum()),
    "mean": float(lengths.mean()),
    "median": float(np.median(lengths)),
    "longest": int(lengths.max()),
  }


class _Flops(NamedTuple):
  """Model FLOPs of all sequences."""

  prompts: float  # of the prompts' forward pass, with one token's logits
  decode: float  # of the forward pass of the responses' tokens
  whole: float  # of one forward pass of prompts with their responses
  critic: float  # of the same without the output head; 0 without a critic


def _flops(program, lengths: Lengths) -> _Flops:
  cfg, forward = program.cfg, lower_bounds.forward_flops
  responses = lengths.responses
  prompts = np.repeat(lengths.prompts, len(responses) // len(lengths.prompts))
  whole = prompts + responses
  critic = program.learner.abstract.critic is not None
  return _Flops(
    prompts=float(forward(cfg, 1, lengths.prompts, 1).sum()),
    decode=float(forward(cfg, 1, responses, responses, past=prompts).sum()),
    whole=float(forward(cfg, 1, whole, responses).sum()),
    critic=float(forward(cfg, 1, whole, 0).sum()) if critic else 0.0,
  )


def _row_tokens(config, program, lengths: Lengths) -> dict[str, RowTokens]:
  """The tokens of the rows that a run would pack."""
  packed = program.learner.pack(*lengths, jax.random.key(config.seed))
  return program.learner.row_tokens(*lengths, packed)


def _generate(sampler, decoding, lengths, flops) -> dict:
  sampled = int(lengths.responses.sum())
  return {
    "seconds": sampler.seconds(decoding),
    "real_tokens": sampled,
    "computed_tokens": decoding.slot_steps,
    "useful_fraction": sampled / decoding.slot_steps,
    "model_flops": flops.prompts + flops.decode,
    **decoding._asdict(),
  }


def _rows_seconds(functions, tokens, share=1.0) -> float:
  """Seconds of calls that run this many micro-batches.

  `share` is the share of a compiled micro-batch's rows. Waiting for
  collectives, many of which are of weights or gradients, takes as long with
  fewer rows.
  """
  total = 0.0
  for name, rows in tokens.items():
    parts = functions[name]["parts"]
    one, rest = parts["micro_batch"]["seconds"], parts["rest"]["seconds"]
    seconds = one["stalled"] + share * (one["scheduled"] - one["stalled"])
    total += rest["scheduled"] + rows.micro_batches * seconds
  return total


def _rows(functions, tokens: dict[str, RowTokens]) -> dict:
  """The part of functions that run over packed rows."""
  total = lambda key: sum(getattr(rows, key) for rows in tokens.values())
  return {
    "seconds": _rows_seconds(functions, tokens),
    "micro_batches": total("micro_batches"),
    "real_tokens": total("real"),
    "computed_tokens": total("computed"),
    "useful_fraction": _ratio(total("real"), total("computed")),
  }


def _score_flops(tokens, flops, program) -> float:
  """Model FLOPs of all passes over the rows before the update."""
  total = 0.0
  if scored := tokens.get("old_logps"):
    total += flops.whole * _ratio(scored.real, tokens["update"].real)
  if "reference_and_values" in tokens:
    has_reference = program.learner.abstract.reference is not None
    total += flops.whole * has_reference + flops.critic
  return total


def _cache_bytes(config, program) -> float:
  """The bytes of all cached tokens that there is room for, on each device."""
  tokens = lower.cached_tokens(config, program)
  return (
    lower_bounds.cache_bytes(program.cfg, tokens) / program.sampler.mesh.size
  )


def _sampler_cost(functions, config, program, tpu_slice) -> _SamplerCost:
  generate, sampler = functions["generate"], program.sampler.generate
  decode, bandwidth = generate["decode"], tpu_slice.chip.hbm_bandwidth
  step, cache = decode["seconds"]["scheduled"], _cache_bytes(config, program)
  # Without a kernel, the compiled step does not count the pages.
  step_counts_cache = decode.get("kernel", True)
  without_cache = step - (cache / bandwidth if step_counts_cache else 0.0)
  weights = 0.0
  if sampler.batching:
    slots, T = sampler.batching.slots, lower.longest(config, sampler)
    prefilled = sampler.prefill_batch(T) * sampler.shards * T
    prefill = functions["prefill"]["seconds"]["scheduled"]
    weights = functions["decode_params"]["seconds"]["scheduled"]
  else:
    slots = config.data.prompts * config.rollout.group_size
    prefilled = config.data.prompts * config.data.max_prompt_length
    prefill = generate["seconds"]["scheduled"] - decode["steps"] * step
  least = _least_weight_bytes(program, slots) / bandwidth
  one = lower_bounds.cache_bytes(program.cfg, 1) / program.sampler.mesh.size
  return _SamplerCost(
    weights=weights,
    prefill=prefill / prefilled,
    weights_read=min(least, without_cache),
    row=max(without_cache - least, 0.0) / slots,
    cached=one / bandwidth,
    cache=cache,
    free=generate["memory"]["free"],
  )


def _least_weight_bytes(program, rows) -> float:
  """The bytes of weights that a device reads at least in a decode step."""
  mesh = lower.sampler_mesh(program)
  return lower_bounds.decode_bytes(
    program.cfg,
    prompts=0,
    rows=rows,
    slots=0,
    prompt_slots=0,
    devices=program.sampler.mesh.size,
    expert=mesh.shape["expert"],
    tensor=mesh.shape["tensor"],
  )


def _alternatives(
  functions, config, program, lengths, sampler, parts, combine
) -> list[dict]:
  """The seconds of an iteration with other keys: estimates, not compiled."""
  generate, rows = _sides(parts)
  alternatives = []

  def add(change, seconds, fits=True):
    alternatives.append({"change": change, "seconds": seconds, "fits": fits})

  order = np.arange(len(lengths.responses))
  padded = program.learner.row_tokens(
    *lengths, packing.one_a_row(order, program.learner.packing)
  )
  padded_rows = _rows_seconds(functions, padded)
  add("one response a row", combine(generate, padded_rows))
  half = config.learner.micro_batch_size // 2
  other = _other_program(config, program, learner={"micro_batch_size": half})
  if other:
    tokens = _row_tokens(config, other, lengths)
    at_best = _rows_seconds(functions, tokens, share=0.5)
    add(f"learner.micro_batch_size={half}, at best", combine(generate, at_best))
  for batching in _other_batching(program, len(lengths.responses)):
    other = _other_program(config, program, continuous_batching=batching)
    if other:
      changed = config.replace(continuous_batching=batching)
      cost = sampler.with_cache(_cache_bytes(changed, other))
      seconds = cost.weights + cost.seconds(decode(other, changed, lengths))
      keys = ", ".join(f"{key}={value}" for key, value in batching.items())
      add(
        f"continuous_batching: {keys}", combine(seconds, rows), cost.free >= 0
      )
  return alternatives


def _other_batching(program, responses) -> list[dict]:
  """Keys of `continuous_batching`; twice the slots share the same pages."""
  generate = program.sampler.generate
  if not generate.batching:
    return [{"slots": responses // 2}, {"slots": responses // 4}]
  slots, pages = generate.batching.slots, generate.sizes.num_pages
  twice = {"slots": 2 * slots, "num_pages": pages * generate.shards}
  more = [twice] if 2 * slots <= responses else []
  return [{"slots": 0}, *more, {"slots": slots // 2}]


def _other_program(config, program, **keys) -> Program | None:
  """The program with other keys; None if they do not go together."""
  try:
    return build_program(
      config.replace(**keys),
      program.mesh,
      sampler_devices=lower.sampler_devices(program),
    )
  except UserError:
    return None
