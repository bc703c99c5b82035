"""What padding costs an update: one response a row, against packed rows.

  python -m benchmarks.padding [--quick] [--json] [--out=FILE.json]

Update and score (the old log-probs) of the embedded model on one core, with
responses of two distributions of lengths: `long_tailed` (their median is a
tenth of the maximum, and 5 % are that long) and `lognormal` (their mean is a
quarter of it before they are cut). A minibatch has 64 responses, a micro-batch
two rows. The padded and the packed rows run in turns through the same
compiled program, and the median counts. `buckets` is the alternative that was
not built: one response a row, but each row has the narrowest of the widths T,
T/2, T/4 and T/8 that holds it, a program for each width.

The last line is JSON; --json prints nothing else. `useful_fraction` is real
tokens over computed ones, and a speedup is padded over packed seconds; at the
top level they are those of the worse distribution.
"""

import argparse
import dataclasses
import functools
import os
import statistics
from pathlib import Path

if __name__ == "__main__":  # before JAX starts its threads
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import jax
import numpy as np

from benchmarks import lengths, record
from benchmarks.iteration import timed
from gspo_jax.configs import tiny_cpu
from gspo_jax.learner import packing, train_step
from gspo_jax.model.moe import number_type
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import STOPPED, Prompts, Samples

DISTRIBUTIONS = {
  "long_tailed": lengths.long_tailed,
  "lognormal": lengths.lognormal,
}
_SHARES = (1, 2, 4, 8)  # of T: the widths of the buckets


def config_of(quick: bool):
  """Prompts of at most 32 tokens, four minibatches of 64 responses."""
  c = tiny_cpu.get_config("debug" if quick else "")
  c.data.prompts, c.rollout.group_size = (16, 4) if quick else (32, 8)
  c.sampler.max_new_tokens = 56 if quick else 480
  c.learner.minibatches = 2 if quick else 4
  c.learner.micro_batch_size = 1 if quick else 2
  return c


