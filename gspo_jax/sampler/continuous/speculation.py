"""Speculation that changes no token: a step reads several tokens of a response.

Speculative decoding (arXiv 2211.17192) with drafts by n-grams (prompt lookup
decoding), of the texts of the group. Token t of response b is sampled with the
key of (key, b, t). So a drafted token is accepted if and only if it is the one
that this key samples: the responses are those without drafts, whatever the
drafts are.

Dimension letters as in `continuous/__init__`; J tokens of a response in a step:
the newest, and J - 1 drafts.
"""

import functools

import jax
import jax.numpy as jnp

from gspo_jax.runtime import sharding
from gspo_jax.sampler import next_token
from gspo_jax.sampler.samples import SamplerConfig, Samples

_LONGEST = 4  # most tokens that a match compares
_BATCH = jax.sharding.PartitionSpec(sharding.BATCH_AXES)
# Speculation ends in a call of the sampler in which a step of a response that
# drafted so often gives fewer tokens than this.
_TRIED, _LEAST_TOKENS = 256, 1.15


def pays(steps: int, accepted: int) -> bool:
  """Whether to go on, after so many steps of responses and accepted drafts."""
  return steps < _TRIED or accepted >= (_LEAST_TOKENS - 1) * steps


def draft(
  samples: Samples,
  row: jax.Array,
  num_tokens: jax.Array,
  *,
  count: int,
  group_size: int,
) -> jax.Array:
  """Guesses the next `count` tokens [m, count] of the responses in rows [m].

  They are what followed the longest match of the response's newest tokens; of
  several, the last one in the response itself, then in the rows beside it: its
  group, unless it has moved to another shard. Without a match they are any
  tokens.
  """

  def local(tokens_BR, lengths_B, row_m, num_tokens_m):
    B, R = tokens_BR.shape
    row_m = row_m % B
    row_mG = row_m[:, None] // group_size * group_size + jnp.arange(group_size)
    text_mGR, place_R = tokens_BR[row_mG], jnp.arange(R)
    matches_mGR, run_mGR = 0, jnp.bool_(True)
    for i in range(_LONGEST):
      before_m = num_tokens_m - 1 - i
      token_m = tokens_BR[row_m, jnp.maximum(before_m, 0)]
      token_m = jnp.where(before_m < 0, -1, token_m)
      same_mGR = text_mGR == token_m[:, None, None]
      same_mGR = jnp.pad(same_mGR, ((0, 0), (0, 0), (i, 0)))[..., :R]
      run_mGR = run_mGR & same_mGR
      matches_mGR += run_mGR
    is_own_mG = row_mG == row_m[:, None]
    score_mGR = (2 * matches_mGR + is_own_mG[..., None]) * R + place_R
    is_followed_mGR = place_R + 1 < lengths_B[row_mG][..., None]
    score_mGR = jnp.where(is_followed_mGR, score_mGR, -1)
    flat = lambda x: x.reshape(len(row_m), -1)
    place_mJ = flat(score_mGR).argmax(1)[:, None] + 1 + jnp.arange(count)
    return jnp.take_along_axis(flat(text_mGR), place_mJ, axis=1, mode="clip")

  search = sharding.shard_map(local, (_BATCH,) * 4, _BATCH)
  return search(samples.tokens, samples.lengths, row, num_tokens)


def accept(
  fed_mJ: jax.Array,
  token_mJ: jax.Array,
  num_tokens: jax.Array,
  stop_at: jax.Array,
  stop_state: jax.Array,
  sampler: SamplerConfig,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Which of the sampled tokens a response gets, and whether they end it.

  Args:
    fed_mJ: [m, J], the tokens that the step read.
    token_mJ: [m, J], what was sampled behind each.
    num_tokens: [m], of the response before the step.
    stop_at: [m], tokens at which it pauses.
    stop_state: [m], of `StopStrings` before the step.
    sampler: static.

  Returns:
    [m, J] bool, the tokens that follow from accepted ones and no earlier end;
    and behind each token the state of `StopStrings`, whether the token stops
    the response, and whether the response stops or pauses, all [m, J].
  """
  states, stops = [], []
  for t in range(fed_mJ.shape[1]):
    stop_state, stopped = next_token.stop(
      token_mJ[:, t], num_tokens + t + 1, stop_state, sampler
    )
    states.append(stop_state)
    stops.append(stopped)
  stack = functools.partial(jnp.stack, axis=1)
  stopped_mJ, length_mJ = stack(stops), num_tokens[:, None] + 1
  length_mJ += jnp.arange(fed_mJ.shape[1])
  done_mJ = stopped_mJ | (length_mJ == stop_at[:, None])
  goes_on = (fed_mJ[:, 1:] == token_mJ[:, :-1]) & ~done_mJ[:, :-1]
  first = jnp.ones_like(done_mJ[:, :1])
  taken_mJ = jnp.concatenate([first, goes_on], 1).cumprod(1).astype(bool)
  return taken_mJ, stack(states), stopped_mJ, done_mJ
