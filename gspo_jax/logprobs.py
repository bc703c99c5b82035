"""Log-probs of given tokens, teacher-forced, in pieces of the vocabulary.

Dimension key: B rows, T tokens, R scored tokens (the last of each row), M = B *
R of one device and those it shares the vocabulary with, C tokens a piece, D
model width, V vocabulary, v its part on one device, L layers, k experts a
token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspo_jax import model
from gspo_jax.runtime import sharding

_PIECE = 1024  # tokens whose logits exist at one time
_PARTS = ("tensor", "expert")  # the vocabulary is split over these


class TokenLogprobs(NamedTuple):
  """What the policy thinks of R given tokens.

  Attributes:
    logps: [B, R] float32, of the tempered distribution.
    entropy: [B, R] float32, nats, of the same distribution.
    experts: [L, B, T, k] unsigned, where every token went, the prompt's, too:
      routes to replay. None for a dense model, as what follows.
    router_logps: [L, B, R, k] float32, what the routers give the routes, or
      where none are given the experts, of the tokens that predict.
    router_entropy: [L, B, R] float32, nats, over all experts.
    dropped: [L] int32, choices of an expert that went unheard: 0, if counted
      right.
  """

  logps: jax.Array
  entropy: jax.Array
  experts: jax.Array | None = None
  router_logps: jax.Array | None = None
  router_entropy: jax.Array | None = None
  dropped: jax.Array | None = None


def token_logprobs(
  params: model.Params,
  cfg: model.ModelConfig,
  tokens: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
  *,
  response_length: int,
  temperature: float = 1.0,
  routes: jax.Array | None = None,
  replay: bool = False,
  own: jax.Array | None = None,
) -> TokenLogprobs:
  """Scores the last `response_length` tokens of each row.

  `log softmax(logits / temperature)[token]`: the distribution that was sampled.
  Logits are float32 and made for 1,024 tokens at a time, forward and backward:
  0.6 GB where V = 151,936, over the devices of `expert` and `tensor` together.
  No more of [B, R, V] exists at a time.

  Args:
    params: as `model.init` makes them.
    cfg: the model; static.
    tokens: [B, T] int32, prompts then responses.
    positions: [B, T] int32.
    mask: [B, T], 0 at padding.
    response_length: R < T; static.
    temperature: the sampler's; 0 (greedy) scores the plain distribution.
    routes: [L, B, T, k], an earlier pass's experts: how likely are they now?
    replay: send the tokens there again, by gate weights of today; static.
    own: [] bool; where it is true, this pass's own experts stand for `routes`.
  """
  R = response_length
  if not 1 <= R < tokens.shape[1]:
    raise ValueError(
      f"{response_length=} must lie in 1..{tokens.shape[1] - 1}: the first "
      "token of a row has nothing before it"
    )
  out = model.hidden_states(
    params,
    cfg,
    tokens,
    positions,
    mask,
    routes=routes,
    replay=replay,
    own=own,
  )
  before = slice(-R - 1, -1)  # the positions that predict the last R tokens
  logps, entropy = score(
    out.hidden[:, before],
    model.output_matrix(params, cfg),
    tokens[:, -R:],
    cfg,
    temperature or 1.0,
  )
  if out.routing is None:
    return TokenLogprobs(logps, entropy)
  experts, router_logps, router_entropy, dropped = out.routing
  return TokenLogprobs(
    logps,
    entropy,
    experts,
    router_logps[:, :, before],
    router_entropy[:, :, before],
    dropped,
  )


def score(hidden_BRD, head_DV, targets_BR, cfg, temperature):
  """Log-probs and entropies [B, R] of given tokens under given hidden states.

  An island: the devices along `tensor` and `expert` share out the vocabulary.
  """

  def local(hidden_BRD, head, targets_BR):
    head_Dv, column_v = _part(head.astype(hidden_BRD.dtype))
    # Float32, so that its gradient is summed over the pieces in it.
    head_Dv = head_Dv.astype(jnp.float32)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    join = lambda x: sharding.gather(flat(x), "expert", dim=0)

    @jax.checkpoint
    def score_piece(piece):
      hidden_CD, targets_C = piece
      logits_Cv = model.project_logits(hidden_CD, head_Dv, cfg) / temperature
      return _log_softmax(logits_Cv, targets_C, column_v)

    scored = _in_pieces(score_piece, join(hidden_BRD), join(targets_BR))
    return jax.tree.map(lambda x: _own(x, targets_BR.shape), scored)

  rows = PartitionSpec(sharding.BATCH_AXES)
  island = sharding.shard_map(
    local, in_specs=(rows, sharding.param_spec("head"), rows), out_specs=rows
  )
  return island(hidden_BRD, head_DV, targets_BR)


def _part(head):
  """This device's columns of the head, [D, v], and their numbers, [v].

  The head's rows are split over `fsdp` and `expert`, its columns over `tensor`.
  Along `expert` rows and columns change places; padding, numbered -1, makes the
  columns come out even.
  """
  parts, columns = sharding.size("expert"), head.shape[1]
  head = jnp.pad(head, ((0, 0), (0, -columns % parts)))
  head = sharding.all_to_all(head, "expert", split=1, join=0)
  head_Dv = sharding.gather(head, "fsdp", dim=0)
  v = head_Dv.shape[1]
  column_v = sharding.index("expert") * v + jnp.arange(v)
  numbers = sharding.index("tensor") * columns + column_v
  return head_Dv, jnp.where(column_v < columns, numbers, -1)


def _log_softmax(logits_Cv, targets_C, column_v):
  """The targets' log-probs [C] and the entropies [C], from all the parts."""
  logits_Cv = jnp.where(column_v >= 0, logits_Cv, -1e30)
  top = jax.lax.stop_gradient(logits_Cv.max(-1))
  logits_Cv -= sharding.pmax(top, *_PARTS)[:, None]
  weights_Cv = jnp.exp(logits_Cv)
  picked = jnp.where(column_v == targets_C[:, None], logits_Cv, 0).sum(-1)
  sums = weights_Cv.sum(-1), picked, (weights_Cv * logits_Cv).sum(-1)
  mass, picked, inner = sharding.psum(sums, *_PARTS)
  return picked - jnp.log(mass), jnp.log(mass) - inner / mass


def _own(x_M, shape):
  """The part of this device's own tokens, as rows again."""
  mine = sharding.index("expert") * (shape[0] * shape[1])
  own = jax.lax.dynamic_slice_in_dim(x_M, mine, shape[0] * shape[1])
  return own.reshape(shape)


def _in_pieces(score_piece, hidden_MD, targets_M):
  """Maps `score_piece` over pieces of the tokens, the last one padded."""
  M = len(targets_M)
  if M <= _PIECE:
    return score_piece((hidden_MD, targets_M))

  def cut(x):
    x = jnp.pad(x, [(0, -M % _PIECE), *[(0, 0)] * (x.ndim - 1)])
    return x.reshape(-1, _PIECE, *x.shape[1:])

  scored = jax.lax.map(score_piece, (cut(hidden_MD), cut(targets_M)))
  return jax.tree.map(lambda x: x.reshape(-1)[:M], scored)
