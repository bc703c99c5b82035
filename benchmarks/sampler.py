"""Tokens per second and useful work of static and continuous batching.

  python -m benchmarks.sampler [--quick] [--out=FILE.json]

256 responses of the embedded default's policy, over a grid: group size, prompt
length, and lengths of responses (all equal, to the most allowed or to a tenth
of it; or with a median of a tenth of the most and 5 % at the most: see
benchmarks/lengths.py for the weights that give such responses). Both samplers
give the same tokens, which is checked; the calls alternate, and the least time
of each counts.

useful: the share of slot-steps that sampled a token of a response: of all, and
  of those while responses wait, the steady state of many.
bytes a token: what the decode steps must read, per token sampled. Weights: all
  but the embedding, once a step. Keys and values, static: the whole cache of
  each response, which doubles, and each prompt once a group; continuous: the
  pages of each slot that decodes, the prompt's in each slot.
uncovered: milliseconds of a call in which the devices have no segment to
  decode, because the host reads the results of one and plans the next.

"in turn" is continuous batching that plans no segment before the results of the
last one: what looking ahead changes. There are as many slots as the grid says,
or as many as responses.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np

from benchmarks import lengths, record
from benchmarks.replay import least_seconds
from gspo_jax import model, sampler
from gspo_jax.runtime import sharding
from gspo_jax.sampler import continuous
from gspo_jax.sampler import static as static_sampler
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.continuous.engine import Engine
from gspo_jax.sampler.continuous.scheduler import Scheduler
from gspo_jax.sampler.samples import SamplerConfig


def static(cfg, params, config: SamplerConfig):
  """Prompts -> samples, by static batching."""
  jitted = jax.jit(functools.partial(sampler.generate, cfg=cfg, sampler=config))
  key = jax.random.key(0)
  return lambda prompts: jitted(params, prompts=prompts, key=key)


def build(
  cfg,
  params,
  config: SamplerConfig,
  batching: ContinuousBatchingConfig,
  prompt: int,
) -> ContinuousSampler:
  """A continuous sampler on one device, for prompts of `prompt` tokens."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  return continuous.build_continuous_sampler(
    cfg,
    config,
    batching=batching,
    max_prompt_length=prompt,
    params_sharding=model.shardings(params, mesh),
    mesh=mesh,
    sampler_mesh=mesh,
  )


