"""How far sampler and trainer are apart in bfloat16, layer by layer.

  python -m benchmarks.sampler_gap [--quick] [--families] [--out=FILE.json]

The same tokens go through the model twice: all at one time, as the trainer
scores them, and one after the other against a cache, as the sampler decodes.
After each layer: the share of the numbers of the residual stream that differ,
and the root mean square of the difference over that of the stream. At the end:
the mean over sequences of |mean(o - q)|, o the trainer's log-probs and q the
sampler's, beside the lower clip range of GSPO. Each with the compiler's own
choice of where to round ("default"), and as a run is compiled ("as written").
The latter also with what decodes rounded to int8: the experts' weights, with a
scale for each output of each expert ("int8 experts"), or keys and values once
they are in the cache, with a scale for each token and head ("int8 cache").
Random weights.
"""

import argparse
import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import record
from gspo_jax import model
from gspo_jax.losses import METHODS
from gspo_jax.model import cache as kv
from gspo_jax.model import rounding

OPTIONS = {"default": {}, "as written": rounding.OPTIONS}
INT8 = ("int8 experts", "int8 cache")
FAMILIES = [name for name in model.VARIANTS if name.startswith("tiny-")]


def int8(x, axis):
  """The values of `x` that int8 with a scale for each slice of `axis` holds."""
  x = x.astype(jnp.float32)
  scale = jnp.abs(x).max(axis, keepdims=True) / 127
  return jnp.round(x / jnp.where(scale, scale, 1)) * scale


def int8_experts(params):
  """The weights with those of the experts as int8 holds them."""

  def one(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return int8(x, -2) if name.endswith(("moe/gate_up", "moe/down")) else x

  return jax.tree_util.tree_map_with_path(one, params)


def int8_cache(cache, t):
  """The cache with slot `t` as int8 holds it."""

  def slot(x_BKSH):
    new = jax.lax.dynamic_slice_in_dim(x_BKSH, t, 1, axis=2)
    new = int8(new, -1).astype(x_BKSH.dtype)
    return jax.lax.dynamic_update_slice_in_dim(x_BKSH, new, t, axis=2)

  return dataclasses.replace(cache, kv=jax.tree.map(slot, cache.kv))


def forced(params, tokens, cfg):
  """All tokens at one time: hidden states and experts."""
  B, T = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(T), (B, T))
  out = model.hidden_states(
    params, cfg, tokens, positions, jnp.ones_like(tokens)
  )
  return out.hidden, None if out.routing is None else out.routing.experts


def decoded(params, tokens, cfg, variant):
  """One token after the other: hidden states and experts."""
  B, T = tokens.shape
  if variant == "int8 experts":
    params = int8_experts(params)
  params = model.unstack_layers(params, cfg)

  def step(cache, t):
    at = jnp.full((B, 1), t)
    out = model.hidden_states(
      params,
      cfg,
      jax.lax.dynamic_slice_in_dim(tokens, t, 1, axis=1),
      at,
      jnp.ones_like(at),
      cache,
    )
    routing = out.routing
    experts = None if routing is None else routing.experts[:, :, 0]
    cache = out.cache
    if variant == "int8 cache":
      cache = int8_cache(cache, t)
    return cache, (out.hidden[:, 0], experts)

  _, (hidden, experts) = jax.lax.scan(step, kv.empty(cfg, B, T), jnp.arange(T))
  if experts is not None:
    experts = jnp.moveaxis(experts, 0, 2)  # [T, L, B, k] -> [L, B, T, k]
  return hidden.swapaxes(0, 1), experts


def log_probs(params, hidden, tokens, cfg):
  """Of each token but the first, [B, T - 1]."""
  logps = jax.nn.log_softmax(model.unembed(params, cfg, hidden[:, :-1]))
  return jnp.take_along_axis(logps, tokens[:, 1:, None], axis=2)[..., 0]


