"""Tokens per second of both samplers, and what of their work was of use.

  python -m benchmarks.sampler [--quick] [--out=FILE.json]

256 answers of the embedded default's policy, by the static sampler and by
refill, over a grid: group size, prompt length, and lengths of answers (all of
one length, that being the most allowed or a tenth of it; or a median of a tenth
of the most, 5 % of them at it: see benchmarks/lengths.py for how a policy is
made to give such answers). Both draw the same tokens, which is checked; they
take turns, and the least time of each counts.

useful: decode steps of a slot that drew a token of an answer, of all that were
  computed; and of those while answers wait, the steady state of many.
bytes a token: what the decode steps must read, by the tokens drawn. Of weights
  all but the embedding, once a step. Of keys and values, static: in every row
  the cache as long as it then is (it doubles), and the prompts once a group;
  refill: the pages of each row that decodes, the prompt's in each of its rows.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import lengths, record
from benchmarks.replay import least_seconds
from gspo_jax import model, sampler
from gspo_jax.runtime import sharding
from gspo_jax.sampler import continuous
from gspo_jax.sampler import static as static_sampler
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.paging import ContinuousBatchingConfig
from gspo_jax.sampler.samples import SamplerConfig


def static(cfg, params, draw):
  """Prompts -> their answers, each drawn to its end beside the longest."""
  jitted = jax.jit(functools.partial(sampler.generate, cfg=cfg, sampler=draw))
  key = jax.random.key(0)
  return lambda prompts: jitted(params, prompts=prompts, key=key)


def build(
  cfg, params, draw, paging: ContinuousBatchingConfig, prompt: int
) -> ContinuousSampler:
  """Refill on one device."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  return continuous.build(
    cfg,
    draw,
    paging=paging,
    prompt=prompt,
    params=sharding.state_shardings(params, mesh),
    mesh=mesh,
    decoding=mesh,
  )


def refill(cfg, params, draw, paging: ContinuousBatchingConfig, prompt: int):
  """Prompts of `prompt` tokens -> answers, `paging.slots` at a time."""
  paged = build(cfg, params, draw, paging, prompt)
  return lambda prompts: paged(params, prompts, jax.random.key(0))


def watch(
  paged: ContinuousSampler, params, prompts
) -> tuple[int, float | None]:
  """Decode steps; and the useful slot-steps, as long as answers wait."""
  steps, begun, shares = [], [], [None]

  def decode(params, state, samples, orders, few, floor, key):
    before = int(samples.slot_steps)
    state, samples = paged.devices.decode(
      params, state, samples, orders, few, floor, key
    )
    after = int(samples.slot_steps)
    begun.append(int(np.asarray(orders.new).sum()))
    steps.append(
      (after - before) // (orders.active if few is None else few).size
    )
    if sum(begun) < samples.lengths.size:
      shares.append(int(samples.lengths.sum()) / after)
    return state, samples

  watched = dataclasses.replace(paged.devices, decode=decode)
  spied = dataclasses.replace(paged, devices=watched)
  jax.block_until_ready(spied(params, prompts, jax.random.key(0)))
  return sum(steps), shares[-1]


def in_turns(calls: dict, repeats: int) -> tuple[dict, dict]:
  """Least seconds of each call, and what it returned."""
  found = {}

  def keep(name, call):
    found[name] = call()
    return found[name]

  kept = {n: functools.partial(keep, n, call) for n, call in calls.items()}
  return least_seconds(kept, repeats), found


def weight_bytes(params) -> int:
  """What a decode step reads of the weights."""
  read = {name: x for name, x in params.items() if name != "embed"}
  return sum(x.nbytes for x in jax.tree.leaves(read))


def static_tokens(cfg, draw, prompts, longest: int) -> int:
  """Keys that a static batch reads until its longest answer has ended."""
  P, S = prompts.tokens.shape
  read = slots = 0
  for step in range(1, longest):  # the prefill draws the first token
    if step > slots:
      slots = static_sampler.cache_slots(slots, cfg, draw)
    read += P * draw.group_size * slots + P * S
  return read


