"""The last responses of a batch, with drafted tokens and without.

  python -m benchmarks.speculation --checkpoint=models/smollm2
    --data=gsm8k/test.jsonl [--dtype=float32] [--drafts 3 7] [--out=FILE.json]

The policy is SmolLM2-135M-Instruct, whose step of few rows reads weights most
of the time, as on a TPU. 16 responses to 2 questions ("question" in JSON lines)
are sampled; then the tail: the 4 longest go on from their 32nd token, while the
others have ended. Samplers with and without drafts decode the same tail in
turns, in one process, with the same slots: 16, of which they compute 4, and
pages of 64 tokens: a CPU adds up pages one by one, so that pages of 16 take as
long as weights. Seconds are CPU time of all threads, which other processes
change little. Of each sampler the least time of a step counts, times its steps.

tokens a step: of a response, in the tail.
of all: of all 16 responses, were each decoded while the others have ended.
same: the share of tokens that are those without drafts, up to the first other.
logps: the largest difference of the log-probs of these.
"""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np

from benchmarks import record
from benchmarks.sampler import build
from gspo_jax.data import tokenizers
from gspo_jax.model import hf
from gspo_jax.sampler.continuous import ContinuousSampler, speculation
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import UNFINISHED, Prompts, SamplerConfig

_SYSTEM = "Solve the problem step by step."
_WIDTH, _GROUP, _LEFT, _START = 160, 8, 4, 32
_BATCHING = ContinuousBatchingConfig(
  slots=2 * _GROUP, page_size=64, segment_steps=32, prefill_chunk=192
)


def questions(path: Path, tokenizer, skip: int) -> Prompts:
  """Two that fit, after `skip` others."""
  rows = []
  for line in path.read_text().splitlines():
    ids = tokenizer.prompt(json.loads(line)["question"], _SYSTEM)
    if len(ids) <= _WIDTH:
      rows.append(ids)
  rows = rows[skip : skip + 2]
  tokens = np.zeros((len(rows), _WIDTH), np.int32)
  for i, ids in enumerate(rows):
    tokens[i, _WIDTH - len(ids) :] = ids
  return Prompts(tokens, np.array([len(ids) for ids in rows], np.int32))


class Tail:
  """The last responses to the prompts, decoded again by any sampler."""

  def __init__(self, params, prompts: Prompts, key: jax.Array, samples):
    self._args = params, prompts, key
    lengths = samples.lengths
    again = np.argsort(lengths, kind="stable")[-_LEFT:]
    finish = samples.finish.copy()
    finish[again] = UNFINISHED
    start = lengths.copy()
    start[again] = np.minimum(_START, lengths[again] - 1)
    self._from = dataclasses.replace(samples, lengths=start, finish=finish)
    self.tokens = int((lengths - start).sum())
    self.expected = samples

  def __call__(self, generate):
    """Samples; and of segments of few slots the steps and seconds of each."""
    segments = []

    def decode(params, state, samples, *rest):
      before = int(samples.slot_steps)
      slots, drafts = rest[1], rest[-1]
      start = time.process_time()
      state, samples, results = generate.jitted.decode(
        params, state, samples, *rest
      )
      after = int(samples.slot_steps)  # waits
      if slots is not None:
        steps = (after - before) // (slots.size * (1 + drafts))
        segments.append((steps, time.process_time() - start))
      return state, samples, results

    jitted = SimpleNamespace(**vars(generate.jitted) | {"decode": decode})
    spied = dataclasses.replace(generate, jitted=jitted)
    samples = self._from
    if generate.config.speculation:
      samples = dataclasses.replace(samples, drafts=(np.int32(0),) * 2)
    samples = jax.device_get(spied(*self._args, resume_from=samples))
    return samples, segments


def compared(samples, expected) -> dict:
  """How equal the responses are, up to the first other token."""
  R = expected.tokens.shape[1]
  real = np.arange(R) < expected.lengths[:, None]
  same = (samples.tokens == expected.tokens).cumprod(1).astype(bool) & real
  gap = np.abs(samples.logps - expected.logps)[same].max()
  return {
    "same": round(float(same.sum() / real.sum()), 4),
    "logps": float(gap),
  }


