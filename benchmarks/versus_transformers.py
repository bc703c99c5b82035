"""Our samplers against `transformers`' generate: same weights, same answers.

  python -m benchmarks.versus_transformers [--quick] [--out=FILE.json]
    [--models NAME ...] [--dtype=float32]

Qwen3 and Qwen3-MoE, written to a folder that transformers loads. Each has
weights that count down (see benchmarks/lengths.py), so that both sides draw the
very same tokens, which is checked: answers of one length, or of long-tailed
ones. Both sample from the whole vocabulary at temperature 1; ours returns the
log-probs of the tokens, too. All take turns in one process, each with as many
threads as this process may use cores, and the least time of each counts.

transformers has all answers in one batch, in inference mode: with its dynamic
cache, or its static one; experts one after the other ("eager") or by grouped
products. ("batched_mm" copies the weights of each token's experts: 12 GB here.)
The best of these counts. Needs `pip install 'gspo_jax[parity]'`.
"""

import argparse
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import torch
import transformers

from benchmarks import lengths, record
from benchmarks.sampler import in_turns, refill, static
from gspo_jax import model
from gspo_jax.model import hf
from gspo_jax.sampler.paging import ContinuousBatchingConfig
from gspo_jax.sampler.samples import SamplerConfig

_TINY = {"vocab_size": 1024}
_DENSE = {"num_experts": 0, "experts_per_token": 0}
_LARGE = {
  "vocab_size": 16_384,
  "embed_dim": 512,
  "num_heads": 8,
  "num_kv_heads": 4,
  "head_dim": 64,
}
MODELS = {
  "tiny-dense": _TINY | _DENSE,
  "tiny-moe": _TINY,
  "64M-dense": _LARGE | _DENSE | {"num_layers": 12, "mlp_dim": 2048},
  "73M-moe": _LARGE
  | {"num_layers": 8, "mlp_dim": 256}
  | {"num_experts": 16, "experts_per_token": 4},
}


class Size(NamedTuple):
  """How much to draw: G answers each to P prompts of S tokens."""

  P: int
  G: int
  S: int
  most: int
  slots: int


def size(name: str, quick: bool) -> Size:
  if quick:
    return Size(4, 2, 8, 24, 4)
  if name.startswith("tiny"):
    return Size(32, 8, 32, 256, 64)
  return Size(16, 4, 32, 128, 16)


def ours(cfg, params, draw, sizes: Size) -> dict[str, Callable]:
  """By name, prompts -> tokens of the answers [B, R]."""
  paging = ContinuousBatchingConfig(
    slots=sizes.slots, page_size=16, segment_steps=32, prefill_chunk=32
  )
  found = {
    "our static": static(cfg, params, draw),
    "our refill": refill(cfg, params, draw, paging, sizes.S),
  }
  tokens = lambda f: lambda prompts: np.asarray(f(prompts).tokens)
  return {name: tokens(f) for name, f in found.items()}


def theirs(folder, cfg, draw) -> dict[str, Callable]:
  """As `ours`, by setting."""
  found = {}
  for experts in ("eager", "grouped_mm") if cfg.num_experts else (None,):
    kind = {"experts_implementation": experts} if experts else {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=getattr(torch, cfg.dtype), **kind
    )
    for cache in ("dynamic", "static"):
      name = f"{cache} {experts}" if experts else cache
      found[name] = _generate(loaded.eval(), draw, cache)
  return found


def _generate(loaded, draw, cache):
  def call(prompts):
    tokens = torch.tensor(prompts.tokens.astype(np.int64))
    tokens = tokens.repeat_interleave(draw.group_size, 0)
    with torch.inference_mode():
      out = loaded.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=draw.max_new_tokens,
        eos_token_id=list(draw.stop_ids),
        pad_token_id=draw.pad_id,
        cache_implementation=cache,
      )
    answers = out[:, tokens.shape[1] :].numpy()
    missing = draw.max_new_tokens - answers.shape[1]
    return np.pad(answers, ((0, 0), (0, missing)))

  return call


def measure(ways, sizes: Size, each, repeats: int) -> dict[str, float]:
  """Tokens a second of every way, for answers of these lengths."""
  given = lengths.prompts(each, sizes.S)
  calls = {name: functools.partial(f, given) for name, f in ways.items()}
  seconds, drawn = in_turns(calls, repeats)
  left = np.repeat(each, sizes.G)[:, None] - 1 - np.arange(sizes.most)
  for name, tokens in drawn.items():
    np.testing.assert_array_equal(tokens, np.maximum(left, 0), err_msg=name)
  tokens = sizes.G * int(each.sum())
  return {name: round(tokens / seconds[name], 1) for name in ways}


def compare(name: str, dtype: str, quick: bool) -> list[dict]:
  """The rows of a model, printed."""
  cfg = model.variant("tiny", dtype=dtype, **MODELS[name])
  params = lengths.countdown(model.init(jax.random.key(0), cfg))
  sizes = size(name, quick)
  draw = SamplerConfig(sizes.G, sizes.most, stop_ids=(lengths.STOP,))
  kinds = {
    "fixed": np.full(sizes.P, sizes.most // 4, np.int32),
    "long tail": lengths.long_tailed(sizes.P, sizes.most),
  }
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    hf.save_hf(params, cfg, f"{folder}/hf", dtype=dtype)
    ways = ours(cfg, params, draw, sizes) | theirs(f"{folder}/hf", cfg, draw)
    for kind, each in kinds.items():
      rates = measure(ways, sizes, each, repeats=1 if quick else 3)
      best = max([n for n in rates if not n.startswith("our")], key=rates.get)
      of_ours = [rates["our static"], rates["our refill"]]
      times = max(of_ours) / rates[best]
      cells = " | ".join(f"{x:,.0f}" for x in (*of_ours, rates[best]))
      print(f"{name} | {kind} | {cells} | {best} | {times:.2f}", flush=True)
      row = {"model": name, "answers": kind, "tokens_per_second": rates}
      rows.append(row | {"best": best, "times": round(times, 3)})
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
  parser.add_argument("--dtype", default="float32")
  args = parser.parse_args()
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  threads = len(os.sched_getaffinity(0))
  torch.set_num_threads(threads)
  names = ["tiny-dense", "tiny-moe"] if args.quick else args.models
  print(f"tokens/s; {args.dtype}, threads of each: {threads}")
  print("model | answers | our static | our refill | transformers | by | times")
  rows = [r for name in names for r in compare(name, args.dtype, args.quick)]
  found = {"dtype": args.dtype, "threads": threads, "rows": rows}
  record.finish("versus_transformers", found, args.out)


if __name__ == "__main__":
  main()
