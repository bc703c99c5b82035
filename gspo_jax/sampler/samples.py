"""Prompts and samples: what goes into a sampler, and what comes out."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import model
from gspo_jax.model.moe import number_type
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.sharding import batch_sharding, replicated

# Samples.finish; what is unfinished may be continued, by `paged_sampler` alone.
UNFINISHED, STOPPED, TRUNCATED = 2, 1, 0


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """How answers are drawn; hashable, so that it is static under jit.

  Attributes:
    group_size: G, answers a prompt.
    max_new_tokens: R; a row that reaches it is cut there.
    stop_ids: tokens that end an answer; the one drawn is part of it.
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: draw among the k likeliest tokens, and those that tie with the k-th;
      0 for all.
    top_p: draw among the fewest likeliest tokens of this total probability.
    min_new_tokens: no stop token before this many tokens.
    pad_id: fills a row after its end.
    record_routing: report which experts each token went to.
  """

  group_size: int
  max_new_tokens: int
  stop_ids: tuple[int, ...]
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_new_tokens: int = 1
  pad_id: int = 0
  record_routing: bool = False

  def __post_init__(self):
    for name, good, expected in (
      ("group_size", self.group_size >= 1, "at least 1"),
      ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
      ("stop_ids", len(self.stop_ids) >= 1, "at least one token"),
      ("temperature", self.temperature >= 0, "0 or more"),
      ("top_k", self.top_k >= 0, "0 (all) or more"),
      ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
      (
        "min_new_tokens",
        0 <= self.min_new_tokens <= self.max_new_tokens,
        f"0 to max_new_tokens={self.max_new_tokens}",
      ),
    ):
      if not good:
        value = getattr(self, name)
        raise UserError(f"sampler.{name}={value!r}: expected {expected}")

  @property
  def truncates(self) -> bool:
    """Whether some tokens cannot be drawn (the run logs that it is so)."""
    return self.top_k > 0 or self.top_p < 1 or self.min_new_tokens > 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
  """A batch of prompts, padded on the LEFT, so that answers start in line.

  Attributes:
    tokens: [P, S] int32.
    lengths: [P] int32, real tokens, at least 1.
  """

  tokens: jax.Array
  lengths: jax.Array

  @property
  def mask(self) -> jax.Array:
    """[P, S] bool, false at padding."""
    S = self.tokens.shape[1]
    return jnp.arange(S) >= S - self.lengths[:, None]

  @property
  def positions(self) -> jax.Array:
    """[P, S] int32, 0 at the first real token (and at padding)."""
    S = self.tokens.shape[1]
    return jnp.maximum(jnp.arange(S) - (S - self.lengths[:, None]), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samples:
  """Answers; row p * G + g is answer g to prompt p.

  Attributes:
    tokens: [B, R] int32, `pad_id` after the end.
    logps: [B, R] float32 log-probs of the UNTRUNCATED tempered distribution
      (of the plain one at temperature 0), 0 after the end. The stop token has
      one, too.
    lengths: [B] int32, tokens drawn, the stop token included.
    finish: [B] int8, why the row ended: STOPPED or TRUNCATED; or UNFINISHED.
    slot_steps: [] int32, decode steps times the rows that took them; those that
      drew a token of an answer were useful.
    experts: [B, L, S + R, k] unsigned, those of the prompt's tokens and of the
      answer's; any k, where no token was fed: the last one of a row never is.
      None unless recorded, and for a dense model.
  """

  tokens: jax.Array
  logps: jax.Array
  lengths: jax.Array
  finish: jax.Array
  slot_steps: jax.Array
  experts: jax.Array | None = None


def empty_samples(
  prompts: int, slots: int, cfg: model.ModelConfig, sampler: SamplerConfig
) -> Samples:
  """All answers to so many prompts of S slots, of which none has a token."""
  B, R = prompts * sampler.group_size, sampler.max_new_tokens
  experts = None
  if sampler.record_routing and cfg.num_experts:
    numbers = number_type(cfg.num_experts)
    first_k = jnp.arange(cfg.experts_per_token, dtype=numbers)
    shape = B, cfg.num_layers, slots + R, cfg.experts_per_token
    experts = jnp.broadcast_to(first_k, shape)
  return Samples(
    tokens=jnp.full((B, R), sampler.pad_id, jnp.int32),
    logps=jnp.zeros((B, R)),
    lengths=jnp.zeros(B, jnp.int32),
    finish=jnp.full(B, UNFINISHED, jnp.int8),
    slot_steps=jnp.int32(0),
    experts=experts,
  )


class FinishedResponse(NamedTuple):
  """An answer that has ended.

  Attributes:
    tokens: [R] int32; what comes after its end is no part of it.
    length: tokens, the stop token included.
    stopped: whether the last one is a stop token.
  """

  tokens: np.ndarray
  length: int
  stopped: bool


def samples_sharding(
  sampler: SamplerConfig, mesh: jax.sharding.Mesh
) -> Samples:
  """Where samples lie."""
  of_rows = batch_sharding(mesh)
  return Samples(
    *[of_rows] * 4,
    slot_steps=replicated(mesh),
    experts=of_rows if sampler.record_routing else None,
  )


def merge_groups(kept, new, index: jax.Array):
  """Groups `index` of the 2 P groups that `kept` and `new` have end to end.

  Args:
    kept: a pytree of [P * G, ...], the rows of a group side by side. A scalar,
      such as a count of steps, is added to that of `new`.
    new: the same.
    index: [P] integers below 2 P.

  Returns:
    The same pytree of P groups in the order of `index`.
  """
  count = len(index)
  old = index < count
  from_kept, from_new = (
    jnp.where(old, index, 0),
    jnp.where(old, 0, index - count),
  )

  def pick(a, b):
    cut = lambda x: x.reshape(count, -1, *x.shape[1:])
    first = old.reshape(count, *[1] * a.ndim)
    # Not of the two joined: XLA would pass them between devices three times.
    both = jnp.where(first, cut(a)[from_kept], cut(b)[from_new])
    return both.reshape(a.shape)

  def join(a, b):
    if a.ndim == 0:
      return a + b
    if a.ndim < 3:
      return pick(a, b)
    # By its second axis, the layers of routing: whole arrays pass between
    # devices, and these are the largest of all.
    swap = lambda x: x.swapaxes(0, 1)
    return swap(jax.lax.map(lambda ab: pick(*ab), (swap(a), swap(b))))

  return jax.tree.map(join, kept, new)


def take_groups(
  samples: Samples,
  index: jax.Array,
  *,
  cfg: model.ModelConfig,
  sampler: SamplerConfig,
) -> Samples:
  """Groups `index` of samples, and a group of which nothing is drawn for -1.

  The count of slot-steps is that of all.

  Args:
    samples: of Q groups, without routing.
    index: [N] integers from -1 on, below Q.
    cfg: the model; static.
    sampler: how they are drawn; static.
  """
  group, steps = sampler.group_size, samples.slot_steps
  empty = empty_samples(len(index), 0, cfg, sampler)
  cut = lambda x: x.reshape(-1, group, *x.shape[1:])

  def pick(x, empty):
    there = (index >= 0).reshape(-1, *[1] * x.ndim)
    found = cut(x)[jnp.maximum(index, 0)]
    return jnp.where(there, found, cut(empty)).reshape(empty.shape)

  bare = lambda s: dataclasses.replace(s, slot_steps=None)
  picked = jax.tree.map(pick, bare(samples), bare(empty))
  return dataclasses.replace(picked, slot_steps=steps)
