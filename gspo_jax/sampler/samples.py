"""The input and the output of a sampler: Prompts and Samples.

Dimension key: P prompts, G responses a prompt, B = P * G responses, S prompt
length, R most new tokens, L layers, k experts, K kept ids, H ids of the head.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import model
from gspo_jax.model.moe import number_type
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.key import (
  AT_LEAST_1,
  SHARE,
  ZERO_OR_MORE,
  Range,
  check,
  key,
)
from gspo_jax.runtime.sharding import Array, Tree, batch_sharding, replicated
from gspo_jax.sampler.stop_strings import StopStrings

# Values of Samples.finish. Only `ContinuousSampler` continues the unfinished.
UNFINISHED, STOPPED, TRUNCATED = 2, 1, 0


class SamplingParams(NamedTuple):
  """What a request may choose; as the keys of `SamplerConfig`."""

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0


def _are_strings(stop) -> bool:
  return isinstance(stop, StopStrings | None) or (
    not isinstance(stop, str) and all(isinstance(s, str) and s for s in stop)
  )


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """Sampling parameters; hashable, so they are static under jit.

  A stop token, or the token that completes a stop string, is part of the
  response. A sampler needs a stop token, and `stop` as StopStrings.
  """

  group_size: int = 1  # G, responses a prompt
  max_new_tokens: int = key(
    64, "tokens of a response, the stop token included", AT_LEAST_1
  )
  stop_ids: tuple[int, ...] = ()  # tokens that end a response
  temperature: float = key(
    1.0,
    "divides the logits",
    Range(
      "more than 0, or 0 for a greedy evaluation", lambda x: 0 <= x < math.inf
    ),
  )
  top_k: int = key(
    0,
    "sample among the k likeliest tokens; 0: all",
    ZERO_OR_MORE,
  )
  top_p: float = key(
    1.0,
    "sample among the fewest likeliest tokens of this total probability; 1: "
    "all",
    Range("more than 0, at most 1", lambda x: 0 < x <= 1),
  )
  min_p: float = key(
    0.0,
    "sample among the tokens of at least this share of the likeliest one's "
    "probability; 0: all",
    SHARE,
  )
  kept_ids: int = key(
    64,
    "with top_k, top_p or min_p log-probs are over the ids that these leave, "
    "in the sampler and in the update; if top_k is 0, they leave so many at "
    "most. 0: log-probs are over all ids, and samples are off-policy",
    ZERO_OR_MORE,
  )
  stop: StopStrings | tuple[str, ...] | None = key(
    (),
    'strings that also end a response, such as ("</answer>",); they stay in '
    "it. A newline or a comma in one needs Python's notation in a shell: "
    "\"('\\n\\n',)\".",
    Range("strings that are not empty, as in ('</answer>',)", _are_strings),
  )
  # The shortest length at which a stop token is allowed, and at which a stop
  # string ends a response. A benchmark sets it.
  min_new_tokens: int = 1
  pad_id: int = 0  # of the tokens after the end of a response
  speculation: int = 0  # `continuous_batching.speculation`
  record_routing: bool = False  # whether Samples hold the experts of tokens
  head_ids: int = 0  # `objective.score_centering`

  def __post_init__(self):
    check(self, "sampler")
    if self.group_size < 1:
      raise UserError(
        f"rollout.group_size={self.group_size}: expected at least 1"
      )
    if not 0 <= self.min_new_tokens <= self.max_new_tokens:
      raise UserError(
        f"min_new_tokens={self.min_new_tokens}: expected 0 to "
        f"sampler.max_new_tokens={self.max_new_tokens}"
      )

  def require_stops(self) -> None:
    if not self.stop_ids:
      raise UserError("stop_ids=(): expected at least one token")
    if self.stop and not isinstance(self.stop, StopStrings):
      raise UserError(
        f"stop={self.stop!r}: expected StopStrings of these strings"
      )

  @property
  def params(self) -> SamplingParams:
    return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)

  @property
  def truncates(self) -> bool:
    """Whether top_k, top_p or min_p may leave out a token."""
    return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

  @property
  def keeps_ids(self) -> bool:
    """Whether Samples have `kept_ids`."""
    return self.truncates and self.kept_ids > 0

  def num_kept(self, vocab_size: int) -> int:
    """K, the most ids that a token is sampled among; 0: none are kept."""
    bound = self.top_k or self.kept_ids
    return min(bound, vocab_size) if self.keeps_ids else 0

  def num_head(self, vocab_size: int) -> int:
    """H, the ids of a head; 0: none are recorded."""
    return min(self.head_ids, self.num_kept(vocab_size) or vocab_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
  """A batch of prompts, padded on the LEFT: all responses start at column S.

  Attributes:
    tokens: [P, S] int32.
    lengths: [P] int32, real tokens of each, at least 1.
  """

  tokens: Array
  lengths: Array

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
  """Responses to a batch of prompts; row p * G + g is response g to prompt p.

  Attributes:
    tokens: [B, R] int32, `pad_id` after the end.
    logps: [B, R] float32, 0 after the end: log-probs of the distribution that
      the token was sampled from, at temperature 0 of that at temperature 1.
      The stop token has one, too. Without `kept_ids` they are of all tokens,
      also of those that top_k, top_p, min_p or a minimum length left out.
    lengths: [B] int32, tokens of each response, including the stop token or the
      token that completes a stop string.
    finish: [B] int8, STOPPED, TRUNCATED or UNFINISHED.
    slot_steps: [] int32, the sum over decode steps of the slots computed, with
      speculation of the tokens read. Sampled tokens divided by it are the
      useful share.
    experts: [B, L, S + R, k] unsigned integers, the experts of the tokens of
      prompt and response. A token keeps those of the first call that fed it; a
      later call, which may have other weights, only reads it again. Tokens that
      were not fed (padding, the last token of a response) have any k experts.
      None for a dense model, or without `record_routing`.
    kept_ids: [B, K, R] int32, the ids that a token was sampled among: what
      top_k, top_p, min_p and a minimum length left. The likeliest is first, and
      fills up the K. After the end, and where an environment wrote, any ids.
      None unless `SamplerConfig.keeps_ids`.
    head_ids: [B, H, R] int32, the likeliest ids of the distribution that a
      token was sampled from, the likeliest first; beside `kept_ids`.
    head_logps: [B, H, R] float32, their log-probs in it; -inf: no id. Both
      None unless `SamplerConfig.head_ids`.
    turns: [B, R] int16, in a conversation with an environment the turn, from 1,
      whose response has the token; 0 for tokens that the policy did not write.
      None for samples of one turn.
    drafts: how often a response drafted tokens, and drafted tokens that were
      accepted, both [] int32, in the last call of the sampler; None without
      speculation.
    prompts: of each of the B rows, in episodes of environments and agents.
      None: G rows have the prompt of their problem.
  """

  tokens: jax.Array
  logps: jax.Array
  lengths: jax.Array
  finish: jax.Array
  slot_steps: jax.Array
  experts: jax.Array | None = None
  kept_ids: jax.Array | None = None
  turns: jax.Array | None = None
  drafts: tuple[jax.Array, jax.Array] | None = None
  prompts: Prompts | None = None
  head_ids: jax.Array | None = None
  head_logps: jax.Array | None = None

  @property
  def num_sampled(self) -> jax.Array:
    return self.lengths.sum() if self.turns is None else (self.turns > 0).sum()


def empty_samples(
  num_prompts: int,
  prompt_length: int,
  cfg: model.ModelConfig,
  sampler: SamplerConfig,
  *,
  turns: bool = False,
) -> Samples:
  """Samples of P * G UNFINISHED responses without tokens.

  `turns`: with the fields of episodes.
  """
  B, R = num_prompts * sampler.group_size, sampler.max_new_tokens
  experts = None
  if sampler.record_routing and cfg.num_experts:
    dtype = number_type(cfg.num_experts)
    first_k = jnp.arange(cfg.experts_per_token, dtype=dtype)
    shape = B, cfg.num_moe_layers, prompt_length + R, cfg.experts_per_token
    experts = jnp.broadcast_to(first_k, shape)
  K, H = sampler.num_kept(cfg.vocab_size), sampler.num_head(cfg.vocab_size)
  return Samples(
    tokens=jnp.full((B, R), sampler.pad_id, jnp.int32),
    logps=jnp.zeros((B, R)),
    lengths=jnp.zeros(B, jnp.int32),
    finish=jnp.full(B, UNFINISHED, jnp.int8),
    slot_steps=jnp.int32(0),
    experts=experts,
    kept_ids=jnp.zeros((B, K, R), jnp.int32) if K else None,
    head_ids=jnp.zeros((B, H, R), jnp.int32) if H else None,
    head_logps=jnp.zeros((B, H, R)) if H else None,
    turns=jnp.zeros((B, R), jnp.int16) if turns else None,
    prompts=Prompts(
      jnp.zeros((B, prompt_length), jnp.int32), jnp.ones(B, jnp.int32)
    )
    if turns
    else None,
    drafts=(jnp.int32(0),) * 2 if sampler.speculation else None,
  )


class FinishedResponse(NamedTuple):
  tokens: np.ndarray  # [R] int32; ignore the values from `length` on
  length: int  # the stop token included
  stopped: bool  # by a stop token or a stop string


# Gets finished responses on this host's devices, by their row.
OnFinished = Callable[[dict[int, FinishedResponse]], None]


def finished_responses(samples: Samples) -> dict[int, FinishedResponse]:
  """The responses of this host's rows, all finished, by row."""
  lengths = multihost.local_rows(samples.lengths)
  finish = multihost.local_rows(samples.finish)
  return {
    row: FinishedResponse(
      tokens, int(lengths[row]), bool(finish[row] == STOPPED)
    )
    for row, tokens in multihost.local_rows(samples.tokens).items()
  }