def paged_tokens(page: int, prompt: int, each: np.ndarray) -> int:
  """Keys that answers of these lengths read in pages."""
  seen = [prompt - 1 + np.arange(1, length + 1) for length in each]
  return sum(int((-(-x // page)).sum()) * page for x in seen)


def key_bytes(cfg) -> int:
  """Of the keys and values of one token, in all layers."""
  size = np.dtype(cfg.dtype).itemsize
  return 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * size


class Bench(NamedTuple):
  """Both samplers, to be called with prompts of `prompt` tokens."""

  cfg: model.ModelConfig
  params: model.Params
  draw: SamplerConfig
  paging: ContinuousBatchingConfig
  prompt: int
  static: Callable
  paged: ContinuousSampler

  def measure(self, each: np.ndarray, repeats: int) -> dict:
    """By sampler, of answers of these lengths, one for each prompt."""
    G, given = self.draw.group_size, lengths.prompts(each, self.prompt)
    rest = self.params, given, jax.random.key(0)
    calls = {
      "static": functools.partial(self.static, given),
      "refill": functools.partial(self.paged, *rest),
    }
    seconds, drawn = in_turns(calls, repeats)
    answers = np.repeat(each, G)
    left = answers[:, None] - 1 - np.arange(self.draw.max_new_tokens)
    for name, samples in drawn.items():
      np.testing.assert_array_equal(samples.lengths, answers, err_msg=name)
      wanted = np.maximum(left, 0)
      np.testing.assert_array_equal(samples.tokens, wanted, err_msg=name)
    keys = {
      "static": static_tokens(self.cfg, self.draw, given, each.max()),
      "refill": paged_tokens(self.paging.page_size, self.prompt, answers),
    }
    # The prefill of the static one draws the first token.
    steps = {"static": int(drawn["static"].slot_steps) // len(answers) - 1}
    steps["refill"], share = watch(self.paged, self.params, given)
    tokens, found = int(answers.sum()), {}
    for name, samples in drawn.items():
      read = weight_bytes(self.params) * steps[name]
      read += key_bytes(self.cfg) * keys[name]
      found[name] = {
        "tokens_per_second": round(tokens / seconds[name], 1),
        "useful": round(tokens / int(samples.slot_steps), 4),
        "bytes_per_token": round(read / tokens),
      }
    found["refill"]["useful_steady"] = share and round(share, 4)
    return found


def make(cfg, params, group: int, most: int, paging, prompt: int) -> Bench:
  draw = SamplerConfig(group, most, stop_ids=(lengths.STOP,))
  paged = build(cfg, params, draw, paging, prompt)
  drawn = static(cfg, params, draw)
  return Bench(cfg, params, draw, paging, prompt, drawn, paged)


def cell(bench: Bench, kind: str, each, repeats: int) -> list[dict]:
  """Rows of the table, printed."""
  found, rows = bench.measure(each, repeats), []
  for name, numbers in found.items():
    rate = numbers["tokens_per_second"]
    times = rate / found["static"]["tokens_per_second"]
    row = {"group": bench.draw.group_size, "prompt": bench.prompt}
    row |= {"answers": kind, "sampler": name}
    rows.append(row | numbers | {"times_static": round(times, 3)})
    steady = numbers.get("useful_steady")
    cells = [*row.values(), f"{rate:,.0f}", f"{numbers['useful']:.1%}"]
    cells += [f"{steady:.1%}" if steady else "-"]
    cells += [f"{numbers['bytes_per_token'] / 1e6:.3f}", f"{times:.2f}"]
    print(" | ".join(map(str, cells)), flush=True)
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  answers, most, repeats = (16, 80, 1) if args.quick else (256, 960, 3)
  groups, prompts = ((2,), (8,)) if args.quick else ((4, 16), (32, 512))
  paging = ContinuousBatchingConfig(
    slots=4 if args.quick else 64,
    page_size=16,
    segment_steps=32,
    prefill_chunk=32,
  )
  cfg = model.variant("tiny", dtype="float32", vocab_size=1024)
  params = lengths.countdown(model.init(jax.random.key(0), cfg))
  # Neither 96 nor 960 is where the static cache ends a doubling.
  short, rows = most // 10, []
  print(
    "group | prompt | answers of | sampler | tokens/s | useful | so in steady "
    "state | MB a token | times static"
  )
  for G, S in itertools.product(groups, prompts):
    fixed = np.full(answers // G, short, np.int32)
    tailed = lengths.long_tailed(answers // G, most)
    exact = make(cfg, params, G, short, paging, S)
    roomy = make(cfg, params, G, most, paging, S)
    rows += cell(exact, f"{short} of {short}", fixed, repeats)
    rows += cell(roomy, f"{short} of {most}", fixed, repeats)
    rows += cell(roomy, f"long tail of {most}", tailed, repeats)
  record.finish("sampler", {"slots": paging.slots, "rows": rows}, args.out)


if __name__ == "__main__":
  main()
