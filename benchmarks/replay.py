"""What it costs to record the routing, to look at it, and to replay it.

  python -m benchmarks.replay [--quick]

The policy is the embedded default's, with random weights, twice as deep.
The calls to compare alternate, and the least time of each counts; bytes are
those of a compiled call beyond its arguments: temporary and returned.
"""

import argparse
import functools
import json
import time

import jax
import numpy as np

from gspo_jax import model, sampler
from gspo_jax.logprobs import token_logprobs
from gspo_jax.sampler.samples import Prompts, SamplerConfig


def sampling(cfg, params, prompts, most: int, group: int) -> dict:
  """Compiled calls that sample responses of `most` tokens."""

  def make(record: bool):
    sampling_config = SamplerConfig(
      group_size=group,
      max_new_tokens=most,
      min_new_tokens=most,
      stop_ids=(1,),
      record_routing=record,
    )
    call = functools.partial(sampler.generate, cfg=cfg, sampler=sampling_config)
    key = jax.random.key(0)
    given = {"prompts": prompts, "key": key}
    return bound(jax.jit(call), params, **given)

  return {"sample": make(False), "sample, recorded": make(True)}


def learning(cfg, params, rows: int, length: int, response: int) -> dict:
  """Compiled gradients of the log-probs of `response` tokens a row."""
  rng = np.random.default_rng(0)
  shape = (cfg.num_layers, rows, length, cfg.num_experts)
  order = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
  routes = order[..., : cfg.experts_per_token].astype(np.uint8)
  tokens = rng.integers(0, cfg.vocab_size, (rows, length)).astype(np.int32)
  positions = np.broadcast_to(np.arange(length), tokens.shape)

  def make(replay: bool, *looked):
    def loss(params, routes=None):
      scored = token_logprobs(
        params,
        cfg,
        tokens,
        positions,
        np.ones_like(tokens),
        response_length=response,
        routes=routes,
        replay=replay,
      )
      opinion = scored.experts, scored.router_logps, scored.router_entropy
      return scored.logps.sum(), opinion if looked else None

    return bound(jax.jit(jax.grad(loss, has_aux=True)), params, *looked)

  return {
    "learn": make(False),
    "learn, looked": make(False, routes),
    "learn, replayed": make(True, routes),
  }


def bound(jitted, *args, **kwargs):
  """A compiled function with its arguments, and the bytes it takes."""
  compiled = jitted.lower(*args, **kwargs).compile()
  memory = compiled.memory_analysis()
  size = memory.temp_size_in_bytes + memory.output_size_in_bytes
  return functools.partial(compiled, *args, **kwargs), size


def least_seconds(calls: dict, repeats: int) -> dict[str, float]:
  """Of each call, taken in turns, after one that warms up."""
  jax.block_until_ready([call() for call in calls.values()])
  seconds = dict.fromkeys(calls, float("inf"))
  for _ in range(repeats):
    for name, call in calls.items():
      began = time.monotonic()
      jax.block_until_ready(call())
      seconds[name] = min(seconds[name], time.monotonic() - began)
  return seconds


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  quick = parser.parse_args().quick
  problems, group, prompt, response = (2, 2, 8, 16) if quick else (4, 4, 16, 48)
  cfg = model.variant("tiny", num_layers=4, dtype="float32")
  params = model.init(jax.random.key(0), cfg)
  prompts = Prompts(
    np.zeros((problems, prompt), np.int32),
    np.full(problems, prompt, np.int32),
  )
  rows, length = problems * group, prompt + response
  made = sampling(cfg, params, prompts, response, group)
  made |= learning(cfg, params, rows, length, response)
  calls = {name: call for name, (call, _) in made.items()}
  seconds = least_seconds(calls, repeats=1 if quick else 8)
  size = {name: size for name, (_, size) in made.items()}
  print(f"{rows} rows of {length} tokens | seconds | megabytes")
  for name in made:
    print(f"{name} | {seconds[name]:.3f} | {size[name] / 1e6:.2f}")
  routed = rows * length * cfg.num_layers * cfg.experts_per_token
  print(json.dumps({"seconds": seconds, "bytes": size, "choices": routed}))


if __name__ == "__main__":
  main()