def measure(cfg, tokens, variant) -> dict:
  """The gap after each layer, and of the log-probs.

  Args:
    cfg: the model.
    tokens: [B, T].
    variant: of `OPTIONS` or `INT8`.
  """
  options = OPTIONS.get(variant, rounding.OPTIONS)
  jit = lambda f, c: jax.jit(
    functools.partial(f, cfg=c), compiler_options=options
  )
  decode = functools.partial(decoded, variant=variant)
  params = model.init(jax.random.key(0), cfg)
  layers = []
  for depth in range(1, cfg.num_layers + 1):
    shallow = dataclasses.replace(cfg, num_layers=depth)
    cut = params | {
      "layers": jax.tree.map(lambda x: x[:depth], params["layers"])  # noqa: B023
    }
    (x, chosen), (y, decoded_by) = (
      jit(f, shallow)(cut, tokens) for f in (forced, decode)
    )
    gap = np.asarray(x - y, np.float64)
    size = np.sqrt(np.square(np.asarray(x, np.float64)).mean())
    row = {"differ": float((gap != 0).mean())}
    row["relative"] = float(np.sqrt(np.square(gap).mean()) / size)
    if chosen is not None:
      row["flips"] = float(np.asarray(chosen != decoded_by)[-1].any(-1).mean())
    layers.append(row)
  return {"layers": layers} | gap_at_end(jit, params, (x, y), tokens, cfg)


def gap_at_end(jit, params, hidden, tokens, cfg) -> dict:
  """The mean absolute gap of the log-probs of a token, and of a sequence."""
  last = jit(log_probs, cfg)
  trainer, sampler = (last(params, h, tokens) for h in hidden)
  gap = trainer - sampler
  return {
    "token": float(jnp.abs(gap).mean()),
    "sequence": float(jnp.abs(gap.mean(1)).mean()),
  }


def of_family(cfg, tokens) -> dict:
  jit = lambda f, c: jax.jit(
    functools.partial(f, cfg=c), compiler_options=rounding.OPTIONS
  )
  params = model.init(jax.random.key(0), cfg)
  decode = functools.partial(decoded, variant="as written")
  hidden = [jit(f, cfg)(params, tokens)[0] for f in (forced, decode)]
  return gap_at_end(jit, params, hidden, tokens, cfg)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="two layers")
  parser.add_argument(
    "--families", action="store_true", help="alone; the rest of FILE stays"
  )
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  size = {"num_layers": 2 if args.quick else 6, "dtype": "bfloat16"}
  dense = {"num_experts": 0, "experts_per_token": 0}
  models = {
    "dense": model.variant("tiny", **size, **dense),
    "experts": model.variant("tiny", **size),
  }
  shape = (8, 16) if args.quick else (64, 128)
  tokens = np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)
  found = {}
  for name, cfg in () if args.families else models.items():
    variants = [*OPTIONS, *INT8] if cfg.num_experts else [*OPTIONS, INT8[1]]
    found[name] = {v: measure(cfg, tokens, v) for v in variants}
    for variant, one in found[name].items():
      print(f"{name}, {variant}")
      for depth, row in enumerate(one["layers"], 1):
        cells = (f"{key} {value:.1e}" for key, value in row.items())
        print(f"  layer {depth}: {', '.join(cells)}")
      print_gap(one)
  families = {}
  for name in FAMILIES[-1:] if args.quick else FAMILIES:
    cfg = model.variant(name, dtype="bfloat16")
    families[name] = of_family(cfg, tokens)
    print(name)
    print_gap(families[name])
  results = {"shape": shape, "models": found, "families": families}
  if args.families:
    results["families_commit"] = record.commit()
    if args.out:
      results["models"] = json.loads(args.out.read_text())["models"]
  record.finish("sampler_gap", results, args.out)


def print_gap(gap: dict) -> None:
  share = gap["sequence"] / METHODS["gspo"].arguments["clip_low"]
  print(
    f"  a token {gap['token']:.1e}, a sequence {gap['sequence']:.1e}", end=""
  )
  print(f" = {share:.2f} of clip_low")


if __name__ == "__main__":
  main()
