"""Peak memory of token log-probs in pieces against all logits at once.

  python -m benchmarks.logprobs [--tokens=4096] [--chips=1] [--kept_ids=64]

Forward and backward of the output layer of Qwen3-30B-A3B (D = 2,048, V =
151,936), bfloat16, compiled by libtpu for v5p; the peaks are the compiler's own
report. Nothing runs. With `kept_ids` pieces are over so many ids of a token.
Needs `pip install -e '.[plan]'`.
"""

import argparse
import dataclasses
import json

from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile


def peaks(tokens: int, count: int, kept: int) -> dict[str, int]:
  """Bytes a chip, of logits in pieces and of logits at once."""
  libtpu = plan_compile.prepare()  # before any use of JAX's backends
  import jax
  import jax.numpy as jnp

  from gspo_jax import logprobs, model
  from gspo_jax.runtime import sharding

  cfg = dataclasses.replace(model.variant("qwen3-30b-a3b"), num_layers=1)
  devices = plan_compile.devices(chips.parse("v5p:2x2x2"), 1)[:count]
  mesh = sharding.make_mesh(devices, expert=count)
  rows = sharding.batch_sharding(mesh)
  head = jax.sharding.NamedSharding(
    mesh, model.parameters.partition_spec("head")
  )
  shape = lambda dims, dtype, lay: jax.ShapeDtypeStruct(
    dims, dtype, sharding=lay
  )
  D, V = cfg.embed_dim, cfg.vocab_size
  given = (
    shape((count, tokens, D), jnp.bfloat16, rows),
    shape((D, V), jnp.float32, head),
    shape((count, tokens), jnp.int32, rows),
    shape((count, kept, tokens), jnp.int32, rows) if kept else None,
  )

  def pieces(hidden, head, targets, ids):
    return logprobs.logps_and_entropy(
      hidden, head, targets, cfg, 1.0, kept_ids_BKR=ids
    )[0].sum()

  def at_once(hidden, head, targets, ids):
    logps = jax.nn.log_softmax(model.project_logits(hidden, head, cfg))
    return jnp.take_along_axis(logps, targets[..., None], -1).sum()

  result = {"libtpu": libtpu, "tokens_a_chip": tokens, "chips": count}
  for name, function in (("pieces", pieces), ("at once", at_once)):
    with jax.set_mesh(mesh):
      lowered = jax.jit(jax.grad(function, argnums=(0, 1))).lower(*given)
      done = lowered.compile()
    result[name] = done.memory_analysis().peak_memory_in_bytes
  return result | {"ratio": result["at once"] / result["pieces"]}


if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  parser.add_argument("--tokens", type=int, default=4096)
  parser.add_argument("--chips", type=int, default=1, choices=(1, 2, 4, 8))
  parser.add_argument("--kept_ids", type=int, default=0)
  args = parser.parse_args()
  print(json.dumps(peaks(args.tokens, args.chips, args.kept_ids)))
