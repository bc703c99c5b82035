"""The next layer's weights gathered while a layer is computed: for TPUs.

  python -m benchmarks.early_fetch [--out=FILE.json] [--form=NAME]

The 48 layers of configs/moe_tpu.py on v5p:4x4x4, forward and backward, with one
row of 17,408 tokens a device. Weights lie split over `fsdp`, and are gathered
for each layer:

- `the model`: as gspo_jax/model/transformer.py runs them.
- `in the layer`: the same in one shard_map, with a backward pass by hand.
- `a layer early`: likewise, but the weights are the state of the scan, and
  those of the next layer are gathered beside the layer's computation: of layer
  l + 1 in the forward pass, of l - 1 in the backward pass.
- `halves apart`: with a barrier between attention and experts, across which
  the compiler moves nothing. What is gathered early is gathered beside
  attention, so that it does not keep the tokens of the experts waiting.

Milliseconds at best and by libtpu's cycles, both as scheduled; the same if the
links took no time to gather weights; and bytes. Nothing runs on a chip. A form
takes minutes to compile.

Dimension key: B rows, T tokens, M = B * T, D model width, L layers.
"""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from benchmarks import estimates, record
from gspo_jax import model
from gspo_jax.configs import moe_tpu
from gspo_jax.model import lora, moe, transformer
from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile
from gspo_jax.program import jitted
from gspo_jax.runtime import sharding

TOPOLOGY = "v5p:4x4x4"


def gathered(layer, cfg):
  """A layer's weights in `cfg.dtype`, whole along `fsdp`; norms as they are."""
  norms = {k: layer["attention"][k] for k in ("q_norm", "k_norm")}
  attention = {k: layer["attention"][k] for k in "qkvo"}
  whole = lambda x: sharding.gather(
    x.astype(cfg.dtype), *sharding.WEIGHT_AXES, dim=0
  )
  return layer | {
    "attention": norms
    | transformer._gathered(attention, "attention", cfg.dtype),
    "moe": jax.tree.map(whole, layer["moe"]),
  }


def scattered(gradients, shards, specs, cfg):
  """The gradients of a layer's shards, from those of its whole weights."""
  pull = jax.linear_transpose(functools.partial(gathered, cfg=cfg), shards)

  def add_up(x, spec):
    """Over the axes that do not split the weight."""
    split = {axis for entry in spec if entry for axis in np.atleast_1d(entry)}
    return sharding.psum(x, *(a for a in sharding.AXES if a not in split))

  return jax.tree.map(add_up, *pull(gradients), specs)


def attention(x_BTD, layer, angles, segments_BT, cfg):
  """The first half of transformer.Block on one device, with whole weights."""
  weights = layer["attention"] | {
    k: layer["attention"][k]["scale"] for k in ("q_norm", "k_norm")
  }
  h = transformer.rms_norm(
    x_BTD, layer["attention_norm"]["scale"], cfg.norm_eps
  )
  q, k, v = transformer._project(h, weights, angles, cfg)
  out = transformer._attend_to_all_tokens(q, k, v, segments_BT)
  h = transformer.project(out, weights, "o", axes=2)
  return checkpoint_name(transformer.add(x_BTD, h), "stream")


def experts(x_BTD, layer, segments_BT, cfg):
  """The second half."""
  h = transformer.rms_norm(x_BTD, layer["mlp_norm"]["scale"], cfg.norm_eps)
  x_MD, weights = h.reshape(-1, h.shape[-1]), layer["moe"]
  logits_ME = moe._router_logits(x_MD, weights["router"])
  weights_Mk, experts_Mk = moe.route(logits_ME, cfg)
  real_M1 = segments_BT.reshape(-1, 1) != 0
  h_MD, _ = moe._run_experts(
    x_MD,
    weights_Mk,
    jnp.where(real_M1, experts_Mk, cfg.num_experts),
    lora.Experts(weights["gate_up"]),
    lora.Experts(weights["down"]),
  )
  return transformer.add(x_BTD, h_MD.reshape(x_BTD.shape))


