"""Tokens per second of the sampler, and what short answers cost in a long run.

  python -m benchmarks.sampler [--quick]

The policy is the embedded default's, with random weights. Answers of N tokens
are had by allowing a stop only from token N on, where nearly every token is
one. The runs to compare alternate, and the least time of each counts.
"""

import argparse
import functools
import json
import time

import jax
import numpy as np

from gspo_jax import model, sampler


def compiled(cfg, params, prompts, most: int, stop_at: int, group: int):
  """A call that draws answers of `stop_at` tokens, `most` being allowed."""
  draw = sampler.SamplerConfig(
    group_size=group,
    max_new_tokens=most,
    min_new_tokens=stop_at,
    stop_ids=tuple(range(1, cfg.vocab_size)),
  )
  generate = jax.jit(functools.partial(sampler.generate, cfg=cfg, sampler=draw))
  return lambda key: generate(params, prompts=prompts, key=jax.random.key(key))


def least_seconds(calls: dict, repeats: int) -> tuple[dict, dict]:
  """Least seconds of each call, taken in turns, and the tokens it drew."""
  seconds = dict.fromkeys(calls, float("inf"))
  tokens = {
    name: int(jax.block_until_ready(call(0)).lengths.sum())
    for name, call in calls.items()
  }
  for repeat in range(1, repeats + 1):
    for name, call in calls.items():
      began = time.monotonic()
      jax.block_until_ready(call(repeat))
      seconds[name] = min(seconds[name], time.monotonic() - began)
  return seconds, tokens


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  quick = parser.parse_args().quick
  questions, group = (2, 2) if quick else (32, 8)
  # Neither 96 nor 960 is where the cache ends a doubling: no lucky numbers.
  short, long = (8, 80) if quick else (96, 960)
  cfg = model.variant("tiny", dtype="float32")
  params = model.init(jax.random.key(0), cfg)
  prompts = sampler.Prompts(
    np.zeros((questions, 32), np.int32), np.full(questions, 26, np.int32)
  )
  make = functools.partial(compiled, cfg, params, prompts, group=group)
  seconds, tokens = least_seconds(
    {
      "short of short": make(short, short),
      "short of long": make(long, short),
      "long of long": make(long, long),
    },
    repeats=1 if quick else 5,
  )
  print("answers of / at most | tokens | seconds | tokens/s")
  sizes = [(short, short), (short, long), (long, long)]
  for (answer, most), name in zip(sizes, seconds, strict=True):
    rate = tokens[name] / seconds[name]
    print(
      f"{answer:4d} / {most:4d} | {tokens[name]} | {seconds[name]:.3f} | "
      f"{rate:.0f}"
    )
  ratio = seconds["short of long"] / seconds["short of short"]
  print(f"short answers, long maximum over short maximum: {ratio:.2f}")
  print(json.dumps({"seconds": seconds, "tokens": tokens, "ratio": ratio}))


if __name__ == "__main__":
  main()
