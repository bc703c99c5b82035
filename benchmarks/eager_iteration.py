"""An iteration of SmolLM2 beside the same in eager PyTorch, on equal cores.

  python -m benchmarks.eager_iteration --checkpoint=models/smollm2
    [--prompts=8] [--repeats=2] [--out=FILE.json]

The keys are those of configs/smollm2_cpu.py, with fewer prompts. Theirs is
written as a trainer in PyTorch has it, with nothing compiled: `generate` of
transformers with its dynamic cache; old log-probs without a gradient; then two
minibatches, each in micro-batches of padded rows, GSPO's loss on the
log-probs of the responses, `clip_grad_norm_` and AdamW. Prompts are padded to
the longest of the batch. Parameters and moments are float32 with bfloat16
autocast, or float32 alone; a copy of the weights in bfloat16 generates, too.
The fastest one of each phase counts. Rewards are left out. The iterations
alternate in one process,
with as many threads as this process may use cores. The first of each does not
count; of the others the least time counts, per token: of the responses in
generation, of prompts and responses in the update. Needs
`pip install -e '.[parity]'`.
"""

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks import record
from benchmarks.iteration import Iterations
from gspo_jax.configs import smollm2_cpu


class Eager:
  """A policy of PyTorch and its optimizer.

  Args:
    config: all the keys of configs/common.py.
    model: of transformers. Only one in float32 is trained.
    autocast: whether products are in bfloat16.
  """

  def __init__(self, config, model, autocast: bool = False):
    self._config, self._model, self._autocast = config, model, autocast
    self._stop = self._model.generation_config.eos_token_id
    self._optimizer = torch.optim.AdamW(
      self._model.parameters(), lr=config.optim.learning_rate, fused=True
    )

  def __call__(self, prompts) -> dict[str, float]:
    """Seconds per token by phase, of one iteration."""
    with self._precision():
      began = time.monotonic()
      tokens, mask, width = self._generate(prompts)
      sampled = time.monotonic()
      found = {"generate": (sampled - began) / int(mask[:, width:].sum())}
      if self._model.dtype == torch.float32:
        self._update(tokens, mask, width)
        found["update"] = (time.monotonic() - sampled) / int(mask.sum())
    return found

  def _precision(self):
    if self._autocast:
      return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()

  def _generate(self, prompts):
    """Tokens and mask [B, S + R] and S."""
    c = self._config
    lengths = torch.tensor(np.asarray(prompts.lengths))
    width = int(lengths.max())
    tokens = torch.tensor(np.asarray(prompts.tokens, np.int64)[:, -width:])
    mask = torch.arange(width) >= width - lengths[:, None]
    tokens, mask = (
      x.repeat_interleave(c.rollout.group_size, 0) for x in (tokens, mask)
    )
    with torch.inference_mode():
      out = self._model.eval().generate(
        tokens,
        attention_mask=mask.long(),
        do_sample=True,
        temperature=c.sampler.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=c.sampler.max_new_tokens,
        pad_token_id=self._stop,
      )
    response = out[:, width:]
    stops = (response == self._stop).long()
    before_stop = stops.cumsum(1) - stops == 0
    return out.clone(), torch.cat([mask, before_stop], 1), width

  def _logps(self, tokens, mask, width):
    """Of the tokens of the responses, [B, R]."""
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    logits = self._model(
      tokens,
      attention_mask=mask.long(),
      position_ids=positions,
      logits_to_keep=tokens.shape[1] - width + 1,
    ).logits[:, :-1]
    scaled = logits.float() / self._config.sampler.temperature
    chosen = scaled.gather(-1, tokens[:, width:, None])[..., 0]
    return chosen - scaled.logsumexp(-1)

  def _update(self, tokens, mask, width):
    c = self._config
    micro = c.learner.micro_batch_size
    rows = torch.randperm(len(tokens))
    advantages = torch.randn(len(tokens))
    self._model.train()
    with torch.no_grad():
      old = torch.cat(
        [
          self._logps(t, m, width)
          for t, m in zip(tokens.split(micro), mask.split(micro), strict=True)
        ]
      )
    for minibatch in rows.chunk(c.learner.minibatches):
      for chosen in minibatch.split(micro):
        response = mask[chosen, width:]
        logps = self._logps(tokens[chosen], mask[chosen], width)
        gap = ((logps - old[chosen]) * response).sum(1) / response.sum(1)
        ratio, advantage = gap.exp(), advantages[chosen]
        clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)  # GSPO, section 5.1
        terms = torch.minimum(ratio * advantage, clipped * advantage)
        (-terms.sum() / len(minibatch)).backward()
      torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
      self._optimizer.step()
      self._optimizer.zero_grad()


def ours(iterations: Iterations, step: int) -> dict[str, float]:
  """Seconds per token by phase, of one iteration."""
  seconds, samples = iterations(step), iterations.samples
  lengths = np.asarray(samples.lengths)
  group = len(lengths) // len(iterations.prompts.lengths)
  tokens = lengths.sum() + group * np.asarray(iterations.prompts.lengths).sum()
  return {
    "generate": seconds["generate"] / lengths.sum(),
    "update": (seconds["logps"] + seconds["update"]) / tokens,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--checkpoint", default="models/smollm2")
  parser.add_argument("--prompts", type=int, default=8)
  parser.add_argument("--repeats", type=int, default=2)
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  config = smollm2_cpu.get_config()
  config.model.checkpoint = args.checkpoint
  config.data.prompts = args.prompts
  with tempfile.TemporaryDirectory() as folder:
    iterations = Iterations(config, folder)
    load = lambda dtype: transformers.AutoModelForCausalLM.from_pretrained(
      args.checkpoint, dtype=dtype
    )
    model = load(torch.float32)
    theirs = {
      "bfloat16 autocast": Eager(config, model, autocast=True),
      "float32": Eager(config, model),
      "bfloat16 weights": Eager(config, load(torch.bfloat16)),
    }
    found = {name: [] for name in ("ours", *theirs)}
    with iterations.reward_pool:
      for step in range(args.repeats + 1):
        found["ours"].append(ours(iterations, step))
        for name, eager in theirs.items():
          found[name].append(eager(iterations.prompts))
  least = {
    name: {k: min(row[k] for row in rows[1:]) for k in rows[0]}
    for name, rows in found.items()
  }
  rows = {}
  for phase in least["ours"]:
    seconds = {name: s[phase] for name, s in least.items() if phase in s}
    best = min(seconds.keys() & theirs.keys(), key=seconds.get)
    speeds = {name: round(1 / s, 1) for name, s in seconds.items()}
    rows[phase] = {
      "tokens_per_second": speeds,
      "best": best,
      "times": round(seconds[best] / seconds["ours"], 3),
    }
  measured = {"prompts": args.prompts, "phases": rows}
  record.finish("eager_iteration", measured, args.out)


if __name__ == "__main__":
  main()
