"""The layers of a block: norms, attention and the MLP.

Dimension key: B rows, T tokens, D model width, N query heads, K key-value
heads, H head width, k experts a token.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from gspo_jax.model import attention, exact, lora, parameters, rotary
from gspo_jax.model.config import Layer, ModelConfig
from gspo_jax.model.grouped_matmul import gated
from gspo_jax.model.rounding import matmul, recomputed, rounded, stored, wide
from gspo_jax.runtime import sharding


def rms_norm(x, scale, cfg: ModelConfig, eps: float | None = None):
  """`x / rms(x) * scale`; the float32 quotient is rounded before scaling.

  With `norm_rounds_last` the product is rounded instead; with `norm_plus_one`
  it is a product with 1 + scale. `eps` is `norm_eps` by default.
  """
  eps = jnp.float32(cfg.norm_eps if eps is None else eps)
  if cfg.norm_rounds_last:
    plus = jnp.float32(cfg.norm_plus_one)
    return _rms_norm_rounded_last(x, scale, eps, plus)
  return _rms_norm(x, scale, eps)


@functools.partial(recomputed, whole=2)
@exact.sums
def _rms_norm(x, scale, eps):
  h = wide(x)
  return _normed(x, jnp.mean(h * h, -1, keepdims=True), scale, eps)


@functools.partial(recomputed, whole=3)
@exact.sums
def _rms_norm_rounded_last(x, scale, eps, plus):
  h = wide(x)
  h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
  return rounded(h * (plus + wide(scale.astype(x.dtype))), x.dtype)


def _normed(x, mean_square, scale, eps):
  h = wide(x) * jax.lax.rsqrt(mean_square + eps)
  h = wide(rounded(h, x.dtype)) * wide(scale.astype(x.dtype))
  return rounded(h, x.dtype)


def rms_norm_over_heads(x_BTNH, scale, eps, heads):
  """`rms_norm` over all heads; `x` and `scale` may have this device's heads."""
  squares_BT11 = _sum_of_squares(x_BTNH)
  if x_BTNH.shape[2] < heads:
    squares_BT11 = sum_over_tensor(squares_BT11)
  mean_square_BT11 = squares_BT11 / (heads * x_BTNH.shape[3])
  scale_NH = scale.reshape(x_BTNH.shape[2:])
  return _rms_norm_of(x_BTNH, mean_square_BT11, scale_NH, jnp.float32(eps))


@recomputed
def _sum_of_squares(x_BTNH):
  return jnp.square(wide(x_BTNH)).sum((2, 3), keepdims=True)


_rms_norm_of = recomputed(_normed, whole=2)


def sum_over_tensor(y):
  """The sum over the devices that share heads or hidden columns."""
  if not exact.is_on():
    return sharding.psum(y, "tensor")
  parts = sharding.gather(y[None], "tensor", dim=0)
  return rounded(exact.sum_in_order(parts, 0), y.dtype)


def add(x_BTD, y_BTD):
  """Adds two activations in float32 and rounds once."""
  return rounded(wide(x_BTD) + wide(y_BTD), x_BTD.dtype)


def project(x, weights, name, axes: int = 1):
  """The product with the weight `name`, plus the adapter's product, if any."""
  cast = lambda end: weights[name + end].astype(x.dtype)
  y = matmul(x, cast(""), axes)
  if name + lora.A not in weights:
    return y
  return add(y, matmul(matmul(x, cast(lora.A), axes), cast(lora.B)))


def by_tokens(
  local,
  x_BTD,
  weights,
  module: str,
  *others,
  place=sharding.TOKENS,
  out=sharding.TOKENS,
  **specs,
):
  """`local(x_BTD, weights, *others)` in a shard_map over rows and tokens.

  It gets the module's weights rounded, and of all devices along `WEIGHT_AXES`.
  `place` is the spec of `x_BTD`, `out` of the results; `specs` are of weights
  that are not split as the table says.
  """
  specs = parameters.partition_specs(module, weights) | specs
  axes, tokens = sharding.WEIGHT_AXES, sharding.TOKENS

  def whole(name, x, dtype):
    x = x if name in parameters.FLOAT32 else x.astype(dtype)
    if axes not in specs[name]:
      return x
    return sharding.gather(x, *axes, dim=specs[name].index(axes))

  def run(x_BTD, weights, *others):
    weights = {k: whole(k, x, x_BTD.dtype) for k, x in weights.items()}
    return local(x_BTD, weights, *others)

  layer = sharding.shard_map(
    run,
    in_specs=(place, specs, *(tokens for _ in others)),
    out_specs=out,
  )
  return layer(x_BTD, weights, *others)


