"""Our samplers against the `generate` of `transformers`, on equal weights.

  python -m benchmarks.versus_transformers [--quick] [--out=FILE.json]
    [--models NAME ...] [--dtype=float32]

Qwen3 and Qwen3-MoE, written to a folder that transformers loads. Each has
weights that count down (see benchmarks/lengths.py), so that both sides sample
the same tokens, which is checked: responses of one length, or of long-tailed
lengths. Both sample from the whole vocabulary at temperature 1; ours also
return the log-probs of the tokens. The calls alternate in one process, each
with as many threads as this process may use cores, and the least time of each
counts.

transformers decodes all responses in one batch, in inference mode: with its
dynamic or its static cache; experts one after the other ("eager") or by grouped
products. ("batched_mm" copies the weights of each token's experts: 12 GB here.)
The best of these counts. Needs `pip install -e '.[parity]'`.
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
from benchmarks.sampler import build, static, time_in_turns
from gspo_jax import model
from gspo_jax.model import hf
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
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
  """G responses of at most `most` tokens to each of P prompts of S tokens."""

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


def ours(cfg, params, config, sizes: Size) -> dict[str, Callable]:
  """Our samplers by name: prompts -> tokens of the responses [B, R]."""
  batching = ContinuousBatchingConfig(
    slots=sizes.slots, page_size=16, segment_steps=32, prefill_chunk=32
  )
  continuous = build(cfg, params, config, batching, sizes.S)
  samplers = {
    "our static": static(cfg, params, config),
    "our continuous": lambda prompts: continuous(
      params, prompts, jax.random.key(0)
    ),
  }
  tokens = lambda f: lambda prompts: np.asarray(f(prompts).tokens)
  return {name: tokens(f) for name, f in samplers.items()}


def theirs(folder, cfg, config) -> dict[str, Callable]:
  """The same of transformers, by the name of its setting."""
  samplers = {}
  for experts in ("eager", "grouped_mm") if cfg.num_experts else (None,):
    kind = {"experts_implementation": experts} if experts else {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=getattr(torch, cfg.dtype), **kind
    )
    for cache in ("dynamic", "static"):
      name = f"{cache} {experts}" if experts else cache
      samplers[name] = _generate(loaded.eval(), config, cache)
  return samplers


def _generate(loaded, config, cache):
  def call(prompts):
    tokens = torch.tensor(prompts.tokens.astype(np.int64))
    tokens = tokens.repeat_interleave(config.group_size, 0)
    with torch.inference_mode():
      out = loaded.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=config.max_new_tokens,
        eos_token_id=list(config.stop_ids),
        pad_token_id=config.pad_id,
        cache_implementation=cache,
      )
    responses = out[:, tokens.shape[1] :].numpy()
    missing = config.max_new_tokens - responses.shape[1]
    return np.pad(responses, ((0, 0), (0, missing)))

  return call


def measure(
  samplers, sizes: Size, response_lengths, repeats: int
) -> dict[str, float]:
  """Tokens a second of each sampler, for responses of these lengths."""
  batch = lengths.prompts(response_lengths, sizes.S)
  calls = {name: functools.partial(f, batch) for name, f in samplers.items()}
  seconds, results = time_in_turns(calls, repeats)
  expected = np.repeat(response_lengths, sizes.G)
  countdown = np.maximum(expected[:, None] - 1 - np.arange(sizes.most), 0)
  for name, tokens in results.items():
    np.testing.assert_array_equal(tokens, countdown, err_msg=name)
  tokens = int(expected.sum())
  return {name: round(tokens / seconds[name], 1) for name in samplers}


def compare(name: str, dtype: str, quick: bool) -> list[dict]:
  """Measures and prints the rows of one model."""
  cfg = model.variant("tiny", dtype=dtype, **MODELS[name])
  params = lengths.countdown(model.init(jax.random.key(0), cfg))
  sizes = size(name, quick)
  config = SamplerConfig(sizes.G, sizes.most, stop_ids=(lengths.STOP,))
  kinds = {
    "fixed": np.full(sizes.P, sizes.most // 4, np.int32),
    "long tail": lengths.long_tailed(sizes.P, sizes.most),
  }
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    hf.save_hf(params, cfg, f"{folder}/hf", dtype=dtype)
    samplers = ours(cfg, params, config, sizes)
    samplers |= theirs(f"{folder}/hf", cfg, config)
    for kind, response_lengths in kinds.items():
      rates = measure(samplers, sizes, response_lengths, 1 if quick else 3)
      best = max([n for n in rates if not n.startswith("our")], key=rates.get)
      our_rates = [rates["our static"], rates["our continuous"]]
      times = max(our_rates) / rates[best]
      cells = " | ".join(f"{x:,.0f}" for x in (*our_rates, rates[best]))
      print(f"{name} | {kind} | {cells} | {best} | {times:.2f}", flush=True)
      row = {"model": name, "responses": kind, "tokens_per_second": rates}
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
  print(
    "model | responses | our static | our continuous | transformers | by | "
    "times"
  )
  rows = [r for name in names for r in compare(name, args.dtype, args.quick)]
  results = {"dtype": args.dtype, "threads": threads, "rows": rows}
  record.finish("versus_transformers", results, args.out)


if __name__ == "__main__":
  main()
