"""What an iteration is expected to take beyond libtpu's cycles.

Each field of `Derates` is a reason, and its value the number that stands for
it. Of a GPU, which has no cycles, they slow down the time at best.
"""

from collections.abc import Mapping
from typing import NamedTuple

from gspo_jax.learner.packing import RowTokens
from gspo_jax.plan.iteration.decoding import Decoding


class Derates(NamedTuple):
  """Nothing here was measured by this project; `--measured` fits three."""

  # Share of the HBM's bandwidth that the sampler's kernels reach: the best
  # published for a kernel for pages on TPUs, arXiv 2604.15464.
  hbm: float = 0.86
  # Share of their time at best that the learner's kernels reach. Assumed: their
  # bundles fill 88 to 100 % of the matrix units' cycles, without stalls
  # (benchmarks/bundles.json).
  kernels: float = 0.85
  # Seconds to launch a collective, or a kernel for pages until its first page
  # is there: assumed. The latter issues 862 bundles first, .5 us on v5p.
  launch: float = 2e-6
  # Seconds that the host waits for results before it moves responses. Assumed:
  # its plan of all shards takes 10 ms (benchmarks/pod.json).
  move: float = 10e-3
  # Seconds of the host a response: text, the last rewards, packing; assumed.
  host: float = 250e-6
  # Coefficient of variation of the experts' popularity, lognormal. Persistent
  # skew of Qwen3 and DeepSeek: arXiv 2604.23150; the number is assumed.
  skew: float = 0.8
  # Seconds of a second chunk of a layer's experts in a decode step; assumed.
  chunk: float = 25e-6
  # Bytes a second of a device to its host, for a checkpoint; assumed.
  to_host: float = 2.5e9


DERATES = Derates()


class Loads(NamedTuple):
  """Of the devices that share the experts of some tokens."""

  busiest: float = 1.0  # load of the busiest device over the mean
  # Share of the layers in which a device has more than a chunk of
  # `model.experts`.
  second: float = 0.0


# Of the learner, and of the sampler by the rows of a decode step.
GroupLoads = tuple[Loads, Mapping[int, Loads]]


def added(
  functions: Mapping[str, dict],
  seconds: Mapping[str, float],
  decoding: Decoding,
  rows: Mapping[str, RowTokens],
  needed: float,
  responses: int,
  loads: GroupLoads,
  derates: Derates,
) -> dict[str, dict[str, float]]:
  """The seconds that each derate adds to the parts of an iteration.

  `functions` are reports, and `seconds` of the parts, by the compiler's cycles
  if it states any. What it states for no operation, kernels above all, waits
  for HBM in the sampler, and for the matrix units in the learner. `rows` are of
  the learner's functions, `needed` is their share of the blocks of scores.
  """
  learner, sampler = loads
  slow, stall = 1 / derates.hbm - 1, 1 / derates.kernels - 1
  report = functions["generate"]
  decode, steps = report["decode"], decoding.steps
  reading = decode["seconds"]["scheduled"] - decode["without_cache"]
  kernels = max(_unstated(report) * decode["seconds"]["roofline"] - reading, 0)
  launches = report["unknown_kernels"].get("paged_attention", 0)
  launches += _collectives(report)
  layers = sum(o["times"] for o in _of_experts(report["loops"]))
  chunks = sum(s.steps * sampler[n].second for n, s in decoding.by_rows.items())
  total: dict[str, dict[str, float]] = {
    "hbm": {
      "steps": slow * steps * kernels,
      **{part: slow * seconds[part] for part in ("reading", "waiting")},
    },
    "kernels": {"score": 0.0, "update": 0.0},
    "launch": {"steps": derates.launch * launches * steps / decode["steps"]},
    "move": {"moves": derates.move * decoding.moves},
    "host": {"host": derates.host * responses},
    "skew": {
      "steps": derates.chunk * chunks * layers / decode["steps"],
      **{"score": 0.0, "update": 0.0},
    },
  }
  for name, of in rows.items():
    part = "update" if name == "update" else "score"
    report, parts = functions[name], functions[name]["parts"]
    one = parts["micro_batch"]
    kernels = _unstated(report) * one["seconds"]["roofline"]
    kernels -= (1 - needed) * one["block_seconds"]
    products = sum(
      o["seconds"] for o in report["top"] if "ragged_dot" in o["source"]
    )
    chunks = sum(
      o["times"] * o["seconds"] for o in _of_experts(report["branches"])
    )
    uneven = (learner.busiest - 1) * products + learner.second * chunks
    share = of.micro_batches / parts["most_micro_batches"]
    total["kernels"][part] += stall * of.micro_batches * kernels
    total["skew"][part] += share * uneven
  return total


def _unstated(report) -> float:
  """The share of the operations' time that the compiler does not state."""
  return 1 - report["compiler"]["share"] if report["compiler"] else 1.0


def _collectives(report) -> float:
  return sum(c["count"] for c in report["collectives"])


def _of_experts(opened) -> list[dict]:
  return [o for o in opened if "/moe/" in o["source"]]
