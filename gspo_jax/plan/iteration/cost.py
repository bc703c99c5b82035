"""What an iteration costs with responses of given lengths.

A function takes its compiled time, as scheduled. The lengths, packed and
scheduled as in a run, decide how often its parts run, which tokens a decode
step reads, and how many a prefill computes. That is done three times: at best,
by the compiler's cycles, and as expected, with `plan.derates`. Rewards, packing
and the host are a number of seconds in the last alone, so that
`rollout.max_staleness`, which hides rewards, gains nothing. Dynamic sampling
counts as one round. Partial rollouts are counted as if each response ended in
its iteration.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.learner import packing
from gspo_jax.learner.packing import RowTokens
from gspo_jax.model import attention
from gspo_jax.plan import derates as plan_derates
from gspo_jax.plan import lower_bounds, skew
from gspo_jax.plan.derates import Derates
from gspo_jax.plan.iteration.decoding import Decoding, decode_together, replay
from gspo_jax.plan.iteration.lengths import Lengths
from gspo_jax.plan.lower import Planned
from gspo_jax.runtime import sharding

LEARNING = "score", "update", "host"  # parts of an iteration; others sample


class _Work(NamedTuple):
  """What an iteration computes, whatever that costs."""

  decoding: Decoding
  rows: Mapping[str, RowTokens]  # of each function that reads packed rows
  needed: float  # see `_needed_share`
  flops: Mapping[str, float]  # see `_model_flops`


def cost(
  functions: Mapping[str, dict],
  planned: Planned,
  lengths: Lengths,
  derates: Derates,
  transfer: Mapping[str, float] | None = None,
  tokens_a_step: float = 1.0,
) -> dict:
  """The cost of an iteration, for JSON.

  A sampler with its own devices samples while the trainer trains, unless
  `rollout.max_staleness` is 0; the slower side decides. MFU counts the model
  FLOPs of real tokens, with each response's own causal attention.

  `functions` has the reports of all functions of the program, `transfer` the
  `seconds` to send weights to a sampler with its own devices.
  """
  config, program, topology = planned
  devices = program.mesh.size
  if program.sampler.separate:
    devices += program.sampler.mesh.size
  peak = topology.chip.flops * devices
  chips = devices / topology.chip.on_chip
  work = _work(planned, lengths, tokens_a_step)
  sampled, G = int(lengths.responses.sum()), config.rollout.group_size
  with_prompts = sampled + G * int(lengths.prompts.sum())

  def whole(seconds_of):
    seconds = _combine(seconds_of, config, transfer)
    return {
      "seconds_of": seconds_of,
      "seconds": seconds,
      "mfu": sum(work.flops.values()) / (seconds * peak),
      "tokens_per_second_per_chip": sampled / seconds / chips,
      "with_prompts_per_chip": with_prompts / seconds / chips,
    }

  stated = _by_compiler(functions)
  by_compiler = _seconds(stated, planned, work)
  loads = skew.loads(planned, derates.skew)
  added = plan_derates.added(
    stated, by_compiler, work.decoding, work.rows, work.needed, loads, derates
  )
  added["host"] = {"host": derates.host * planned.responses}
  expected = {
    part: seconds + sum(of.get(part, 0.0) for of in added.values())
    for part, seconds in (by_compiler | {"host": 0.0}).items()
  }
  return {
    "prompts": _summary(lengths.prompts),
    "responses": _summary(lengths.responses),
    "continues": config.rollout.max_tokens_per_iteration > 0,
    "decoding": work.decoding._asdict(),
    "learning": {name: rows._asdict() for name, rows in work.rows.items()},
    "needed_blocks": work.needed,
    "model_flops": work.flops,
    **whole(_seconds(functions, planned, work)),
    "compiler": None if topology.chip.clock is None else whole(by_compiler),
    "expected": whole(expected)
    | {"added": added, "derates": derates._asdict(), "loads": loads}
    | _beside(functions, planned, expected, work, derates),
  }


def _beside(functions, planned, expected, work, derates) -> dict:
  """An iteration's share of evaluations and checkpoints, which come beside."""
  config = planned.config
  share = config.eval.prompts * config.eval.samples / planned.responses
  # The longest response takes its steps among few others as well.
  longest = min(config.sampler.max_new_tokens / work.decoding.steps, 1)
  steps = expected["steps"] * max(share, longest)
  others = sum(expected[x] for x in ("prefill", "reading", "waiting", "moves"))
  evaluation = expected["weights"] + steps + share * others
  state = functions["update"]["memory"]["arguments"]
  every = config.eval.every
  return {
    "evaluation": evaluation / every if every else 0.0,
    "checkpoint": state / derates.to_host / config.checkpoint.every,
  }


def _work(planned, lengths: Lengths, tokens_a_step: float) -> _Work:
  config, program, _ = planned
  generate, learner = program.sampler.generate, program.learner
  if generate.batching:
    page_size = generate.sizes.page_size
    decoding = replay(generate, lengths, page_size, tokens_a_step)
  else:
    shards = sharding.batch_shards(generate.mesh)
    decoding = decode_together(lengths, config, shards)
  packed = learner.pack(*lengths, jax.random.key(config.seed))
  rows = learner.row_tokens(*lengths, packed)
  return _Work(
    decoding,
    rows,
    _needed_share(program, lengths, packed),
    _model_flops(program, lengths, rows),
  )


