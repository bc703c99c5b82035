"""Log-probs of given tokens, teacher-forced, in pieces of the vocabulary.

Dimension key: B rows, T tokens, R scored tokens (the last of each row), C
tokens a piece, D model width, V vocabulary, L layers, k experts a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax import model

_PIECE = 4096  # tokens, of all rows, whose logits exist at one time


class TokenLogprobs(NamedTuple):
  """What the policy thinks of R given tokens.

  Attributes:
    logps: [B, R] float32, of the tempered distribution.
    entropy: [B, R] float32, nats, of the same distribution.
    experts: [L, B, R, k] int32, the experts that made each prediction; None
      for a dense model.
  """

  logps: jax.Array
  entropy: jax.Array
  experts: jax.Array | None


def token_logprobs(
  params: model.Params,
  cfg: model.ModelConfig,
  tokens: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
  *,
  response_length: int,
  temperature: float = 1.0,
) -> TokenLogprobs:
  """Scores the last `response_length` tokens of each row.

  `log softmax(logits / temperature)[token]`: the distribution that was sampled.
  Logits are float32 and made for 4,096 tokens at a time, forward and backward:
  2.5 GB where V = 151,936. The whole of [B, R, V] never exists beyond that.

  Args:
    params: as `model.init` makes them.
    cfg: the model; static.
    tokens: [B, T] int32, prompts then responses.
    positions: [B, T] int32.
    mask: [B, T], 0 at padding.
    response_length: R < T; static.
    temperature: the sampler's; 0 (greedy) scores the plain distribution.
  """
  R = response_length
  if not 1 <= R < tokens.shape[1]:
    raise ValueError(
      f"{response_length=} must lie in 1..{tokens.shape[1] - 1}: the first "
      "token of a row has nothing before it"
    )
  out = model.encode(params, cfg, tokens, positions, mask)
  before = slice(-R - 1, -1)  # the positions that predict the last R tokens
  hidden, targets = out.hidden[:, before], tokens[:, -R:]

  @jax.checkpoint
  def score(piece):
    hidden_BCD, targets_BC = piece
    logits = model.unembed(params, cfg, hidden_BCD) / (temperature or 1.0)
    logps = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logps, targets_BC[..., None], -1)[..., 0]
    return picked, -(jnp.exp(logps) * logps).sum(-1)

  logps, entropy = _in_pieces(score, hidden, targets)
  experts = out.experts
  if experts is not None:
    experts = experts[:, :, before]
  return TokenLogprobs(logps, entropy, experts)


def _in_pieces(score, hidden_BRD, targets_BR):
  """Maps `score` over pieces of the token axis, the last one padded."""
  B, R = targets_BR.shape
  C = max(_PIECE // B, 1)
  if R <= C:
    return score((hidden_BRD, targets_BR))
  pieces = -(-R // C)

  def cut(x):
    x = jnp.pad(x, [(0, 0), (0, pieces * C - R), *[(0, 0)] * (x.ndim - 2)])
    return x.reshape(B, pieces, C, *x.shape[2:]).swapaxes(0, 1)

  join = lambda x: x.swapaxes(0, 1).reshape(B, -1)[:, :R]
  scored = jax.lax.map(score, (cut(hidden_BRD), cut(targets_BR)))
  return jax.tree.map(join, scored)
