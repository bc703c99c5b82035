"""What a decode step and a shared prompt cost in pages.

  python -m benchmarks.decode [--quick] [--out=FILE.json]

First, a step of 64 rows of the embedded default's policy whose answers hold 256
tokens on average, alike or long-tailed (see benchmarks/lengths.py): where the
longest may hold ten times as many, and where a cache of exactly the mean is all
there is. They take turns, and the least time of each counts.

Then, groups of 16 answers to prompts of 512 tokens: tokens prefilled, and the
pages that full pages of prompts take, by what both would be if each answer had
its own.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import numpy as np

from benchmarks import lengths, record
from benchmarks.replay import least_seconds
from gspo_jax import model
from gspo_jax.runtime import sharding
from gspo_jax.sampler import continuous, paged_decode
from gspo_jax.sampler.paging import ContinuousBatchingConfig
from gspo_jax.sampler.samples import SamplerConfig, empty_samples

_PAGE = 16


def segment(cfg, params, held: np.ndarray, most: int, steps: int):
  """A function that decodes `steps` tokens of rows that hold some already.

  Args:
    cfg: the model.
    params: its weights.
    held: [B] tokens of each row.
    most: tokens that a row can hold, those of the steps beside.
    steps: tokens to draw.
  """
  B, W = len(held), -(-(most + steps) // _PAGE)
  draw = SamplerConfig(1, steps, stop_ids=(cfg.vocab_size,))  # never drawn
  whole = lambda x: np.full(B, x, np.int32)
  orders = {
    "table": np.arange(B * W, dtype=np.int32).reshape(B, W),
    "active": np.ones(B, bool),
    "new": np.ones(B, bool),
    "answer": np.arange(B, dtype=np.int32),
    "until": whole(steps),
    "length": held.astype(np.int32),
    "source": whole(B * W),
    "target": whole(B * W),
  }
  names = paged_decode.SegmentPlan.__dataclass_fields__
  orders = paged_decode.SegmentPlan(
    **{n: orders.get(n, whole(0)) for n in names}
  )

  def decode(params, state, samples):
    how = {"sampler": draw, "steps": steps}
    key = jax.random.key(0)
    return paged_decode.decode(
      params, cfg, state, samples, orders, None, 0, key, **how
    )

  jitted = jax.jit(decode, donate_argnums=(1, 2))
  empty = lambda: paged_decode.empty(
    cfg, rows=B, pages=B * W, page=_PAGE, most=W
  )
  # Jitted, so that no two arrays are one buffer.
  kept = [jax.jit(empty)(), empty_samples(B, 0, cfg, draw)]

  def call():
    kept[:] = jitted(params, *kept)
    return kept[0].drawn

  return call


def step_seconds(cfg, params, rows, mean, steps, repeats) -> dict:
  """Of one step, by what the rows hold and what there is room for."""
  alike = np.full(rows, mean)
  tailed = lengths.long_tailed(rows, 10 * mean)
  tailed = np.minimum(np.rint(tailed * (mean / tailed.mean())), 10 * mean)
  calls = {
    "alike, exact": segment(cfg, params, alike, mean, steps),
    "alike, ten times": segment(cfg, params, alike, 10 * mean, steps),
    "long-tailed, ten times": segment(cfg, params, tailed, 10 * mean, steps),
  }
  found = least_seconds(calls, repeats)
  return {name: seconds / steps for name, seconds in found.items()}


def shared(cfg, params, prompts: int, group: int, length: int) -> dict:
  """Tokens prefilled and pages of prompts, of those without sharing."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  draw = SamplerConfig(group, 8, stop_ids=(cfg.vocab_size,))
  paged = continuous.build(
    cfg,
    draw,
    paging=ContinuousBatchingConfig(
      slots=prompts * group, page_size=_PAGE, segment_steps=8, prefill_chunk=128
    ),
    prompt=length,
    params=sharding.state_shardings(params, mesh),
    mesh=mesh,
    decoding=mesh,
  )
  prefilled, distinct, pages = [], [], []

  def prefill(params, state, tokens, fed, numbers):
    prefilled.append(int(fed.sum()))
    return paged.devices.prefill(params, state, tokens, fed, numbers)

  def decode(params, state, samples, orders, *rest):
    full = np.asarray(orders.table)[np.asarray(orders.active)]
    full = full[:, : (length - 1) // _PAGE]
    distinct.append(np.unique(full).size)
    pages.append(full.size)
    return paged.devices.decode(params, state, samples, orders, *rest)

  spies = {"prefill": prefill, "decode": decode}
  watched = dataclasses.replace(paged.devices, **spies)
  spied = dataclasses.replace(paged, devices=watched)
  asked = lengths.prompts(np.arange(1, prompts + 1), length)
  jax.block_until_ready(spied(params, asked, jax.random.key(0)))
  alone = prompts * group * (length - 1)
  return {
    "prefilled": sum(prefilled) / alone,
    "pages": max(distinct) / max(pages),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  rows, mean, steps, repeats = (8, 64, 8, 1) if args.quick else (64, 256, 32, 7)
  cfg = model.variant("tiny", dtype="float32")
  params = model.init(jax.random.key(0), cfg)
  unstacked = model.unstack_layers(
    params | {"head": model.output_matrix(params, cfg)}, cfg
  )
  seconds = step_seconds(cfg, unstacked, rows, mean, steps, repeats)
  exact = seconds["alike, exact"]
  print("rows, room | ms a step | times exact")
  for name, found in seconds.items():
    print(f"{name} | {1e3 * found:.3f} | {found / exact:.2f}")
  prompts, group, length = (2, 4, 64) if args.quick else (8, 16, 512)
  shares = shared(cfg, params, prompts, group, length)
  print(f"what {group} answers share | of their own")
  for name, share in shares.items():
    print(f"{name} | 1 / {1 / share:.4g}")
  found = {"seconds": seconds, "group": group, "shares": shares}
  record.finish("decode", found, args.out)


if __name__ == "__main__":
  main()