def _combine(seconds_of, config, transfer) -> float:
  learning = sum(seconds_of.get(part, 0.0) for part in LEARNING)
  sampling = sum(seconds_of.values()) - learning
  if transfer is None:
    return sampling + learning
  sampling += transfer["seconds"]
  ahead = config.rollout.max_staleness > 0
  return max(sampling, learning) if ahead else sampling + learning


def _by_compiler(functions) -> dict:
  """The reports, with the seconds of the compiler's estimate, if it has one."""
  reports = {}
  for name, report in functions.items():
    compiler = report["compiler"]
    reports[name] = report | (compiler or {})
    if compiler and "decode" in report:
      reports[name]["decode"] = report["decode"] | compiler["decode"]
      reports[name]["fewer_slots"] = {
        slots: step | {"without_cache": step["compiler"]}
        for slots, step in report.get("fewer_slots", {}).items()
      }
  return reports


def _seconds(functions, planned: Planned, work: _Work) -> dict[str, float]:
  """Of the parts of an iteration."""
  seconds = _sampling_seconds(functions, planned, work.decoding)
  weights = functions.get("decode_params", {"seconds": {"scheduled": 0.0}})
  seconds |= {"weights": weights["seconds"]["scheduled"], "score": 0.0}
  for name, rows in work.rows.items():
    one, rest = (functions[name]["parts"][x] for x in ("micro_batch", "rest"))
    computed = one["seconds"]["scheduled"]
    computed -= (1 - work.needed) * one["block_seconds"]
    total = rest["seconds"]["scheduled"] + rows.micro_batches * computed
    part = "update" if name == "update" else "score"
    seconds[part] = seconds.get(part, 0.0) + total
  return seconds


def _summary(lengths) -> dict:
  return {
    "count": len(lengths),
    "tokens": int(lengths.sum()),
    "mean": float(lengths.mean()),
    "median": float(np.median(lengths)),
    "longest": int(lengths.max()),
  }


def _model_flops(program, lengths: Lengths, rows) -> dict[str, float]:
  """Of the parts of an iteration; `rows` as of `_Work`."""
  cfg, state = program.cfg, program.learner.abstract
  flops = lambda cfg, *args, **past: float(
    lower_bounds.forward_flops(cfg, 1, *args, **past).sum()
  )
  responses = lengths.responses
  prompts = np.repeat(lengths.prompts, len(responses) // len(lengths.prompts))
  sequences, score = prompts + responses, 0.0
  whole = flops(cfg, sequences, responses)
  # Without the output head.
  critic = flops(cfg, sequences, 0) if state.critic is not None else 0.0
  if scored := rows.get("old_logps"):
    score += whole * scored.real / rows["update"].real
  if "reference_and_values" in rows:
    teachers = [flops(t.cfg, sequences, responses) for t in program.teachers]
    mean = sum(teachers) / max(len(teachers), 1)
    score += whole * (state.reference is not None) + critic + mean
  decode = flops(cfg, responses, responses, past=prompts)
  return {
    "generate": flops(cfg, lengths.prompts, 1) + decode,
    "score": score,
    "update": lower_bounds.update_passes(cfg) * (whole + critic),
  }


def _needed_share(program, lengths, packed) -> float:
  """Blocks of scores that micro-batches compute, as a share of all.

  In each of them devices wait for the row that needs the most.
  """
  cfg = program.learner.packing
  prompts = np.repeat(lengths.prompts, len(packed.row) // len(lengths.prompts))
  block, _ = attention.splash_blocks(cfg.width + -cfg.width % 128)
  blocks = packing.needed_blocks(
    prompts + lengths.responses, packed, cfg, (block, block)
  )
  fullest = blocks.reshape(cfg.minibatches, -1, cfg.micro_batch_size).max(2)
  used = np.arange(fullest.shape[1]) < packed.num_micro_batches[:, None]
  n = -(-cfg.width // block)
  return fullest[used].mean() / (n * (n + 1) / 2)


def _sampling_seconds(functions, planned: Planned, decoding: Decoding) -> dict:
  """Of each part; in a step all devices wait for the fullest shard."""
  generate, config = functions["generate"], planned.config
  decode, sampler = generate["decode"], planned.program.sampler.generate
  if sampler.batching:
    T = planned.longest
    prefilled = sampler.prefill_batch(T) * sampler.shards * T
    prefill = functions["prefill"]["seconds"]["scheduled"]
  else:
    prefilled = config.data.prompts * config.data.max_prompt_length
    step = decode["seconds"]["scheduled"]
    prefill = generate["seconds"]["scheduled"] - decode["steps"] * step
  shards = sharding.batch_shards(sampler.mesh)
  # By the rows that all shards compute.
  of_step = {planned.decode_rows: decode} | generate.get("fewer_slots", {})
  steps = reading = waiting = 0.0
  for rows, sums in decoding.by_rows.items():
    row, block = (of_step[rows]["reading"][part] for part in ("row", "block"))
    steps += sums.steps * of_step[rows]["without_cache"]
    reading += block * sums.blocks + row * sums.steps * rows / shards
    waiting += block * (sums.most_blocks - sums.blocks)
  return {
    "prefill": decoding.prefilled * (prefill / prefilled),
    "steps": steps,
    "reading": reading,
    "waiting": waiting,
    "moves": decoding.moves * decode.get("move", 0.0),
  }
