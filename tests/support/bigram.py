"""A policy of two small tables, in the place of the transformer.

The functions of a program then run one operation at a time in a tenth of a
second, with nothing to compile: all of the program but its model is real.

Dimension key: B rows, T tokens, D width, V vocabulary, L layers, E experts, k
experts a token.
"""

import contextlib
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import model
from gspo_jax.model import cache
from gspo_jax.model.moe import Routing
from gspo_jax.model.transformer import HiddenStates
from gspo_jax.sampler import static
from gspo_jax.sampler.continuous import jit as continuous_jit

V, D, L, E, K = 258, 4, 2, 8, 2  # V, L, E and k are those of the tiny variant


def params(seed: int = 0) -> model.Params:
  """Weights, of which `router` decides where a token goes."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return {
    "embed": normal(V, D),
    "head": normal(D, V),
    "moe": {"router": normal(L, D, E), "gate_up": normal(L, E, D)},
    "final_norm": {"scale": jnp.ones(D)},
  }


def hidden_states(
  params,
  cfg,
  tokens,
  positions,
  mask,
  cache=None,
  *,
  routes=None,
  replay=False,
  use_own_experts=None,
  router_losses=False,
) -> HiddenStates:
  """As `model.hidden_states`: the next token depends on this one alone."""
  embedded_BTD = params["embed"][tokens]
  scores_LBTE = jnp.einsum(
    "btd,lde->lbte", embedded_BTD, params["moe"]["router"]
  )
  scores_LBTE = jax.nn.log_softmax(scores_LBTE)
  own_LBTk = jax.lax.top_k(scores_LBTE, K)[1].astype(jnp.uint8)
  if routes is not None and use_own_experts is not None:
    routes = jnp.where(use_own_experts, own_LBTk, routes)
  experts_LBTk = routes if replay else own_LBTk
  layers = jnp.arange(L)[:, None, None, None]
  hidden = embedded_BTD + params["moe"]["gate_up"][layers, experts_LBTk].sum(
    (0, 3)
  )
  asked = (own_LBTk if routes is None else routes).astype(jnp.int32)
  routing = Routing(
    experts_LBTk,
    jax.lax.stop_gradient(jnp.take_along_axis(scores_LBTE, asked, 3)),
    -(jnp.exp(scores_LBTE) * scores_LBTE).sum(3),
    jnp.zeros(L, jnp.int32),
  )
  return HiddenStates(hidden, routing, cache)


class _Room(NamedTuple):
  """In place of the cache of the responses, which is never full."""

  valid: np.ndarray


@contextlib.contextmanager
def in_place():
  """Every model is this one here; meshes are none."""
  same = lambda params, cfg: params
  nowhere = lambda mesh: contextlib.nullcontext()
  with (
    mock.patch.object(jax, "set_mesh", nowhere),
    mock.patch.multiple(
      model,
      hidden_states=hidden_states,
      prefill=hidden_states,
      unstack_layers=same,
    ),
    mock.patch.object(static, "decode_params", same),
    mock.patch.object(continuous_jit, "decode_params", same),
    mock.patch.object(
      cache, "share_prefix", return_value=_Room(np.zeros((1, 99)))
    ),
  ):
    yield


@contextlib.contextmanager
def by_the_operation():
  """As `in_place`, and no function is compiled as a whole."""
  with in_place(), jax.disable_jit():
    yield


def logits(params: model.Params, tokens, **how) -> jax.Array:
  """Float32 [B, T, V]; `how`: keywords of `hidden_states`."""
  hidden = hidden_states(params, None, tokens, None, None, **how).hidden
  return hidden @ params["head"]
