"""The weights in the dtype, mesh and layout of decoding; compiler options."""

import dataclasses
import functools
import math

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax import model
from gspo_jax.model import parameters, rounding
from gspo_jax.runtime import sharding
from gspo_jax.sampler.next_token import VOCAB_AXES


def decoding_options(mesh: Mesh) -> dict:
  """Compiler options of a program that decodes.

  On a GPU, XLA would copy the weights of small products with one operand into
  one array in every step: for Qwen3-1.7B as many bytes as all its weights.
  """
  if mesh.devices.flat[0].platform != "gpu":
    return rounding.OPTIONS
  return rounding.OPTIONS | {"xla_gpu_dot_merger_threshold_mb": 0}


def decode_params(params: model.Params, cfg: model.ModelConfig) -> model.Params:
  """The `cast` weights on the decoding mesh, with an untied `head`.

  Adapters are merged where `_merges`. The layers are moved one at a time,
  because a weight on its way between two meshes may be whole on one device.
  """
  # Without the barrier XLA moves the weights before it casts them.
  barrier = jax.lax.optimization_barrier
  constrain = functools.partial(sharding.constrain_state, axes=parameters.AXES)
  place = lambda tree: constrain(
    jax.tree.map(barrier, parameters.cast(tree, cfg))
  )

  def decoding_layer(layer):
    if _merges(cfg, sharding.platform()):
      layer = model.lora.merge_layer(layer, cfg.lora)
    return place(layer)

  layers = {"layers": parameters.map_layers(decoding_layer, params["layers"])}
  rest = place({k: x for k, x in params.items() if k != "layers"})
  # Two steps, because XLA has no direct path from split rows to split columns.
  head = sharding.constrain(model.output_matrix(rest, cfg), None, "tensor")
  head = sharding.constrain(head, None, () if cfg.exact else VOCAB_AXES)
  return rest | constrain(layers) | {"head": head}


def _merges(cfg: model.ModelConfig, platform: str) -> bool:
  """Whether adapters are merged: where products do not round the weights.

  bfloat16 rounds a weight by up to 0.4 % of itself, TensorFloat-32 (experts on
  a GPU) by 0.05 %. A merged weight would be rounded otherwise than those that
  the update multiplies by; then log-probs would differ by 2 to 30 times GSPO's
  clip range.
  """
  whole = cfg.dtype == "float32" and platform != "gpu"
  return cfg.lora is not None and whole and not cfg.exact


def decode_params_sharding(cfg: model.ModelConfig, mesh: Mesh) -> model.Params:
  """Shardings of `decode_params`, unstacked; on a TPU some are Formats.

  A decode step on a TPU multiplies by query, key and value weights with the
  heads before the model's width. If the arguments have another layout, XLA
  copies all these weights before the first step.
  """
  platform = mesh.devices.flat[0].platform
  if _merges(cfg, platform):
    cfg = dataclasses.replace(cfg, lora=None)
  shapes = parameters.shapes(cfg) | {"head": None}
  shapes = jax.eval_shape(
    functools.partial(model.unstack_layers, cfg=cfg), shapes
  )

  def place(keys, sharded):
    row = parameters.find(sharding.path_name(keys))
    to_heads = row.target == "attention" and len(row.groups[2]) > 1
    if to_heads and platform == "tpu" and cfg.head_dim % 128 == 0:
      return Format(Layout((1, 0, 2)), sharded)
    return sharded

  places = jax.tree.map_with_path(place, model.shardings(shapes, mesh))
  # The parts of an array in memory must be equal.
  parts = math.prod(mesh.shape[axis] for axis in VOCAB_AXES)
  vocab: tuple[str, ...] = VOCAB_AXES
  if cfg.vocab_size % parts:
    vocab = ("tensor",)
  if cfg.exact:
    vocab = ()
  return places | {"head": NamedSharding(mesh, PartitionSpec(None, vocab))}
