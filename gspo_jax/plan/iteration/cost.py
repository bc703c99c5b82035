"""What an iteration costs with responses of given lengths.

A function takes its compiled time, as scheduled. The lengths, packed and
scheduled as in a run, decide how often its parts run, which tokens a decode
step reads, and how many a prefill computes. Rewards, packing, advantages and
the host between segments are not counted, so `rollout.max_staleness`, which
hides rewards, gains nothing. Dynamic sampling counts as one round.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.learner.packing import RowTokens
from gspo_jax.plan import lower, lower_bounds
from gspo_jax.plan.chips import Topology
from gspo_jax.plan.iteration.decoding import Decoding, decode_together, replay
from gspo_jax.plan.iteration.lengths import Lengths
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program

_SAMPLING = "generate", "weights"  # parts of an iteration


class _SamplerCost(NamedTuple):
  """Seconds, on all devices together."""

  weights: float  # to prepare the weights, once an iteration
  prefill: float  # for a token
  weights_read: float  # in a decode step, the least time to read the weights
  row: float  # in a decode step, for a row, without weights and cache
  cached: float  # to read a cached token

  def seconds(self, decoding: Decoding) -> float:
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
  topology: Topology,
  lengths: Lengths,
  transfer: Mapping[str, float] | None = None,
) -> dict:
  """The cost of an iteration, for JSON.

  A sampler with its own devices samples while the trainer trains, unless
  `rollout.max_staleness` is 0; the slower side decides. MFU counts the model
  FLOPs of real tokens, with each response's own causal attention.

  `functions` has the reports of all functions of the program, `transfer` the
  `seconds` to send weights to a sampler with its own devices.
  """
  decoding = (
    replay(program.sampler.generate, lengths)
    if program.sampler.generate.batching
    else decode_together(lengths, config)
  )
  packed = program.learner.pack(*lengths, jax.random.key(config.seed))
  tokens = program.learner.row_tokens(*lengths, packed)
  flops = _flops(program, lengths)
  peak_of = lambda name: (
    topology.chip.flops
    * (program.sampler.mesh.size if name in _SAMPLING else program.mesh.size)
  )
  devices = program.mesh.size + len(lower.sampler_devices(program))
  peak = topology.chip.flops * devices
  parts_of = lambda reports: _parts(
    reports, config, program, topology, decoding, lengths, tokens, flops
  )
  parts, compiler = parts_of(functions), None
  for name, part in parts.items():
    if "model_flops" in part:
      at_peak = part["seconds"] * peak_of(name)
      part["mfu"] = _ratio(part["model_flops"], at_peak)
  total = _combine(parts, config, transfer)
  model_flops = sum(part.get("model_flops", 0.0) for part in parts.values())
  real, computed = (
    sum(part.get(key, 0) for part in parts.values())
    for key in ("real_tokens", "computed_tokens")
  )
  if topology.chip.clock is not None:
    by_compiler = parts_of(_by_compiler(functions))
    seconds = _combine(by_compiler, config, transfer)
    compiler = {
      "seconds": seconds,
      "mfu": _ratio(model_flops, seconds * peak),
      "parts": {name: part["seconds"] for name, part in by_compiler.items()},
    }
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
    "compiler": compiler,
  }


def _combine(parts, config, transfer) -> float:
  sampling = sum(parts[name]["seconds"] for name in _SAMPLING)
  learning = sum(p["seconds"] for p in parts.values()) - sampling
  if transfer is None:
    return sampling + learning
  sampling += transfer["seconds"]
  ahead = config.rollout.max_staleness > 0
  return max(sampling, learning) if ahead else sampling + learning


def _by_compiler(functions) -> dict:
  """The reports, with the seconds of the compiler's estimate."""
  reports = {}
  for name, report in functions.items():
    compiler = report["compiler"]
    reports[name] = report | compiler
    if "decode" in report:
      reports[name]["decode"] = report["decode"] | compiler["decode"]
  return reports


def _parts(
  functions, config, program, topology, decoding, lengths, tokens, flops
) -> dict:
  sampler = _sampler_cost(functions, config, program, topology)
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
  """Model FLOPs of one forward pass of all sequences."""

  prompts: float  # with the logits of one token
  decode: float  # response tokens
  whole: float  # prompts with their responses
  critic: float  # like `whole` without the output head; 0 without a critic


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


def _rows(functions, tokens: dict[str, RowTokens]) -> dict:
  total = lambda key: sum(getattr(rows, key) for rows in tokens.values())
  seconds = 0.0
  for name, rows in tokens.items():
    one, rest = (
      functions[name]["parts"][part]["seconds"]["scheduled"]
      for part in ("micro_batch", "rest")
    )
    seconds += rest + rows.micro_batches * one
  return {
    "seconds": seconds,
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


def _sampler_cost(functions, config, program, topology) -> _SamplerCost:
  generate, sampler = functions["generate"], program.sampler.generate
  decode, bandwidth = generate["decode"], topology.chip.hbm_bandwidth
  step = decode["seconds"]["scheduled"]
  mesh = program.sampler.generate.mesh
  tokens = lower.cached_tokens(config, program)
  rows = config.data.prompts * config.rollout.group_size
  if sampler.batching:
    rows = sampler.batching.slots
  read = lower_bounds.cache_bytes(
    program.cfg, tokens, rows=rows, tensor=mesh.shape["tensor"]
  )
  cached = read / tokens / (mesh.size * bandwidth)
  without_cache = step
  if decode.get("kernel", True):  # else the compiled step counts no pages
    without_cache -= cached * tokens
  weights = 0.0
  if sampler.batching:
    T = lower.longest(config, sampler)
    prefilled = sampler.prefill_batch(T) * sampler.shards * T
    prefill = functions["prefill"]["seconds"]["scheduled"]
    weights = functions["decode_params"]["seconds"]["scheduled"]
  else:
    prefilled = config.data.prompts * config.data.max_prompt_length
    prefill = generate["seconds"]["scheduled"] - decode["steps"] * step
  weight_bytes = lower_bounds.weight_bytes(
    program.cfg,
    rows=rows,
    devices=mesh.size,
    expert=mesh.shape["expert"],
    tensor=mesh.shape["tensor"],
  )
  least = weight_bytes / bandwidth
  return _SamplerCost(
    weights=weights,
    prefill=prefill / prefilled,
    weights_read=min(least, without_cache),
    row=max(without_cache - least, 0.0) / rows,
    cached=cached,
  )
