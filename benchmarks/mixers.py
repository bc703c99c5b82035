"""Training and decoding by attention, gated DeltaNets and latent attention.

  taskset -c 0 python -m benchmarks.mixers [--quick] [--out=FILE.json]

Three models of four layers with experts: Qwen3-MoE; three gated DeltaNets and
one attention, as Qwen3.5; MLA in every layer, as DeepSeek-V3. The experts'
width makes their active parameters equal within 1 %. Of each: the seconds of a
forward and a backward pass over a row, of a decode step of 16 rows, of the
prefill of a row, and of a copy of its states, the medians of runs in turns; and
what a response of that length keeps in memory.
"""

import argparse
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import record
from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.plan import lower_bounds

SIZES = {
  "num_layers": 4,
  "embed_dim": 256,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 64,
  "num_experts": 8,
  "experts_per_token": 2,
  "vocab_size": 512,
  "dtype": "float32",
}
KINDS = "train", "decode", "prefill", "copy"
DELTA = model.Layer(mixer="delta_net")
MIXERS = {
  "attention": {"mlp_dim": 256},
  "delta_net": {
    "mlp_dim": 212,
    "pattern": (DELTA, DELTA, DELTA, model.Layer()),
    "output_gate": True,
    "rotary_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
  },
  "mla": {
    "mlp_dim": 238,
    "pattern": (model.Layer(mixer="mla"),),
    "num_kv_heads": 4,
    "kv_lora_rank": 128,
    "v_head_dim": 64,
    "rotary_dim": 16,
  },
}


def functions(cfg, tokens: int, rows: int):
  """The compiled functions by `KINDS`, with their arguments."""
  params = model.init(jax.random.key(0), cfg)
  ids = jnp.asarray(
    np.random.default_rng(0).integers(0, cfg.vocab_size, (1, tokens))
  )
  positions, mask = jnp.arange(tokens)[None], jnp.ones((1, tokens), int)

  def loss(params):
    return jnp.square(
      model.hidden_states(params, cfg, ids, positions, mask).hidden
    ).sum()

  decoding = model.unstack_layers(params, cfg)
  cache = kv.empty(cfg, rows, tokens + 1)
  one = jnp.ones((rows, 1), int)

  def step(cache):
    out = model.hidden_states(decoding, cfg, one, tokens * one, one, cache)
    return out.hidden

  def prefill(cache):
    return model.hidden_states(decoding, cfg, ids, positions, mask, cache).cache

  row = kv.empty(cfg, 1, tokens)
  copy = lambda states: jax.tree.map(jnp.copy, states)
  calls = (jax.grad(loss), params), (step, cache), (prefill, row)
  calls = *calls, (copy, row.states)
  pairs = zip(KINDS, calls, strict=True)
  return {kind: (jax.jit(call), argument) for kind, (call, argument) in pairs}


def kept_bytes(cfg, tokens: int) -> dict:
  cache = jax.eval_shape(lambda: kv.empty(cfg, 1, tokens))
  size = lambda tree: sum(
    x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )
  return {"tokens": size(cache.kv), "states": size(cache.states)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="short, once")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  lengths = (32,) if args.quick else (256, 1024, 4096)
  found = {}
  for tokens in lengths:
    configs = {
      name: model.variant("tiny", **SIZES | {"remat": "none"} | changes)
      for name, changes in MIXERS.items()
    }
    calls = {name: functions(cfg, tokens, 16) for name, cfg in configs.items()}
    seconds = {}
    for repeat in range(2 if args.quick else 6):
      for name, by_kind in calls.items():
        for kind, (call, argument) in by_kind.items():
          start = time.perf_counter()
          jax.block_until_ready(call(argument))
          if repeat:  # the first one compiles
            times = seconds.setdefault((name, kind), [])
            times.append(time.perf_counter() - start)
    found[tokens] = {
      name: {
        "active_parameters": lower_bounds.active_parameters(cfg),
        "kept_bytes": kept_bytes(cfg, tokens),
      }
      | {k: statistics.median(seconds[name, k]) for k in KINDS}
      for name, cfg in configs.items()
    }
    for name, row in found[tokens].items():
      base = found[tokens]["attention"]
      ratios = (f"{k} {row[k] / base[k]:.2f}" for k in KINDS[:2])
      print(f"{tokens} tokens, {name}: times as long: {', '.join(ratios)}")
  record.finish("mixers", {"by_tokens": found}, args.out)


if __name__ == "__main__":
  main()
