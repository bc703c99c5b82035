"""A decode step and shared prompts over a paged cache.

  python -m benchmarks.decode [--quick] [--out=FILE.json]

First, a step of 64 slots of the embedded default's policy whose responses hold
256 tokens on average, all equal or long-tailed (see benchmarks/lengths.py),
with room for ten times as many tokens or for exactly the mean. The calls
alternate, and the least time of each counts.

Then, groups of 16 responses to prompts of 512 tokens: the tokens prefilled and
the pages of the prompts' full pages, as shares of both if each response had its
own prompt.
"""

import argparse
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

from benchmarks import lengths, record
from benchmarks.replay import least_seconds
from gspo_jax import model
from gspo_jax.runtime import sharding
from gspo_jax.sampler import continuous
from gspo_jax.sampler.continuous import paged_decode
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import (
  SamplerConfig,
  empty_samples,
)

_PAGE = 16


def segment(cfg, params, cached: np.ndarray, room: int, steps: int):
  """A function that decodes `steps` tokens of slots that hold some already.

  Args:
    cfg: the model.
    params: its weights.
    cached: [B] tokens that each slot holds.
    room: most tokens that a slot can hold before the steps.
    steps: decode steps.
  """
  B, W = len(cached), -(-(room + steps) // _PAGE)
  # The stop token is never sampled.
  sampler = SamplerConfig(1, steps, stop_ids=(cfg.vocab_size,))
  full = lambda x: np.full(B, x, np.int32)
  plan = paged_decode.SegmentPlan(
    table=np.arange(B * W, dtype=np.int32).reshape(B, W),
    active=np.ones(B, bool),
    new=np.ones(B, bool),
    response=np.arange(B, dtype=np.int32),
    row=np.arange(B, dtype=np.int32),
    num_tokens=full(0),
    stop_at=full(steps),
    stop_state=full(0),
    num_cached=cached.astype(np.int32),
    last_token=full(0),
    copy_source=full(B * W),
    copy_target=full(B * W),
    prompt_row=(),
  )

  def decode(params, state, samples):
    return paged_decode.decode(
      params,
      cfg,
      paged_decode.apply_plan(state, plan),
      samples,
      jax.random.key(0),
      sampler=sampler,
      steps=steps,
      min_active=0,
    )

  jitted = jax.jit(decode, donate_argnums=(1, 2))
  empty = lambda: paged_decode.empty(
    cfg,
    shards=1,
    num_slots=B,
    num_pages=B * W,
    page_size=_PAGE,
    pages_per_slot=W,
  )
  # Jitted, so that no two arrays share a buffer.
  donated = [jax.jit(empty)(), empty_samples(B, 0, cfg, sampler)]

  def call():
    donated[:] = jitted(params, *donated)
    return donated[0].num_tokens

  return call


def step_seconds(cfg, params, slots, mean, steps, repeats) -> dict:
  """Seconds of one step, by what the slots hold and their room."""
  equal = np.full(slots, mean)
  tailed = lengths.long_tailed(slots, 10 * mean)
  tailed = np.minimum(np.rint(tailed * (mean / tailed.mean())), 10 * mean)
  calls = {
    "equal, exact": segment(cfg, params, equal, mean, steps),
    "equal, ten times": segment(cfg, params, equal, 10 * mean, steps),
    "long-tailed, ten times": segment(cfg, params, tailed, 10 * mean, steps),
  }
  total = least_seconds(calls, repeats)
  return {name: seconds / steps for name, seconds in total.items()}


def build(cfg, params, prompts: int, group: int, length: int, new_tokens: int):
  """A sampler with a slot for each response, and no stop token."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  return continuous.build_continuous_sampler(
    cfg,
    SamplerConfig(group, new_tokens, stop_ids=(cfg.vocab_size,)),
    batching=ContinuousBatchingConfig(
      slots=prompts * group, page_size=_PAGE, segment_steps=8, prefill_chunk=64
    ),
    max_prompt_length=length,
    params_sharding=model.shardings(params, mesh),
    mesh=mesh,
    sampler_mesh=mesh,
  )


def shared(cfg, params, prompts: int, group: int, length: int) -> dict:
  """Tokens prefilled and pages of prompts, as shares of those unshared."""
  generate = build(cfg, params, prompts, group, length, 8)
  prefilled, stored_pages, read_pages = [], [], []

  def prefill(params, state, tokens, prefix_lengths, *rest):
    prefilled.append(int(prefix_lengths.sum()))
    return generate.jitted.prefill(params, state, tokens, prefix_lengths, *rest)

  def decode(params, state, samples, plan, *rest):
    full = np.asarray(plan.table)[np.asarray(plan.active)]
    full = full[:, : (length - 1) // _PAGE]
    stored_pages.append(np.unique(full).size)
    read_pages.append(full.size)
    return generate.jitted.decode(params, state, samples, plan, *rest)

  jitted = SimpleNamespace(
    **vars(generate.jitted) | {"prefill": prefill, "decode": decode}
  )
  spied = dataclasses.replace(generate, jitted=jitted)
  batch = lengths.prompts(np.arange(1, prompts + 1), length)
  jax.block_until_ready(spied(params, batch, jax.random.key(0)))
  unshared = prompts * group * (length - 1)
  return {
    "prefilled": sum(prefilled) / unshared,
    "pages": max(stored_pages) / max(read_pages),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  slots, mean, steps, repeats = (
    (8, 64, 8, 1) if args.quick else (64, 256, 32, 7)
  )
  cfg = model.variant("tiny", dtype="float32")
  params = model.init(jax.random.key(0), cfg)
  unstacked = model.unstack_layers(
    params | {"head": model.output_matrix(params, cfg)}, cfg
  )
  seconds = step_seconds(cfg, unstacked, slots, mean, steps, repeats)
  exact = seconds["equal, exact"]
  print("responses, room | ms a step | times exact")
  for name, time in seconds.items():
    print(f"{name} | {1e3 * time:.3f} | {time / exact:.2f}")
  prompts, group, length = (2, 4, 64) if args.quick else (8, 16, 512)
  shares = shared(cfg, params, prompts, group, length)
  print(f"shared by {group} responses | share of unshared")
  for name, share in shares.items():
    print(f"{name} | 1 / {1 / share:.4g}")
  results = {
    "seconds": seconds,
    "group": group,
    "shares": shares,
  }
  record.finish("decode", results, args.out)


if __name__ == "__main__":
  main()