def by_hand(layers, x_BTD, angles, segments_BT, dy_BTD, *, specs, cfg, form):
  """The stream after all layers, and the gradients of weights and stream.

  Args:
    layers: a device's shards, stacked.
    x_BTD: the stream before them.
    angles: of the rotary embedding.
    segments_BT: not 0 at tokens.
    dy_BTD: the gradient of the stream after them.
    specs: the PartitionSpecs of `layers`.
    cfg: of the model.
    form: what is done when.
  """
  L = cfg.num_layers
  shards_of = lambda i: jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(
      x, jnp.clip(i, 0, L - 1), keepdims=False
    ),
    layers,
  )
  shapes = jax.eval_shape(shards_of, 0)
  whole = functools.partial(gathered, cfg=cfg)
  halves = (
    jax.checkpoint(
      functools.partial(half, cfg=cfg),
      prevent_cse=False,
      policy=jax.checkpoint_policies.save_only_these_names(*cfg.kept),
    )
    for half in (attention, experts)
  )
  run_attention, run_experts = halves
  wall = jax.lax.optimization_barrier if form.apart else lambda x: x

  def forward(state, i):
    x_BTD, weights = state
    following = whole(shards_of(i + 1)) if form.early else None
    weights = weights if form.early else whole(shards_of(i))
    x_BTD, pull = jax.vjp(run_attention, x_BTD, weights, angles, segments_BT)
    x_BTD, following = wall((x_BTD, following))
    y_BTD, pull_experts = jax.vjp(run_experts, x_BTD, weights, segments_BT)
    # The backward pass has all but the streams, or gathers it again.
    pull.args_res[1:], pull_experts.args_res[1:] = [None] * 3, [None] * 2
    return (y_BTD, following), (pull, pull_experts)

  weights = whole(shards_of(0)) if form.early else None
  (y_BTD, weights), pulls = jax.lax.scan(
    forward, (x_BTD, weights), jnp.arange(L)
  )

  def backward(state, step):
    dx_BTD, weights, sums = state
    (pull, pull_experts), i = step
    shards = shards_of(i - 1 if form.early else i)
    weights = weights if form.early else whole(shards)
    pull_experts.args_res[1:] = weights, segments_BT
    pull.args_res[1:] = weights, angles, segments_BT
    dx_BTD, of_experts, _ = pull_experts(dx_BTD)
    dx_BTD, shards = wall((dx_BTD, shards if form.early else None))
    following = whole(shards) if form.early else None
    dx_BTD, of_attention, _, _ = pull(dx_BTD)
    gradients = scattered(
      jax.tree.map(jnp.add, of_experts, of_attention), shapes, specs, cfg
    )
    put = lambda x, dx: jax.lax.dynamic_update_index_in_dim(x, dx, i, 0)
    return (dx_BTD, following, jax.tree.map(put, sums, gradients)), None

  state = dy_BTD, weights, jax.tree.map(jnp.zeros_like, layers)
  (dx_BTD, _, gradients), _ = jax.lax.scan(
    backward, state, (pulls, jnp.arange(L)), reverse=True
  )
  return y_BTD, gradients, dx_BTD


def of_the_model(layers, x_BTD, angles, segments_BT, dy_BTD, *, cfg, apart):
  """The same by the model itself."""

  def named(x, name):
    x = checkpoint_name(x, name)
    return jax.lax.optimization_barrier(x) if name == "stream" else x

  run = lambda layers, x_BTD: transformer._scan_layers(
    {"layers": layers}, cfg, x_BTD, angles, segments_BT
  )[0]
  with mock.patch.object(
    transformer, "checkpoint_name", named if apart else checkpoint_name
  ):
    y_BTD, pull = jax.vjp(run, layers, x_BTD)
    return y_BTD, *pull(dy_BTD)


class Form(NamedTuple):
  """What is done when.

  Attributes:
    by_hand: `by_hand`, not the model.
    early: the next layer's weights are gathered, not the layer's own.
    apart: nothing is moved between attention and experts.
  """

  by_hand: bool = True
  early: bool = False
  apart: bool = False


FORMS = {
  "the model": Form(by_hand=False),
  "the model, halves apart": Form(by_hand=False, apart=True),
  "in the layer": Form(),
  "in the layer, halves apart": Form(apart=True),
  "a layer early": Form(early=True),
  "a layer early, halves apart": Form(early=True, apart=True),
}


