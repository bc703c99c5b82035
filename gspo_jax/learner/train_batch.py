"""The batch that an update learns from, and its minibatches."""

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
  """Prompts, responses and what the objective reads of them.

  The response is in the last R places of a row of T tokens. `reference_logps`,
  `values` and `returns` are None unless the objective reads them.

  Attributes:
    tokens: [B, T] int32.
    positions: [B, T] int32.
    mask: [B, T] bool, false at padding.
    response_mask: [B, R] bool, the tokens of the response, its stop token
      included.
    old_logps: [B, R] float32, log-probs under the old policy.
    advantages: [B] float32; with a critic [B, R].
    experts: [B, L, T, k] unsigned, the experts that an update may replay: the
      sampler's where they were recorded, else the old policy's. None for a
      dense model.
    router_logps: [B, L, R, k] float32, the old routers' log-probs of these
      experts at the tokens that predict the response. None for a dense model.
    sampler_logps: [B, R] float32, the sampler's log-probs. None for
      demonstrations.
    reference_logps: [B, R] float32, log-probs under the reference policy.
    values: [B, R] float32, of the old critic.
    returns: [B, R] float32, the targets of the critic.
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
  """Puts responses [B, R] behind their prompts [P, S]; B is a multiple of P.

  Log-probs and advantages are zeros, to be filled in later.
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
  """How a batch is shuffled and cut into minibatches and micro-batches.

  Whole groups are shuffled, so that the advantages of a group cancel inside a
  minibatch.

  Attributes:
    order: [P], the groups in their new order.
    minibatches: M; divides P; static.
    micro_batch_size: rows of one forward pass; divides B / M; static.
  """

  order: jax.Array
  minibatches: int
  micro_batch_size: int

  def split(self, batch: TrainBatch) -> TrainBatch:
    """Leaves [B, ...] become [M, A, micro_batch_size, ...].

    A is the number of micro-batches of a minibatch.
    """

    def cut(x):
      groups = x.reshape(len(self.order), -1, *x.shape[1:])[self.order]
      shape = self.minibatches, -1, self.micro_batch_size, *x.shape[1:]
      cuts = groups.reshape(shape)
      return constrain_batch(cuts, axis=2)

    return TrainBatch(**_by_layer(cut, vars(batch), layers=1, out_layers=3))

  def join(self, fields: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The inverse of `split`, for fields by their names."""
    back = jnp.argsort(self.order)

    def uncut(x):
      groups = x.reshape(len(back), -1, *x.shape[3:])[back]
      return constrain_batch(groups.reshape(-1, *x.shape[3:]), axis=0)

    return _by_layer(uncut, fields, layers=3, out_layers=1)


# The largest fields; they have an axis of layers. A shuffle passes whole arrays
# between devices, so these are shuffled layer by layer.
_LARGE = ("experts", "router_logps")


def _by_layer(function, fields: dict, *, layers: int, out_layers: int) -> dict:
  """`function` of each field; of the large ones, one layer at a time.

  Args:
    function: of an array.
    fields: by their names; None stays None.
    layers: the axis of layers in a large field.
    out_layers: that axis in its result.
  """

  def apply(name, x):
    if x is None:
      return None
    if name not in _LARGE:
      return function(x)
    result = jax.lax.map(function, jnp.moveaxis(x, layers, 0))
    return jnp.moveaxis(result, 0, out_layers)

  return {name: apply(name, x) for name, x in fields.items()}


def logprobs(
  params: model.Params, cfg: model.ModelConfig, batch: TrainBatch, **options
) -> TokenLogprobs:
  """Log-probs of the responses; `options` are those of `token_logprobs`."""
  return token_logprobs(
    params,
    cfg,
    batch.tokens,
    batch.positions,
    batch.mask,
    response_length=batch.response_mask.shape[1],
    **options,
  )


@dataclasses.dataclass(frozen=True)
class TrainBatchFields:
  """The optional fields of a `TrainBatch`; static under jit.

  Attributes:
    sampler_logps: whether `old_logps` are the sampler's, not recomputed.
    experts: whether there are experts even if the sampler recorded none.
    router_logps: whether there are the old routers' log-probs of them.
    reference: whether there are log-probs of a reference policy.
    critic: whether there are values, returns, and an advantage for each token.
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
  """The train batch of samples, with zeros where values are filled in later.

  It has all its fields from the start, so that one compiled program takes it
  for old log-probs and for an update.

  Args:
    prompts: P prompts.
    samples: G responses to each.
    cfg: the model; static.
    fields: the optional fields; static.
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
