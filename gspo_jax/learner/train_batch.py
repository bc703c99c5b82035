"""The arrays that an update reads."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.logprobs import TokenLogprobs, token_logprobs
from gspo_jax.model.moe import number_type
from gspo_jax.runtime.sharding import constrain_batch
from gspo_jax.sampler.samples import Prompts, Samples


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
  """What an update learns from. The response is the last R slots of a row.

  Attributes:
    tokens: [B, T] int32.
    positions: [B, T] int32.
    mask: [B, T] bool, false at padding.
    response_mask: [B, R] bool, the tokens that the policy chose.
    old_logps: [B, R] float32, under the policy that is improved upon.
    advantages: [B] float32, or [B, R] where each token has its own.
    experts: [B, L, T, k] unsigned, the routing that an update may replay: the
      sampler's where it was recorded, else the old policy's. None for a dense
      model.
    router_logps: [B, L, R, k] float32, what the old policy's routers gave those
      experts at the tokens that predict the response; None as `experts`.
    sampler_logps: [B, R] float32, as the sampler reported them; None for
      demonstrations, as what follows unless the objective reads it.
    reference_logps: [B, R] float32, under the reference policy.
    values: [B, R] float32, of the old critic.
    returns: [B, R] float32, what the critic should have said.
  """

  tokens: jax.Array
  positions: jax.Array
  mask: jax.Array
  response_mask: jax.Array
  old_logps: jax.Array
  advantages: jax.Array
  experts: jax.Array | None = None
  router_logps: jax.Array | None = None
  sampler_logps: jax.Array | None = None
  reference_logps: jax.Array | None = None
  values: jax.Array | None = None
  returns: jax.Array | None = None


def make_train_batch(
  prompts: Prompts, responses: jax.Array, lengths: jax.Array
) -> TrainBatch:
  """Puts responses [B, R] after their prompts [P, S]; B is a multiple of P.

  Log-probs and advantages are zeros until they are known.
  """
  B, R = responses.shape
  group = B // prompts.tokens.shape[0]
  repeat = lambda x: jnp.repeat(x, group, axis=0)
  response_mask = jnp.arange(R) < lengths[:, None]
  after = repeat(prompts.lengths)[:, None] + jnp.arange(R)
  join = lambda a, b: jnp.concatenate([repeat(a), b], axis=1)
  return TrainBatch(
    tokens=join(prompts.tokens, responses),
    positions=join(prompts.positions, after),
    mask=join(prompts.mask, response_mask),
    response_mask=response_mask,
    old_logps=jnp.zeros((B, R)),
    advantages=jnp.zeros(B),
  )


class MinibatchSplit(NamedTuple):
  """How a rollout is shuffled and cut into minibatches and micro-batches.

  Whole groups are shuffled, so that the advantages of a group cancel inside a
  minibatch.

  Attributes:
    order: [P], the groups in their new order.
    count: M, minibatches; divides P; static.
    micro: rows of one forward pass; divides B / M; static.
  """

  order: jax.Array
  count: int
  micro: int

  def split(self, rollout: TrainBatch) -> TrainBatch:
    """Leaves [B, ...] become [M, B/M/micro, micro, ...]."""

    def cut(x):
      groups = x.reshape(len(self.order), -1, *x.shape[1:])[self.order]
      cuts = groups.reshape(self.count, -1, self.micro, *x.shape[1:])
      return constrain_batch(cuts, axis=2)

    return _by_layer(cut, rollout, layers=1, cut_layers=3)

  def join(self, fields: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The inverse of `split`, for some fields by their names."""
    back = jnp.argsort(self.order)

    def uncut(x):
      groups = x.reshape(len(back), -1, *x.shape[3:])[back]
      return constrain_batch(groups.reshape(-1, *x.shape[3:]), axis=0)

    return _by_layer(uncut, fields, layers=3, cut_layers=1)


# The largest arrays of a rollout, which have an axis of layers. A shuffle
# passes whole arrays between devices, so these are shuffled layer by layer.
_LARGE = ("experts", "router_logps")


def _by_layer(function, fields, *, layers, cut_layers):
  """Maps `function`; where there is an axis of layers, one layer at a time."""
  whole = isinstance(fields, TrainBatch)
  given = vars(fields) if whole else fields

  def apply(name, x):
    if name not in _LARGE:
      return jax.tree.map(function, x)
    one_by_one = jax.lax.map(function, jnp.moveaxis(x, layers, 0))
    return jnp.moveaxis(one_by_one, 0, cut_layers)

  made = {k: None if x is None else apply(k, x) for k, x in given.items()}
  return TrainBatch(**made) if whole else made


def logprobs(
  params: model.Params, cfg: model.ModelConfig, rows: TrainBatch, **how
) -> TokenLogprobs:
  """`token_logprobs` of the responses of these rows; `how`: its keywords."""
  return token_logprobs(
    params,
    cfg,
    rows.tokens,
    rows.positions,
    rows.mask,
    response_length=rows.response_mask.shape[1],
    **how,
  )


@dataclasses.dataclass(frozen=True)
class TrainBatchFields:
  """Which fields a `TrainBatch` has beyond those of any; static under jit.

  Attributes:
    sampler_logps: `old_logps` are the sampler's, not recomputed.
    experts: the old policy's experts, unless the sampler recorded its own.
    router_logps: what the old routers gave them.
    reference: the log-probs of a reference policy.
    critic: values and returns, and an advantage for each token.
  """

  sampler_logps: bool = False
  experts: bool = False
  router_logps: bool = False
  reference: bool = False
  critic: bool = False


def train_batch_from_samples(
  prompts: Prompts,
  samples: Samples,
  cfg: model.ModelConfig,
  fields: TrainBatchFields,
) -> TrainBatch:
  """The rollout of some samples, with zeros for what is not known yet.

  All fields that will be known are there from the start, so that one compiled
  program takes the rollout before and after it is scored.

  Args:
    prompts: P prompts.
    samples: their G responses each.
    cfg: the model; static.
    fields: what the update reads; static.
  """
  batch = make_train_batch(prompts, samples.tokens, samples.lengths)
  (B, T), R = batch.tokens.shape, samples.tokens.shape[1]
  zeros = lambda wanted: jnp.zeros((B, R)) if wanted else None
  L, k = cfg.num_layers, cfg.experts_per_token
  experts = samples.experts
  if experts is None and fields.experts and cfg.num_experts:
    experts = jnp.zeros((B, L, T, k), number_type(cfg.num_experts))
  return dataclasses.replace(
    batch,
    old_logps=samples.logps if fields.sampler_logps else batch.old_logps,
    advantages=jnp.zeros((B, R) if fields.critic else B),
    experts=experts,
    router_logps=jnp.zeros((B, L, R, k))
    if fields.router_logps and cfg.num_experts
    else None,
    sampler_logps=samples.logps,
    reference_logps=zeros(fields.reference),
    values=zeros(fields.critic),
    returns=zeros(fields.critic),
  )