def program(form, cfg, mesh, T, dtype):
  """The function of a form, jitted, and the shapes of its arguments."""
  layers = jitted.abstract_params(cfg, mesh)["layers"]
  specs = jax.tree.map(lambda x: x.sharding.spec, layers)
  B = sharding.row_shards(mesh)
  rows = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(
    shape, dtype, sharding=NamedSharding(mesh, sharding.TOKENS)
  )
  stream = rows(B, T, cfg.embed_dim)
  angles = (rows(B, T, cfg.head_dim // 2, dtype=jnp.float32),) * 2
  given = layers, stream, angles, rows(B, T, dtype=jnp.int32), stream
  function = functools.partial(of_the_model, cfg=cfg, apart=form.apart)
  if form.by_hand:
    tokens = sharding.TOKENS
    function = jax.shard_map(
      functools.partial(by_hand, specs=specs, cfg=cfg, form=form),
      mesh=mesh,
      in_specs=(specs, tokens, (tokens, tokens), tokens, tokens),
      out_specs=(tokens, specs, tokens),
      check_vma=False,
    )
  out = jax.tree.map(lambda x: x.sharding, (stream, layers, stream))
  options = None
  if mesh.devices.flat[0].platform == "tpu":
    options = jitted._training_options(mesh)
  whole = jax.jit(
    lambda *given: function(*given), out_shardings=out, compiler_options=options
  )
  return sharding.MeshJit(whole, mesh), given


def measure(form, mesh, cfg, T) -> dict:
  """Bytes and milliseconds of a device."""
  function, given = program(form, cfg, mesh, T, jnp.bfloat16)
  compiled = plan_compile.compile_one(function.lower(*given))
  if compiled.memory is None:
    return {"does not fit": compiled.reason}
  scheduled = functools.partial(
    estimates.scheduled, compiled.module, TOPOLOGY, mesh
  )
  free = scheduled(
    free=lambda c: (
      c.kind == "all-gather" and len(c.members) == mesh.shape["fsdp"]
    )
  )
  return scheduled() | {
    "free_gathers_best_ms": free["best_ms"],
    "free_gathers_libtpu_ms": free["libtpu_ms"],
    "temporaries": compiled.memory.temporaries,
  }


def check() -> None:
  """All forms give the same numbers, on eight CPU devices, in float32.

  Raises:
    AssertionError: they do not.
  """
  mesh = sharding.make_mesh(jax.devices("cpu"), fsdp=4, expert=2)
  cfg = dataclasses.replace(
    model.variant("qwen3-30b-a3b"),
    num_layers=4,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=16,
    num_experts=16,
    experts_per_token=2,
    dtype="float32",
    remat="attention,stream",
    unroll=1,
  )
  rng, T, found = np.random.default_rng(0), 8, []
  for form in FORMS.values():
    function, given = program(form, cfg, mesh, T, jnp.float32)
    if not found:
      value = lambda x: (
        np.ones(x.shape, x.dtype)
        if x.dtype == jnp.int32
        else rng.normal(size=x.shape).astype(x.dtype) / 4
      )
      values = jax.tree.map(value, given)
    put = lambda x, s: jax.device_put(x, s.sharding)
    found.append(function(*jax.tree.map(put, values, given)))
  for other in found[1:]:
    close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-3)
    jax.tree.map(close, found[0], other)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path)
  parser.add_argument("--form", help="one of them", choices=FORMS)
  args = parser.parse_args()
  libtpu, found = plan_compile.prepare(), {}
  jax.config.update("jax_num_cpu_devices", 8)
  check()
  config = moe_tpu.get_config()
  sizes = {axis: config.mesh[axis] for axis in sharding.AXES}
  devices = plan_compile.devices(chips.parse(TOPOLOGY), 1)
  mesh = sharding.make_mesh(devices, **sizes)
  cfg = dataclasses.replace(
    model.variant(config.model.variant), remat=config.model.remat
  )
  T = config.data.max_prompt_length + config.sampler.max_new_tokens
  for name in [args.form] if args.form else FORMS:
    form = FORMS[name]
    found[name] = measure(form, mesh, cfg, T)
    print(name, found[name], flush=True)
  record.finish("early_fetch", {"libtpu": libtpu, "layers": found}, args.out)


if __name__ == "__main__":
  main()