def count_steps(
  generate: ContinuousSampler, params, prompts
) -> tuple[int, float | None]:
  """Decode steps, and the useful share of slot-steps while responses wait."""
  steps, started, shares = [], [], [None]

  def decode(params, state, samples, plan, compute_slots, *rest):
    before = int(samples.slot_steps)
    state, samples, results = generate.jitted.decode(
      params, state, samples, plan, compute_slots, *rest
    )
    after = int(samples.slot_steps)
    started.append(int(np.asarray(plan.new).sum()))
    computed = plan.active if compute_slots is None else compute_slots
    steps.append((after - before) // computed.size)
    if sum(started) < samples.lengths.size:
      shares.append(int(samples.lengths.sum()) / after)
    return state, samples, results

  jitted = SimpleNamespace(**vars(generate.jitted) | {"decode": decode})
  spied = dataclasses.replace(generate, jitted=jitted)
  jax.block_until_ready(spied(params, prompts, jax.random.key(0)))
  return sum(steps), shares[-1]


def in_turn(call: Callable):
  """The result of a call that plans no segment before the last results."""
  with mock.patch.object(Scheduler, "can_look_ahead", False):
    return jax.block_until_ready(call())


def uncovered_seconds(generate: ContinuousSampler, *args) -> float:
  """Time of a call in which every started segment has been read."""
  unread, since, total = 0, None, 0.0
  read_results = Engine._read_results

  def decode(*arguments):
    nonlocal unread, total
    result = generate.jitted.decode(*arguments)
    if not unread and since is not None:
      total += time.monotonic() - since
    unread += 1
    return result

  def read(engine, *arguments):
    nonlocal unread, since
    left = read_results(engine, *arguments)
    unread, since = unread - 1, time.monotonic()
    return left

  jitted = SimpleNamespace(**vars(generate.jitted) | {"decode": decode})
  spied = dataclasses.replace(generate, jitted=jitted)
  with mock.patch.object(Engine, "_read_results", read):
    jax.block_until_ready(spied(*args))
  return total


class Timed(NamedTuple):
  """By name of a call, its least seconds and its last result."""

  seconds: dict[str, float]
  results: dict


def time_in_turns(calls: dict, repeats: int) -> Timed:
  """Times calls that alternate."""
  results = {}

  def run(name, call):
    results[name] = call()
    return results[name]

  runs = {n: functools.partial(run, n, call) for n, call in calls.items()}
  return Timed(least_seconds(runs, repeats), results)


def weight_bytes(params) -> int:
  """Bytes of the weights that a decode step reads."""
  read = {name: x for name, x in params.items() if name != "embed"}
  return sum(x.nbytes for x in jax.tree.leaves(read))


def static_tokens(cfg, config, prompts, longest: int) -> int:
  """Cached tokens that a static batch reads until its longest response ends."""
  P, S = prompts.tokens.shape
  read = slots = 0
  for step in range(1, longest):  # the prefill gives the first token
    if step > slots:
      slots = static_sampler.cache_slots(slots, cfg, config)
    read += P * config.group_size * slots + P * S
  return read


def paged_tokens(page_size: int, prompt: int, response_lengths) -> int:
  """Cached tokens, in whole pages, that responses of these lengths read."""
  cached = [prompt - 1 + np.arange(1, n + 1) for n in response_lengths]
  return sum(int((-(-x // page_size)).sum()) * page_size for x in cached)


def key_bytes(cfg) -> int:
  """Bytes of the keys and values of one token, in all layers."""
  size = np.dtype(cfg.dtype).itemsize
  return 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * size


class Bench(NamedTuple):
  """Both samplers, for prompts of `prompt` tokens.

  Attributes:
    cfg: the model.
    params: its weights.
    config: the sampling parameters.
    prompt: tokens of each prompt.
    static: prompts -> samples.
    continuous: the continuous sampler.
  """

  cfg: model.ModelConfig
  params: model.Params
  config: SamplerConfig
  prompt: int
  static: Callable
  continuous: ContinuousSampler

  def measure(self, response_lengths: np.ndarray, repeats: int) -> dict:
    """The numbers of each sampler, for responses of these lengths.

    Args:
      response_lengths: [P], the length of the responses to each prompt.
      repeats: how often each call is timed.
    """
    batch = lengths.prompts(response_lengths, self.prompt)
    args = self.params, batch, jax.random.key(0)
    calls = {
      "static": functools.partial(self.static, batch),
      "continuous": functools.partial(self.continuous, *args),
    }
    calls["in turn"] = functools.partial(in_turn, calls["continuous"])
    seconds, results = time_in_turns(calls, repeats)
    expected = np.repeat(response_lengths, self.config.group_size)
    countdown = expected[:, None] - 1 - np.arange(self.config.max_new_tokens)
    countdown = np.maximum(countdown, 0)
    for name, samples in results.items():
      np.testing.assert_array_equal(samples.lengths, expected, err_msg=name)
      np.testing.assert_array_equal(samples.tokens, countdown, err_msg=name)
    longest, page_size = response_lengths.max(), self.continuous.sizes.page_size
    cached = {
      "static": static_tokens(self.cfg, self.config, batch, longest),
      "continuous": paged_tokens(page_size, self.prompt, expected),
    }
    cached["in turn"] = cached["continuous"]
    # The prefill of the static sampler gives the first token.
    steps = {"static": int(results["static"].slot_steps) // len(expected) - 1}
    steps["continuous"], share = count_steps(
      self.continuous, self.params, batch
    )
    steps["in turn"] = steps["continuous"]
    tokens, numbers = int(expected.sum()), {}
    for name, samples in results.items():
      read = weight_bytes(self.params) * steps[name]
      read += key_bytes(self.cfg) * cached[name]
      numbers[name] = {
        "tokens_per_second": round(tokens / seconds[name], 1),
        "useful": round(tokens / int(samples.slot_steps), 4),
        "bytes_per_token": round(read / tokens),
      }
    numbers["continuous"]["useful_steady"] = share and round(share, 4)
    uncovered = functools.partial(uncovered_seconds, self.continuous, *args)
    for name, run in (
      ("continuous", uncovered),
      ("in turn", functools.partial(in_turn, uncovered)),
    ):
      least = min(run() for _ in range(repeats))
      numbers[name]["uncovered_ms"] = round(1e3 * least, 2)
    return numbers


def make(cfg, params, group: int, most: int, batching, prompt: int) -> Bench:
  config = SamplerConfig(group, most, stop_ids=(lengths.STOP,))
  return Bench(
    cfg,
    params,
    config,
    prompt,
    static=static(cfg, params, config),
    continuous=build(cfg, params, config, batching, prompt),
  )


def cell(bench: Bench, kind: str, response_lengths, repeats: int) -> list[dict]:
  """Measures and prints the rows of one cell of the grid."""
  measured, rows = bench.measure(response_lengths, repeats), []
  for name, numbers in measured.items():
    rate = numbers["tokens_per_second"]
    times = rate / measured["static"]["tokens_per_second"]
    row = {"group": bench.config.group_size, "prompt": bench.prompt}
    row |= {"responses": kind, "sampler": name}
    rows.append(row | numbers | {"times_static": round(times, 3)})
    steady = numbers.get("useful_steady")
    cells = [*row.values(), f"{rate:,.0f}", f"{numbers['useful']:.1%}"]
    cells += [f"{steady:.1%}" if steady else "-"]
    cells += [numbers.get("uncovered_ms", "-")]
    cells += [f"{numbers['bytes_per_token'] / 1e6:.3f}", f"{times:.2f}"]
    print(" | ".join(map(str, cells)), flush=True)
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  responses, most, repeats = (16, 80, 1) if args.quick else (256, 960, 3)
  groups, prompts = ((2,), (8,)) if args.quick else ((4, 16), (32, 512))
  batching = ContinuousBatchingConfig(
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
    "group | prompt | responses of | sampler | tokens/s | useful | useful in "
    "steady state | uncovered | MB a token | times static"
  )
  for G, S in itertools.product(groups, prompts):
    fixed = np.full(responses // G, short, np.int32)
    tailed = lengths.long_tailed(responses // G, most)
    exact = make(cfg, params, G, short, batching, S)
    roomy = make(cfg, params, G, most, batching, S)
    rows += cell(exact, f"{short} of {short}", fixed, repeats)
    rows += cell(roomy, f"{short} of {most}", fixed, repeats)
    rows += cell(roomy, f"long tail of {most}", tailed, repeats)
    every = dataclasses.replace(batching, slots=responses)
    at_once = make(cfg, params, G, most, every, S)
    rows += cell(at_once, f"long tail of {most}, all at once", tailed, repeats)
  record.finish("sampler", {"slots": batching.slots, "rows": rows}, args.out)


if __name__ == "__main__":
  main()
