"""Conversations that take their turns together against ones that do not wait.

  python -m benchmarks.async_turns [--quick] [--out=FILE.json]

16 conversations of four turns, of random weights of the embedded default's
size. A response has 32 tokens on average, and its environment sleeps before it
answers: not at all, or for an exponential time of mean .5 s. The calls
alternate, and the median of each counts: the seconds of `rollout.mode=async` as
a share of those of `sync`.
"""

import argparse
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks import record
from gspo_jax import model
from gspo_jax.data import tokenizers
from gspo_jax.data.problem import Problem
from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.rollout.async_conversations import AsyncConversations
from gspo_jax.rollout.conversations import Conversations
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.rollout.sequences import SequenceLimits
from gspo_jax.runtime import sharding
from gspo_jax.sampler.continuous import build_continuous_sampler
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.engine import build_engine_sampler
from gspo_jax.sampler.samples import SamplerConfig

_TURNS, _PROMPT, _TOKENS = 4, 16, 320
_PROMPTS, _GROUP = 4, 4
_WARM_UP = 3  # calls that compile programs for other numbers of rows


class Sleeps:
  """Answers "go on" after some time; `mean` is in seconds."""

  def __init__(self, *, mean: float):
    self.mean = mean

  def reset(self, problem, seed):
    self.turns = 0
    return ()

  def step(self, response):
    # Other conversations and turns sleep for other times.
    seed = [self.turns, *response.encode()]
    time.sleep(self.mean * np.random.default_rng(seed).exponential())
    self.turns += 1
    return [("user", "go on")], self.turns == _TURNS, 0.0


def build():
  """Weights, and the sampler of each mode."""
  tokenizer = tokenizers.load("bytes")
  cfg = model.variant("tiny", vocab_size=tokenizer.vocab_size)
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), cfg)
  # One of 32 ids ends a response.
  stop_ids = tuple(range(0, cfg.vocab_size, 32))
  sampling = SamplerConfig(
    _GROUP, _TOKENS, stop_ids=stop_ids, pad_id=tokenizer.pad_id
  )
  places = {
    "batching": ContinuousBatchingConfig(
      slots=_PROMPTS * _GROUP, page_size=16, prefill_chunk=64
    ),
    "params_sharding": model.shardings(params, mesh),
    "mesh": mesh,
    "sampler_mesh": mesh,
  }
  together = build_continuous_sampler(
    cfg, sampling, max_prompt_length=_PROMPT, **places
  )
  alone = build_engine_sampler(
    cfg, sampling, context=_PROMPT + _TOKENS, **places
  )
  return mesh, params, PromptConfig(tokenizer, _PROMPT), together, alone


def prompts() -> PromptBatch:
  P = _PROMPTS
  return PromptBatch(
    [Problem(str(p), "", "") for p in range(P)],
    np.tile(np.arange(1, P + 1, dtype=np.int32)[:, None], (1, _PROMPT)),
    np.full(P, _PROMPT, np.int32),
    np.zeros((P, 3), np.int32),
    np.zeros(P, np.int32),
  )


def seconds(mean: float, repeats: int) -> dict:
  mesh, params, prompt_config, together, alone = build()
  of_run = {
    "prompt_config": prompt_config,
    "batch_sharding": sharding.batch_sharding(mesh),
    "stop": None,
  }
  spec = f"benchmarks.async_turns.Sleeps:mean={mean}"
  took = {"sync": [], "async": []}
  with (
    jax.set_mesh(mesh),
    EnvironmentPool(spec, workers=_PROMPTS * _GROUP) as pool,
  ):
    limits = SequenceLimits(_TURNS, 1, _PROMPT, _TOKENS)
    plays = {
      "sync": (Conversations(pool, _TURNS, **of_run), together),
      "async": (AsyncConversations(pool, limits, **of_run), alone),
    }
    for repeat in range(_WARM_UP + repeats):
      for mode, (play, sampler) in plays.items():
        start = time.monotonic()
        play(sampler, params, prompts(), jax.random.key(repeat), label=mode)
        took[mode].append(time.monotonic() - start)
  return {mode: statistics.median(x[_WARM_UP:]) for mode, x in took.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  results = []
  for mean in (0.01,) if args.quick else (0.0, 0.5):
    took = seconds(mean, 1 if args.quick else 9)
    share = took["async"] / took["sync"]
    rounded = {mode: round(value, 3) for mode, value in took.items()}
    results.append({"mean": mean, "share": round(share, 3)} | rounded)
  record.finish("async_turns", {"results": results}, args.out)


if __name__ == "__main__":
  main()
