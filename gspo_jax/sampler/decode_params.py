"""The weights as decoding reads them."""

import math
import re

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax import model
from gspo_jax.runtime.sharding import constrain, constrain_state, spec
from gspo_jax.sampler.next_token import VOCAB


def decode_params(params, cfg):
  """The weights in `cfg.dtype`, on the mesh that decodes.

  A layer at a time: on its way from one mesh to the other a weight may stand
  whole on a device.
  """
  # Without the barrier XLA moves them first, and then makes them smaller.
  cast = lambda x: jax.lax.optimization_barrier(x.astype(cfg.dtype))
  lay = lambda tree: constrain_state(jax.tree.map(cast, tree))
  layers = {"layers": jax.lax.map(lay, params["layers"])}
  rest = lay({k: x for k, x in params.items() if k != "layers"})
  # In two steps: XLA knows no short way from split rows to split columns.
  head = constrain(model.output_matrix(rest, cfg), None, "tensor")
  head = constrain(head, None, VOCAB)
  return rest | constrain_state(layers) | {"head": head}


def decode_params_sharding(cfg: model.ModelConfig, mesh: Mesh):
  """Where the weights of `lay_out` lie once they are unstacked.

  A step on a TPU multiplies by the queries', keys' and values' weights with the
  heads before the model's width. Where they come otherwise, a program whose
  arguments they are copies them all before its first step.

  Returns:
    A tree of shardings, of Formats where XLA's own layout is not wanted.
  """

  def unstacked(key):
    params = model.init(key, cfg)
    return model.unstack_layers(
      params | {"head": model.output_matrix(params, cfg)}, cfg
    )

  turned = mesh.devices.flat[0].platform == "tpu" and cfg.head_dim % 128 == 0

  def place(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name == "head":
      even = leaf.shape[1] % math.prod(mesh.shape[axis] for axis in VOCAB) == 0
      over = VOCAB if even else "tensor"  # an array in memory has even parts
      return NamedSharding(mesh, PartitionSpec(None, over))
    lay = NamedSharding(mesh, spec(name, leaf.shape, mesh))
    if turned and re.search(r"attention/[qkv]$", name):
      return Format(Layout((1, 0, 2)), lay)
    return lay

  shapes = jax.eval_shape(unstacked, jax.random.key(0))
  return jax.tree.map_with_path(place, shapes)