@jax.named_scope("attention")
def self_attention(
  x_BTD, weights, cfg: ModelConfig, layer: Layer, angles, segments_BT, cache, i
):
  """Returns the output [B, T, D] and the new (k, v) of layer `i`.

  Without a cache, attention among the T tokens, in a shard_map over rows,
  tokens and heads.
  """

  # A norm over all heads is whole in memory, and split where the heads are.
  names = ("q_norm", "k_norm") if cfg.qk_norm_over_heads else ()
  split = dict.fromkeys(names, PartitionSpec("tensor"))

  def run(x_BTD, weights, angles, attend):
    qkv, gate_BTNH = _project(x_BTD, weights, angles, cfg, layer)
    sinks_N = _sinks(weights, x_BTD.dtype)
    out_BTNH, updated = attend(*qkv, window=layer.window, sinks_N=sinks_N)
    y_BTD = project(gate(out_BTNH, gate_BTNH), weights, "o", axes=2)
    return y_BTD, updated

  def local(x_BTD, weights, angles, segments_BT):
    attend = lambda *qkv, **options: (
      attend_to_all_tokens(*qkv, segments_BT, **options),
      qkv[1:],
    )
    y_BTD, kv = run(x_BTD, weights, angles, attend)
    return sum_over_tensor(y_BTD), tuple(map(to_cache, kv))

  if cache is None:
    kept = PartitionSpec(sharding.ROW_AXES, "tensor", "context")
    y_BTD, updated = by_tokens(
      *(local, x_BTD, weights, "attention", angles, segments_BT),
      out=(sharding.TOKENS, kept),
      **split,
    )
  elif exact.is_on():
    # XLA would not split the loops over tokens.
    heads = PartitionSpec(sharding.ROW_AXES, "context", "tensor")
    projected = functools.partial(_project, cfg=cfg, layer=layer)
    operands = projected, x_BTD, weights, "attention", angles
    qkv, gate_BTNH = by_tokens(*operands, out=heads, **split)
    out_BTNH, updated = cache.attend(
      i, *qkv, window=layer.window, sinks_N=_sinks(weights, x_BTD.dtype)
    )
    combine = lambda x, weights: sum_over_tensor(
      project(x, weights, "o", axes=2)
    )
    operands = combine, gate(out_BTNH, gate_BTNH), weights, "attention"
    y_BTD = by_tokens(*operands, place=heads)
  else:
    attend = functools.partial(cache.attend, i)
    y_BTD, updated = run(x_BTD, weights, angles, attend)
  if cfg.output_bias:
    y_BTD = add(y_BTD, weights["o_bias"].astype(y_BTD.dtype))
  return y_BTD, updated


def _sinks(weights, dtype):
  """Float32, but rounded as activations; or None."""
  sinks_N = weights.get("sinks")
  return None if sinks_N is None else wide(sinks_N.astype(dtype))


def gate(x, logits):
  """`x` times the sigmoid of its logits, if there are any."""
  return x if logits is None else _gated_by_sigmoid(x, logits)


@recomputed
def _gated_by_sigmoid(x, logits):
  return rounded(wide(x) * jax.nn.sigmoid(wide(logits)), x.dtype)


def _project(x_BTD, weights, angles, cfg, layer):
  """Queries, keys and values, and the gate of the output or None."""

  def heads(name):
    y_BTNH = project(x_BTD, weights, name)
    if cfg.attention_bias:
      y_BTNH = add(y_BTNH, weights[f"{name}_bias"].astype(x_BTD.dtype))
    return checkpoint_name(y_BTNH, "heads")

  def rotated(y_BTNH, name, number):
    if cfg.qk_norm_over_heads:
      scale = weights[f"{name}_norm"]
      y_BTNH = rms_norm_over_heads(y_BTNH, scale, cfg.norm_eps, number)
    elif cfg.qk_norm:
      y_BTNH = rms_norm(y_BTNH, weights[f"{name}_norm"], cfg)
    return rotary.rotate(y_BTNH, *angles) if layer.rotary else y_BTNH

  q_BTNH, gate_BTNH = heads("q"), None
  if cfg.output_gate:
    q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
  q_BTNH = rotated(q_BTNH, "q", cfg.num_heads)
  k_BTKH = rotated(heads("k"), "k", cfg.num_kv_heads)
  return (q_BTNH, k_BTKH, heads("v")), gate_BTNH


def to_cache(x_BTKH):
  """[B, K, T, H] in the dtype of caches."""
  return x_BTKH.swapaxes(1, 2).astype(stored(x_BTKH.dtype))


def attend_to_all_tokens(
  q_BTNH, k_BTKH, v_BTKV, segments_BT, *, window=None, sinks_N=None, scale=None
):
  """`attention.attend`, with the tokens split over `context`.

  A device exchanges all heads of its tokens for all tokens of its heads, and
  back after attention. So all devices along `context` compute equally many
  scores (arXiv 2309.14509, sec. 3).
  """
  C, K = sharding.size("context"), k_BTKH.shape[2]
  split_heads = lambda x: sharding.all_to_all(x, "context", split=2, join=1)
  # With fewer key heads than devices, several devices get the same head.
  repeat = lambda x: jnp.repeat(x, math.lcm(K, C) // K, axis=2)
  if sinks_N is not None:
    n = len(sinks_N) // C
    start = sharding.index("context") * n
    sinks_N = jax.lax.dynamic_slice_in_dim(sinks_N, start, n)
  out_BTNV = attention.attend(
    split_heads(q_BTNH),
    split_heads(repeat(k_BTKH)),
    split_heads(repeat(v_BTKV)),
    sharding.gather(segments_BT, "context", dim=1),
    window=window,
    sinks_N=sinks_N,
    scale=scale,
  )
  return sharding.all_to_all(out_BTNV, "context", split=1, join=2)


@recomputed
def swiglu(gate, up):
  return rounded(gated(gate, up, limit=None), gate.dtype)


@jax.named_scope("mlp")
def mlp(x_BTD, weights, module: str):
  """SwiGLU: `down(silu(gate x) * up x)`; "shared" may weigh it by a sigmoid."""

  def local(x_BTD, weights):
    gate_up = (project(x_BTD, weights, name) for name in ("gate", "up"))
    y_BTD = project(swiglu(*gate_up), weights, "down")
    y_BTD = sum_over_tensor(y_BTD)
    if "expert_gate" in weights:
      y_BTD = gate(y_BTD, project(x_BTD, weights, "expert_gate"))
    return y_BTD

  return by_tokens(local, x_BTD, weights, module)
