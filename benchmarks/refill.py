"""Tokens per second with and without refill, on answers of realistic lengths.

  python -m benchmarks.refill [--quick]

The median answer has 10 % of the longest's tokens, and 5 % are as long as that:
see benchmarks/lengths.py for how a policy is made to give such answers. All
draw the same tokens, which is checked; they run in turns, and the least time of
each counts.
"""

import argparse
import functools
import json
import time

import jax
import numpy as np

from benchmarks import lengths
from gspo_jax import model, paged_sampler, sampler, sharding
from gspo_jax.paged_sampler import Paging


def calls(cfg, params, prompts, draw, slots) -> dict:
  """By name, functions that draw all answers."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  static = jax.jit(functools.partial(sampler.generate, cfg=cfg, sampler=draw))
  key = jax.random.key(0)
  found = {"static": lambda: static(params, prompts=prompts, key=key)}
  for B in slots:
    refill = paged_sampler.build(
      cfg,
      draw,
      paging=Paging(slots=B, page=16, steps=32, chunk=32),
      prompt=prompts.tokens.shape[1],
      params=sharding.state_shardings(params, mesh),
      mesh=mesh,
      decoding=mesh,
    )
    found[f"{B} slots"] = functools.partial(refill, params, prompts, key)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  quick = parser.parse_args().quick
  questions, group, most = (8, 2, 64) if quick else (32, 8, 960)
  repeats, slots = (1, (4,)) if quick else (3, (32, 64))
  cfg = model.variant("tiny", dtype="float32", vocab_size=1024)
  params = lengths.countdown(model.init(jax.random.key(0), cfg))
  each = lengths.long_tailed(questions, most)
  draw = sampler.SamplerConfig(group, most, stop_ids=(lengths.STOP,))
  ways = calls(cfg, params, lengths.prompts(each, 32), draw, slots)
  seconds, useful = dict.fromkeys(ways, float("inf")), {}
  for repeat in range(repeats + 1):
    for name, call in ways.items():
      began = time.monotonic()
      drawn = jax.block_until_ready(call())
      if repeat:  # the first compiles
        seconds[name] = min(seconds[name], time.monotonic() - began)
      found = np.asarray(drawn.lengths).reshape(-1, group)
      assert (found == each[:, None]).all(), name
      useful[name] = int(found.sum()) / int(drawn.slot_steps)
  tokens = group * int(each.sum())
  print("way | tokens/s | useful slot-steps | times static")
  for name in ways:
    times = seconds["static"] / seconds[name]
    rate = tokens / seconds[name]
    print(f"{name} | {rate:.0f} | {useful[name]:.0%} | {times:.2f}")
  print(json.dumps({"tokens": tokens, "seconds": seconds, "useful": useful}))


if __name__ == "__main__":
  main()
