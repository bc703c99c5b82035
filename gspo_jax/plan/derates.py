"""What an iteration is expected to take beyond libtpu's cycles.

Each field of `Derates` is a reason, with the number that stands for it. Of a
GPU, which has no cycles, they slow down the time at best.
"""

import collections
from collections.abc import Mapping
from typing import NamedTuple

from gspo_jax.learner.packing import RowTokens
from gspo_jax.plan.iteration.decoding import Decoding


class Derates(NamedTuple):
  """Published or assumed; none is measured. `--measured` fits three of them."""

  # Share of the HBM's bandwidth that the sampler's kernels reach: the best
  # published for a kernel for pages on TPUs, arXiv 2604.15464.
  hbm: float = 0.86
  # Share of their time at best that the learner's kernels reach; assumed. By
  # benchmarks/bundles.json they fill 88 to 100 % of the matrix units' cycles.
  kernels: float = 0.85
  # Seconds to launch a collective, or a kernel for pages until its first page
  # is there; assumed. The latter issues 862 bundles first, .5 us on v5p.
  launch: float = 2e-6
  # Seconds that the host waits for results and plans before responses move;
  # assumed. It plans for 10 ms (benchmarks/pod.json).
  move: float = 10e-3
  # Seconds of the host a response: text, the last rewards, packing; assumed.
  host: float = 250e-6
  # Coefficient of variation of the experts' popularity. Skew persists in Qwen3
  # and DeepSeek (arXiv 2604.23150); the number is assumed.
  skew: float = 0.8
  # Seconds of a second chunk of a layer's experts in a decode step; assumed.
  chunk: float = 25e-6
  # Bytes a second of a device to its host, for a checkpoint; assumed.
  to_host: float = 2.5e9


class Loads(NamedTuple):
  """Of the devices that share the experts of some tokens."""

  busiest: float = 1.0  # load of the busiest device over the mean
  second: float = 0.0  # share of layers with a second chunk, `model.experts`


# Of the learner, and of the sampler by the rows of a decode step.
GroupLoads = tuple[Loads, Mapping[int, Loads]]


def added(
  functions: Mapping[str, dict],
  seconds: Mapping[str, float],
  decoding: Decoding,
  rows: Mapping[str, RowTokens],
  needed: float,
  loads: GroupLoads,
  derates: Derates,
) -> dict[str, dict[str, float]]:
  """The seconds that each derate adds to the parts of an iteration.

  `functions` are reports, and `seconds` of the parts, by the compiler's cycles
  if it states any. What it states none for, kernels above all, waits for HBM in
  the sampler, and for the matrix units in the learner. `rows` are those of the
  learner's functions, `needed` is their share of the blocks of scores.
  """
  learner, sampler = loads
  slow, stall = 1 / derates.hbm - 1, 1 / derates.kernels - 1
  unstated = lambda f: 1 - (f["compiler"]["share"] if f["compiler"] else 0)
  of_experts = lambda opened: [o for o in opened if "/moe/" in o["source"]]
  f = functions["generate"]
  decode, steps = f["decode"], decoding.steps
  reading = decode["seconds"]["scheduled"] - decode["without_cache"]
  kernels = max(unstated(f) * decode["seconds"]["roofline"] - reading, 0)
  launches = sum(c["count"] for c in f["collectives"]) + sum(
    count for name, count in f["unknown_kernels"].items() if "paged" in name
  )
  layers = sum(o["times"] for o in of_experts(f["loops"])) / decode["steps"]
  chunks = sum(s.steps * sampler[n].second for n, s in decoding.by_rows.items())
  stalls, skew = collections.Counter(), collections.Counter()
  skew["steps"] = derates.chunk * chunks * layers
  for name, of in rows.items():
    part = "update" if name == "update" else "score"
    f, parts = functions[name], functions[name]["parts"]
    one = parts["micro_batch"]
    computed = unstated(f) * one["seconds"]["roofline"]
    computed -= (1 - needed) * one["block_seconds"]
    stalls[part] += stall * of.micro_batches * computed
    products = sum(
      o["seconds"] for o in f["top"] if "ragged_dot" in o["source"]
    )
    again = sum(o["times"] * o["seconds"] for o in of_experts(f["branches"]))
    uneven = (learner.busiest - 1) * products + learner.second * again
    skew[part] += uneven * of.micro_batches / parts["most_micro_batches"]
  cache = {part: slow * seconds[part] for part in ("reading", "waiting")}
  return {
    "hbm": {"steps": slow * steps * kernels} | cache,
    "kernels": stalls,
    "launch": {"steps": derates.launch * steps * launches / decode["steps"]},
    "move": {"moves": derates.move * decoding.moves},
    "skew": skew,
  }