def responses(config, new_tokens: np.ndarray) -> tuple[Prompts, Samples]:
  """Random tokens; prompts of 16 to 32 tokens, or of half that."""
  rng, S = np.random.default_rng(0), config.data.max_prompt_length
  P, B, R = config.data.prompts, len(new_tokens), config.sampler.max_new_tokens
  ids = lambda *shape: rng.integers(0, 256, shape).astype(np.int32)
  samples = Samples(
    tokens=ids(B, R),
    logps=rng.normal(-2, 0.1, (B, R)).astype(np.float32),
    lengths=new_tokens,
    finish=np.full(B, STOPPED, np.int8),
    slot_steps=np.int32(0),
  )
  prompts = Prompts(ids(P, S), rng.integers(S // 2, S + 1, P).astype(np.int32))
  return jax.tree.map(jax.numpy.asarray, (prompts, samples))


class Learning:
  """Score and update of one config; `seconds` times both."""

  def __init__(self, config):
    self.config = parse(config)
    self.mesh = sharding.make_mesh(jax.devices()[:1])
    self.program = build_program(self.config, self.mesh)
    params = self.program.init_params(jax.random.key(0))
    self.state = self.program.learner.init_state(params)
    learner = settings.policy_learner(self.config, self.program.cfg)
    self._bucket_step = jax.jit(
      functools.partial(_bucket_step, learner=learner), static_argnames="cfg"
    )

  def seconds(self, prompts, samples, placement) -> dict[str, float]:
    learner = self.program.learner
    batch = learner.make_train_batch(prompts, samples, placement)
    rewards = jax.random.uniform(jax.random.key(1), samples.lengths.shape)
    batch = learner.assign_advantages(batch, rewards, samples.finish)
    jax.block_until_ready(batch)
    (self.state, batch, _), score = timed(
      learner.compute_old_logps, self.state, batch
    )
    (self.state, _, _), update = timed(learner.update, self.state, batch)
    return {"score": score, "update": update}

  def buckets(self, prompts, samples, repeats: int) -> tuple[int, float]:
    """Computed tokens, and seconds of one update of rows in four widths."""
    cfg = self.program.learner.packing
    group_size = self.config.rollout.group_size
    prompt_lengths = np.repeat(prompts.lengths, group_size)
    whole = prompt_lengths + np.asarray(samples.lengths)
    tokens, seconds = 0, 0.0
    for share in _SHARES:
      width, size = cfg.width // share, cfg.micro_batch_size * share
      narrower = cfg.width // (2 * share) if share < max(_SHARES) else 0
      chosen = np.flatnonzero((whole <= width) & (whole > narrower))
      row = np.full(len(whole), len(whole), np.int32)  # the others: nowhere
      row[chosen] = np.arange(len(chosen))
      count = np.array([-(-len(chosen) // size)], np.int32)
      placement = packing.Packing(row, np.zeros_like(row), count)
      step = functools.partial(
        self._bucket_step,
        self.state,
        prompts,
        samples,
        placement,
        cfg=packing.PackingConfig(width, 1, size),
      )
      tokens += int(count[0]) * size * width
      timed(step)  # compiles
      seconds += statistics.median(timed(step)[1] for _ in range(repeats))
    return tokens, seconds


def _bucket_step(state, prompts, samples, placement, *, learner, cfg):
  batch = packing.pack_responses(
    prompts,
    samples.tokens,
    samples.lengths,
    placement,
    cfg,
    logps=samples.logps,
  )
  rows = dataclasses.replace(
    batch.rows,
    old_logps=batch.rows.sampler_logps,
    advantages=batch.rows.sampler_logps + 2,
  )
  rows = dataclasses.replace(rows, **_routing(rows, learner.loss.keywords))
  return train_step.update(state, batch._replace(rows=rows), learner=learner)


def _routing(rows, keywords) -> dict:
  """The fields of the routing, as the program has them."""
  cfg, (*lead, T) = keywords["cfg"], rows.tokens.shape
  L, k = cfg.num_layers, cfg.experts_per_token
  zeros = lambda T, dtype: jax.numpy.zeros((*lead, L, T, k), dtype)
  return {
    "experts": zeros(T, number_type(cfg.num_experts)),
    "router_logps": zeros(T - 1, np.float32),
  }


def measure(learning: Learning, config, name: str, repeats: int) -> dict:
  """Fractions and seconds with lengths of one of `DISTRIBUTIONS`."""
  learner = learning.program.learner
  cfg, B = learner.packing, config.data.prompts * config.rollout.group_size
  new_tokens = DISTRIBUTIONS[name](B, config.sampler.max_new_tokens)
  prompts, samples = responses(config, new_tokens)
  key = jax.random.key(2)
  order = packing.shuffled_groups(
    key, config.data.prompts, config.rollout.group_size
  )
  placements = {
    "padded": packing.pack(np.full(B, cfg.width), order, cfg),
    "packed": learner.pack(np.asarray(prompts.lengths), new_tokens, key),
  }
  times = {k: {"score": [], "update": []} for k in placements}
  learning.seconds(prompts, samples, placements["packed"])  # compiles
  for _ in range(repeats):
    for kind, placement in placements.items():
      one = learning.seconds(prompts, samples, placement)
      for phase, seconds in one.items():
        times[kind][phase].append(seconds)
  real = int(new_tokens.sum())
  real += int(np.repeat(prompts.lengths, config.rollout.group_size).sum())
  computed = {
    kind: int(p.num_micro_batches.sum()) * cfg.micro_batch_size * cfg.width
    for kind, p in placements.items()
  }
  median = {
    kind: {phase: statistics.median(x) for phase, x in phases.items()}
    for kind, phases in times.items()
  }
  bucket_tokens, bucket_seconds = learning.buckets(prompts, samples, repeats)
  padded, packed = median["padded"], median["packed"]
  share = real / computed["padded"]
  return {
    "useful_fraction": real / computed["packed"],
    "useful_fraction_padded": share,
    "useful_fraction_buckets": real / bucket_tokens,
    "speedup_update": padded["update"] / packed["update"],
    "speedup_score": padded["score"] / packed["score"],
    "speedup_update_buckets": padded["update"] / bucket_seconds,
    # 1: the time fell as the tokens did.
    "update_over_ideal": packed["update"] / (share * padded["update"]),
    "score_over_ideal": packed["score"] / (share * padded["score"]),
    "seconds": median | {"buckets": {"update": bucket_seconds}},
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="debug sizes")
  parser.add_argument("--json", action="store_true", help="print only JSON")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  config, repeats = config_of(args.quick), 1 if args.quick else 3
  learning = Learning(config)
  found = {
    name: measure(learning, config, name, repeats) for name in DISTRIBUTIONS
  }
  if not args.json:
    for name, row in found.items():
      print(name)
      for key, value in row.items():
        if key != "seconds":
          print(f"  {key} {value:.3f}")
  worst = {
    key: min(row[key] for row in found.values())
    for key in ("useful_fraction", "speedup_update", "speedup_score")
  }
  record.finish("padding", worst | {"distributions": found}, args.out)


if __name__ == "__main__":
  main()
