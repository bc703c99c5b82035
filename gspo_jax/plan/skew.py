"""How unevenly tokens choose experts, and so the devices that share these.

The popularity of experts is lognormal, drawn anew for each layer. A token
chooses by it, without replacement; a device has neighbours.
"""

import math

import numpy as np

from gspo_jax.model import ModelConfig, experts
from gspo_jax.plan.derates import GroupLoads, Loads
from gspo_jax.plan.lower import Planned
from gspo_jax.record import json_lines
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError, prefixed

_METRIC = "moe/load_max"
_LAYERS = 128  # that are drawn
_TOKENS = 1024  # at most; the loads of more are hardly more even
_OF_AN_UPDATE = 8192  # the loads of single experts are, of more than 1024
_MOST = 4.0


def parse(text: str, cfg: ModelConfig) -> float:
  """The coefficient of variation that `--skew` names; see `plan.__main__`."""
  expected = (
    f"--skew={text}: expected a coefficient of variation from 0 to {_MOST:g}, "
    f"or metrics.jsonl of a run with {_METRIC}"
  )
  try:
    skew = float(text)
  except ValueError:
    with prefixed(f"--skew={text}"):
      rows = [x.record for x in json_lines.read(text, drop_partial=True)]
    busiest = [row[_METRIC] for row in rows if row.get(_METRIC)]
    if not busiest or not cfg.num_experts:
      raise UserError(expected) from None
    return _like(busiest[-1], cfg)
  if not 0 <= skew <= _MOST:
    raise UserError(expected)
  return skew


def _like(busiest: float, cfg: ModelConfig) -> float:
  """The skew, to .03, with which the busiest expert has this load."""
  low, high = 0.0, _MOST
  while high - low > 0.03:
    middle = (low + high) / 2
    counts = _tokens_of_experts(middle, _OF_AN_UPDATE, cfg, layers=8)
    load = (counts.max(1) / counts.mean(1)).mean()
    low, high = (low, middle) if load >= busiest else (middle, high)
  return low


def loads(planned: Planned, skew: float) -> GroupLoads:
  """The loads of the learner's and the sampler's devices; even without skew."""
  program = planned.program
  generate, rows = program.sampler.generate, program.learner.packing
  cfg, k = program.cfg, program.cfg.experts_per_token

  def of(mesh, tokens):
    devices = mesh.shape["expert"]
    if not skew or devices == 1 or not cfg.num_experts:
      return Loads()
    tokens = math.ceil(tokens * devices / sharding.batch_shards(mesh))
    chunk = experts.chunk_rows(tokens * k, devices) * devices / (tokens * k)
    counts = _tokens_of_experts(skew, min(tokens, _TOKENS), cfg)
    of_devices = counts.reshape(_LAYERS, devices, -1).sum(2)
    busiest = of_devices.max(1) / of_devices.mean(1)
    return Loads(float(busiest.mean()), float((busiest > chunk).mean()))

  sizes = generate.compute_sizes if generate.batching else [planned.decode_rows]
  return (
    of(program.mesh, rows.micro_batch_size * rows.width),
    {size: of(generate.mesh, size) for size in sizes},
  )


def _tokens_of_experts(skew, tokens, cfg, layers=None) -> np.ndarray:
  """[layers, experts]; the same draws for any skew."""
  rng, E = np.random.default_rng(0), cfg.num_experts
  sigma, k, counts = math.sqrt(math.log1p(skew**2)), cfg.experts_per_token, []
  for popularity_E in sigma * rng.standard_normal((layers or _LAYERS, E)):
    # With this noise, the k largest are a sample without replacement.
    noise = rng.gumbel(size=(tokens, E))
    chosen = np.argpartition(popularity_E + noise, -k)[:, -k:]
    counts.append(np.bincount(chosen.ravel(), minlength=E))
  return np.array(counts)
