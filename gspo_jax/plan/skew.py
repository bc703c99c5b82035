"""How unevenly tokens choose experts, and the devices that share these.

The popularity of experts is lognormal, drawn anew for each layer; a token
chooses its experts by it, without replacement. Devices have neighbours.
"""

import math

import numpy as np

from gspo_jax.model import ModelConfig, experts
from gspo_jax.plan.derates import GroupLoads, Loads
from gspo_jax.plan.lower import Planned
from gspo_jax.record import json_lines
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError, prefixed

METRIC = "moe/load_max"
_LAYERS = 128  # that are drawn
_TOKENS = 1024  # at most; the loads of more are hardly more even
_MOST = 4.0
_BISECTIONS = 8


def parse(text: str, cfg: ModelConfig) -> float:
  """The coefficient of variation that `--skew` names; see `plan.__main__`."""
  expected = (
    f"--skew={text}: expected a coefficient of variation from 0 to {_MOST:g}, "
    f"or a run's metrics.jsonl with {METRIC}"
  )
  try:
    skew = float(text)
  except ValueError:
    with prefixed(f"--skew={text}"):
      rows = [line.record for line in json_lines.read(text, drop_partial=True)]
    loads = [row[METRIC] for row in rows if row.get(METRIC)]
    if not loads or not cfg.num_experts:
      raise UserError(expected) from None
    skew = _fit(loads[-1], cfg)
  if not 0 <= skew <= _MOST:
    raise UserError(expected)
  return skew


def _fit(load_max: float, cfg: ModelConfig) -> float:
  """The skew with which the busiest expert has this load over the mean."""
  busiest = lambda x: (x.max(1) / x.mean(1)).mean()
  low, high = 0.0, _MOST
  for _ in range(_BISECTIONS):
    middle = (low + high) / 2
    if busiest(_tokens_of_experts(middle, _TOKENS, cfg)) < load_max:
      low = middle
    else:
      high = middle
  return low


def loads(planned: Planned, skew: float) -> GroupLoads:
  """The loads of the learner's and the sampler's devices."""
  program = planned.program
  generate, rows = program.sampler.generate, program.learner.packing
  group = lambda mesh: mesh.shape["expert"] / sharding.batch_shards(mesh)
  of = lambda mesh, tokens: _loads(
    skew, math.ceil(tokens * group(mesh)), mesh.shape["expert"], program.cfg
  )
  sizes = generate.compute_sizes if generate.batching else [planned.decode_rows]
  return (
    of(program.mesh, rows.micro_batch_size * rows.width),
    {size: of(generate.mesh, size) for size in sizes},
  )


def _loads(skew, tokens, devices, cfg) -> Loads:
  if not skew or devices == 1 or not cfg.num_experts:
    return Loads()
  k = cfg.experts_per_token
  chunk = experts.chunk_rows(tokens * k, devices) * devices / (tokens * k)
  counts = _tokens_of_experts(skew, min(tokens, _TOKENS), cfg)
  of_devices = counts.reshape(_LAYERS, devices, -1).sum(2)
  busiest = of_devices.max(1) / of_devices.mean(1)
  return Loads(float(busiest.mean()), float((busiest > chunk).mean()))


def _tokens_of_experts(skew, tokens, cfg) -> np.ndarray:
  """[layers, experts]; the same draws for any skew."""
  E, k = cfg.num_experts, cfg.experts_per_token
  rng = np.random.default_rng(0)
  sigma = math.sqrt(math.log1p(skew**2))
  counts = []
  for popularity_E in sigma * rng.standard_normal((_LAYERS, E)):
    # With this noise, the k largest are a sample without replacement.
    noise = rng.gumbel(size=(tokens, E))
    chosen = np.argpartition(popularity_E + noise, -k)[:, -k:]
    counts.append(np.bincount(chosen.ravel(), minlength=E))
  return np.array(counts)