def tokens_a_step(samples, count: int) -> float:
  """Tokens that a response gets in a step, if the others have ended."""
  draft = jax.jit(
    functools.partial(speculation.draft, count=count, group_size=_GROUP)
  )
  steps = 0
  for first in range(_GROUP):
    rows = np.arange(first, len(samples.lengths), _GROUP)
    whole, done = samples.lengths[rows], np.zeros(len(rows), np.int32)
    while (done < whole).any():
      lengths = samples.lengths.copy()
      lengths[rows] = done
      guesses = draft(dataclasses.replace(samples, lengths=lengths), rows, done)
      at = done[:, None] + np.arange(count)
      right = (
        guesses
        == samples.tokens[
          rows[:, None], np.minimum(at, samples.tokens.shape[1] - 1)
        ]
      )
      right &= at < whole[:, None]
      accepted = np.asarray(right).cumprod(1).sum(1)
      steps += (done < whole).sum()
      done = np.minimum(done + 1 + accepted, whole).astype(np.int32)
  return round(float(samples.lengths.sum() / steps), 3)


def measure(tail: Tail, samplers: dict, repeats: int) -> list[dict]:
  found = {drafts: [] for drafts in samplers}
  for _ in range(repeats):
    for drafts, generate in samplers.items():
      samples, segments = tail(generate)
      found[drafts].append((samples, segments))
  rows, expected = [], found[0][0][0]
  for drafts, runs in found.items():
    samples, segments = runs[0]
    tokens = 1.0
    if drafts:
      steps, accepted = map(int, samples.drafts)
      tokens = 1 + accepted / steps
    steps = sum(steps for steps, _ in segments)
    step = min(  # the first run compiles
      seconds / steps
      for _, segments in runs[1:]
      for steps, seconds in segments
      if steps
    )
    row = {"drafted": drafts, "tokens_a_step": round(tokens, 3)}
    row["of_all"] = tokens_a_step(tail.expected, drafts) if drafts else 1.0
    row |= {"steps": steps, "ms_a_step": round(1e3 * step, 2)}
    row |= {"seconds": round(step * steps, 3)} | compared(samples, expected)
    rows.append(row)
    row["times"] = round(rows[0]["seconds"] / row["seconds"], 3)
    print(" | ".join(map(str, row.values())), flush=True)
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--checkpoint", default="models/smollm2")
  parser.add_argument("--data", type=Path, required=True)
  parser.add_argument("--dtype", default="bfloat16")
  parser.add_argument("--drafts", type=int, nargs="+", default=[3])
  parser.add_argument(
    "--temperatures", type=float, nargs="+", default=[1.0, 0.6]
  )
  parser.add_argument("--tokens", type=int, default=320)
  parser.add_argument("--batches", type=int, default=2)
  parser.add_argument("--repeats", type=int, default=2)
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  cfg = dataclasses.replace(
    hf.config_from_hf(args.checkpoint), dtype=args.dtype
  )
  params = hf.load_hf(args.checkpoint, cfg)
  tokenizer = tokenizers.load(args.checkpoint)
  rows = []
  sizes = mock.patch.object(
    ContinuousSampler, "compute_sizes", (_BATCHING.slots, _LEFT)
  )
  sizes.start()
  print(
    "drafted | tokens a step | of all | steps | ms a step | s | same | logps "
    "| times"
  )
  for temperature in args.temperatures:
    config = SamplerConfig(
      _GROUP,
      args.tokens,
      stop_ids=tokenizer.stop_ids,
      temperature=temperature,
    )
    samplers = {}
    for drafts in (0, *args.drafts):
      drafting = dataclasses.replace(config, speculation=drafts)
      samplers[drafts] = build(cfg, params, drafting, _BATCHING, _WIDTH)
    for batch in range(args.batches):
      prompts = questions(args.data, tokenizer, 2 * batch)
      key = jax.random.key(batch)
      samples = jax.device_get(samplers[0](params, prompts, key))
      tail = Tail(params, prompts, key, samples)
      found = measure(tail, samplers, args.repeats)
      rows += [
        {"temperature": temperature, "batch": batch, "tokens": tail.tokens} | x
        for x in found
      ]
  record.finish("speculation", {"dtype": args.dtype, "rows": rows}, args.out)


if __name__ == "__main__":
  main()