def samples_sharding(
  cfg: model.ModelConfig,
  sampler: SamplerConfig,
  mesh: jax.sharding.Mesh,
  *,
  turns: bool = False,
) -> Samples:
  """The sharding of each field that `empty_samples` has."""
  empty = functools.partial(empty_samples, 1, 1, cfg, sampler, turns=turns)
  batch, whole = batch_sharding(mesh), replicated(mesh)
  return jax.tree.map(
    lambda x: batch if x.ndim else whole, jax.eval_shape(empty)
  )


def merge_groups(kept: Tree, new: Tree, index: jax.Array) -> Tree:
  """Selects P of the 2 P groups of two batches, in the order of `index` [P].

  `kept` and `new` are pytrees of arrays [P * G, ...], G neighbours a group; the
  groups of `new` have the numbers P to 2 P - 1. Scalars, such as `slot_steps`,
  are added.
  """
  return _select_groups(kept, new, index, len(index))


def take_groups(
  samples: Samples,
  index: jax.Array,
  *,
  cfg: model.ModelConfig,
  sampler: SamplerConfig,
) -> Samples:
  """Selects groups; -1: an empty group, with any experts. Counts stay."""
  S = 0
  if samples.experts is not None:
    S = samples.experts.shape[2] - sampler.max_new_tokens
  empty = empty_samples(1, S, cfg, sampler)
  P = len(samples.lengths) // sampler.group_size
  return _select_groups(samples, empty, jnp.where(index < 0, P, index), P)


def _select_groups(first: Tree, second: Tree, index: jax.Array, P: int) -> Tree:
  """Selects among P groups of the first batch, then those of the second."""
  is_first = index < P
  first_index = jnp.where(is_first, index, 0)
  second_index = jnp.where(is_first, 0, index - P)

  def select(a, b):
    groups = lambda x: x.reshape(-1, len(a) // P, *x.shape[1:])
    condition = is_first.reshape(-1, *[1] * a.ndim)
    # Indexing their concatenation would pass it between devices three times.
    return jnp.where(
      condition, groups(a)[first_index], groups(b)[second_index]
    ).reshape(-1, *a.shape[1:])

  def merge(a, b):
    if a.ndim == 0:
      return a + b
    if a.ndim < 3:
      return select(a, b)
    # Arrays of layers or of kept ids are large and cross devices whole. So they
    # are moved layer by layer.
    layers = a.swapaxes(0, 1), b.swapaxes(0, 1)
    return jax.lax.map(lambda xs: select(*xs), layers).swapaxes(0, 1)

  return jax.tree.map(merge, first, second)
