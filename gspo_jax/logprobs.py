"""Teacher-forced log-probs of given tokens, without logits of all tokens.

Dimension key: B rows, T columns, R response columns (the last of each row; of a
packed row all but the first), M = B * R tokens of the devices that share the
vocabulary, C tokens a chunk, D model width, V vocabulary, v vocabulary shard of
one device, L layers, k experts a token, K kept ids a token, H ids of its head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.runtime import sharding

_CHUNK = 1024  # tokens whose logits exist at the same time
# The named scope of conditionals that compute the logits of a chunk or skip it;
# `plan` finds them by it.
WANTED_TOKENS = "wanted_tokens"
_VOCABULARY_AXES = ("tensor", "expert")  # the vocabulary is sharded over these


class TokenLogprobs(NamedTuple):
  """Log-probs of R given tokens, and the routing of the pass.

  Log-probs and entropies are in nats, of softmax(logits / temperature); router
  log-probs and entropies have no temperature. The routing is None for a dense
  model. A response token has the routing of the position before it, which
  predicts it.
  """

  logps: jax.Array  # [B, R] float32
  entropy: jax.Array  # [B, R] float32
  # [L, B, T, k] unsigned int, of all tokens, prompts included, as in `routes`
  experts: jax.Array | None = None
  # [L, B, R, k] float32, of the routes if they were given, else of the experts
  router_logps: jax.Array | None = None
  router_entropy: jax.Array | None = None  # [L, B, R] float32, of all experts
  # [L] int32, skipped pairs of a token and an expert; expected to be 0
  dropped: jax.Array | None = None
  # [L, B, T] float32, of all tokens; None unless `router_losses`
  load_balance: jax.Array | None = None
  z_loss: jax.Array | None = None
  head_logps: jax.Array | None = None  # [B, H, R] float32, of `head_ids`


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
  use_own_experts: jax.Array | None = None,
  router_losses: bool = False,
  wanted: jax.Array | None = None,
  kept_ids: jax.Array | None = None,
  head_ids: jax.Array | None = None,
) -> TokenLogprobs:
  """Log-probs and entropies of the last `response_length` tokens of each row.

  A log-prob is `log softmax(logits / temperature)[token]`, from the
  distribution that was sampled from. With `kept_ids` that is the softmax over a
  token's kept ids alone (Keep Sampling Mask, DeepSeek-V3.2, arXiv 2512.02556,
  sec. 3.1), and the entropy is of this distribution, too. Float32 logits exist
  for 1,024 tokens at a time, forward and backward: 0.6 GB for V = 151,936, in
  total over the devices along `expert` and `tensor`; twice with `head_ids`.

  Args:
    params: as `model.init` returns them.
    cfg: static.
    tokens: [B, T] int32, prompts then responses.
    positions: [B, T] int32.
    mask: [B, T], 0 at padding; integers pack several sequences in a row, as in
      `model.hidden_states`. With `cfg.exact` a sequence starts at a multiple of
      `model.exact_attention.align`, else its log-probs are no numbers.
    response_length: R < T; static.
    temperature: the sampler's; 0 (greedy) gives the log-probs at 1.
    routes: [L, B, T, k], experts of an earlier pass; `router_logps` are their
      log-probs.
    replay: whether to send the tokens to `routes`, with the routing weights of
      these parameters; static.
    use_own_experts: [] bool; if true the experts of this pass replace `routes`.
    router_losses: whether to return the losses of the routers; static.
    wanted: [B, R] bool: which tokens get log-probs and entropies; the others
      get 0. Only chunks with a wanted token are computed. None: all tokens.
    kept_ids: [B, K, R] int32, of the wanted tokens as in `Samples`; an id may
      be there more than once. None: all ids.
    head_ids: [B, H, R] int32, ids whose log-probs to return; None if `exact`.

  Raises:
    ValueError: a response length outside 1..T-1, or `replay` without routes.
  """
  R, T = response_length, tokens.shape[1]
  if not 1 <= R < T:
    raise ValueError(
      f"{response_length=} must lie in 1..{T - 1}: no token predicts the first "
      "one of a row"
    )
  out = model.hidden_states(
    params,
    cfg,
    tokens,
    positions,
    mask,
    routes=routes,
    replay=replay,
    use_own_experts=use_own_experts,
    router_losses=router_losses,
  )
  predicting = slice(-R - 1, -1)  # positions that predict the last R tokens
  hidden, targets = out.hidden[:, predicting], tokens[:, -R:]
  if is_split := sharding.size("context") > 1:
    # All columns: R of them would not split evenly over the devices.
    hidden, targets = out.hidden, jnp.roll(tokens, -1, axis=1)
    wanted = jnp.ones_like(tokens[:, -R:], bool) if wanted is None else wanted
    all_columns = (T - R - 1, 1)
    wanted = jnp.pad(wanted, ((0, 0), all_columns))
    kept_ids, head_ids = jax.tree.map(
      lambda ids: jnp.pad(ids, ((0, 0), (0, 0), all_columns)),
      (kept_ids, head_ids),
    )
  logps, entropy, *head = logps_and_entropy(
    hidden,
    model.output_matrix(params, cfg),
    targets,
    cfg,
    temperature or 1.0,
    wanted,
    kept_ids,
    head_ids,
  )
  if is_split:
    logps, entropy, *head = (x[:, predicting] for x in (logps, entropy, *head))
  head_logps = head[0].swapaxes(1, 2) if head else None
  if out.routing is None:
    return TokenLogprobs(logps, entropy, head_logps=head_logps)
  experts, *router, dropped, load_balance, z_loss = out.routing
  router = [x[:, :, predicting] for x in router]  # log-probs and entropy
  return TokenLogprobs(
    logps, entropy, experts, *router, dropped, load_balance, z_loss, head_logps
  )


def logps_and_entropy(
  hidden_BRD,
  head_DV,
  targets_BR,
  cfg,
  temperature,
  wanted_BR=None,
  kept_ids_BKR=None,
  head_ids_BHR=None,
):
  """Log-probs of the targets and entropies, [B, R] each, from hidden states.

  With `head_ids_BHR` also the log-probs of these ids, [B, R, H]. All are 0
  where `wanted_BR` is false; None: all are wanted. `kept_ids_BKR` is
  as in `token_logprobs`. The devices along `tensor` and `expert` share the
  vocabulary, the devices along `context` the columns. The results have whole
  rows, so that sums over a sequence are the same on any mesh.
  """

  # An exact sum is of one device; so is then the whole vocabulary.
  shared = () if cfg.exact else _VOCABULARY_AXES
  splits = () if cfg.exact else ("expert",)  # of rows that read its parts

  def local(
    hidden_BRD, head, targets_BR, wanted_BR, kept_ids_BRK, head_ids_BRH
  ):
    head_Dv, column_v = _vocabulary_shard(head.astype(cfg.head_dtype), shared)
    # Float32, so that its gradient is summed over the chunks in float32.
    head_Dv = head_Dv.astype(jnp.float32)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    gather = lambda x: sharding.gather(flat(x), *splits, dim=0)

    def score_chunk(chunk):
      hidden_CD, targets_C, kept_ids_CK, head_ids_CH = chunk
      return model.target_logps(
        model.project_logits(hidden_CD, head_Dv, cfg),
        targets_C,
        kept_ids_CK,
        column_v,
        cfg=cfg,
        temperature=temperature,
        axes=shared,
        head_ids_CH=head_ids_CH,
      )

    operands = jax.tree.map(
      gather, (hidden_BRD, targets_BR, kept_ids_BRK, head_ids_BRH)
    )
    if wanted_BR is None:
      gathered = _map_chunks(jax.checkpoint(score_chunk), operands)
    else:
      gathered = _map_wanted(score_chunk, gather(wanted_BR), operands)

    def whole_rows(x_M):
      count = targets_BR.size  # this device's share of the tokens
      start = sharding.index(*splits) * count
      local = jax.lax.dynamic_slice_in_dim(x_M, start, count)
      local_BR = local.reshape(*targets_BR.shape, *x_M.shape[1:])
      return sharding.gather(local_BR, "context", dim=1)

    return jax.tree.map(whole_rows, gathered)

  tokens = sharding.TOKENS
  head = model.parameters.partition_spec("head")
  sharded = sharding.shard_map(
    local,
    in_specs=(tokens, head, *[tokens] * 4),
    out_specs=sharding.ROWS,
  )
  ids = jax.tree.map(lambda x: x.swapaxes(1, 2), (kept_ids_BKR, head_ids_BHR))
  return sharded(hidden_BRD, head_DV, targets_BR, wanted_BR, *ids)


def _vocabulary_shard(head, shared):
  """This device's columns of the head, [D, v], and their token ids, [v].

  All columns, unless devices along `shared` share the vocabulary.
  """
  if not shared:
    head_DV = sharding.gather(head, "tensor", dim=1)
    head_DV = sharding.gather(head_DV, *sharding.RULES["table"], dim=0)
    return head_DV, jnp.arange(head_DV.shape[1])
  # The head's rows are sharded over `WEIGHT_AXES` and `expert`, its columns
  # over `tensor`. An all-to-all along `expert` exchanges rows for columns,
  # which are padded to divide evenly; padding has the id -1.
  columns = head.shape[1]
  padding = -columns % sharding.size("expert")
  head = jnp.pad(head, ((0, 0), (0, padding)))
  head = sharding.all_to_all(head, "expert", split=1, join=0)
  head_Dv = sharding.gather(head, *sharding.WEIGHT_AXES, dim=0)
  v = head_Dv.shape[1]
  column_v = sharding.index("expert") * v + jnp.arange(v)
  id_v = sharding.index("tensor") * columns + column_v
  return head_Dv, jnp.where(column_v < columns, id_v, -1)


def _map_wanted(score_chunk, wanted_M, operands):
  """`_map_chunks` of the wanted tokens, sorted to the front; 0 elsewhere."""
  wanted_M = jnp.asarray(wanted_M, bool)
  order = jnp.argsort(~wanted_M, stable=True)
  # All devices must agree: a chunk has collectives.
  count = sharding.pmax(wanted_M.sum(), *sharding.BATCH_AXES)

  def chunk_if_wanted(chunk):
    operands, place_C = chunk
    run = lambda: score_chunk(operands)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(run))
    with jax.named_scope(WANTED_TOKENS):
      return jax.lax.cond(place_C[0] < count, run, lambda: zeros)

  # Unique indices: the gradient is a permutation, too, and not a sum.
  permute = lambda x, order=order: (
    jnp.asarray(x).at[order].get(unique_indices=True, mode="promise_in_bounds")
  )
  sorted_ = _map_chunks(
    jax.checkpoint(chunk_if_wanted),
    (jax.tree.map(permute, operands), jnp.arange(len(order))),
  )
  back = jnp.argsort(order)
  is_wanted = lambda x: wanted_M.reshape(-1, *[1] * (x.ndim - 1))
  return jax.tree.map(
    lambda x: jnp.where(is_wanted(x), permute(x, back), 0), sorted_
  )


def _map_chunks(score_chunk, operands):
  """Maps `score_chunk` over chunks of the tokens; the last one is padded."""
  M = len(jax.tree.leaves(operands)[0])
  if M <= _CHUNK:
    return score_chunk(operands)

  def chunks(x):
    x = jnp.pad(x, [(0, -M % _CHUNK), *[(0, 0)] * (x.ndim - 1)])
    return x.reshape(-1, _CHUNK, *x.shape[1:])

  mapped = jax.lax.map(score_chunk, jax.tree.map(chunks, operands))
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:M], mapped)
