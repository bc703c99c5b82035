"""Bytes and host seconds of the parts of an iteration that grow with a pod.

  python -m benchmarks.pod --out=benchmarks/pod.json

It traces the packing of an iteration, and runs the host's half of the sampler
for the first segments, once for all shards and once as one host does. Nothing
is compiled, and no device is needed. Each device has 128 responses of at most
16,384 tokens, as with configs/moe_tpu_v5.py on 64 chips; a host has 4 devices.
Seconds are CPU time.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from benchmarks import record
from gspo_jax import model
from gspo_jax.learner import packing
from gspo_jax.plan.iteration.decoding import CountingSampler
from gspo_jax.runtime import sharding
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import Prompts, SamplerConfig

_RESPONSES = 128  # a device
_OF_HOST = 4  # devices
_SEGMENTS = 24
_COLLECTIVES = ("all_gather", "all_to_all", "psum")


def packing_bytes(
  *, data: int = 1, fsdp: int = 1, expert: int = 1, routing: bool = False
) -> dict[str, int]:
  """Bytes of each kind of collective that a device receives in packing.

  `routing`: the experts of 48 layers, 8 of a token, are packed, too.
  """
  devices = data * fsdp * expert
  B, S, R, G, M = _RESPONSES * devices, 1024, 16384, 16, 4
  cfg = packing.PackingConfig(S + R, M, devices, devices)
  array = jax.ShapeDtypeStruct
  ints = lambda *shape: array(shape, jnp.int32)
  arguments = (
    Prompts(ints(B // G, S), ints(B // G)),
    ints(B, R),
    ints(B),
    packing.Packing(ints(B), ints(B), ints(M)),
    array((B, R), jnp.float32),
    array((B, 48, S + R, 8), jnp.uint8) if routing else None,
  )

  def pack(*args):
    *places, logps, experts = args
    return packing.pack_responses(*places, cfg, logps=logps, experts=experts)

  mesh = _abstract_mesh(data=data, fsdp=fsdp, expert=expert)
  with jax.sharding.use_abstract_mesh(mesh):
    return _received(jax.make_jaxpr(pack)(*arguments).jaxpr)


def _abstract_mesh(**sizes: int) -> AbstractMesh:
  shape = [sizes.get(axis, 1) for axis in sharding.AXES]
  kinds = (AxisType.Auto,) * len(shape)
  return AbstractMesh(tuple(shape), sharding.AXES, axis_types=kinds)


def _received(jaxpr) -> dict[str, int]:
  total = dict.fromkeys(_COLLECTIVES, 0)
  for name, count in _collectives(jaxpr, 1):
    total[name] += count
  return total


def _collectives(jaxpr, times) -> Iterator[tuple[str, int]]:
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if name in _COLLECTIVES:
      arrays = [out.aval for out in equation.outvars]
      yield name, times * sum(a.size * a.dtype.itemsize for a in arrays)
    trips = equation.params.get("length", 1) if name == "scan" else 1
    for inner in jaxprs_in_params(equation.params):
      yield from _collectives(inner, times * trips)


@dataclasses.dataclass(frozen=True)
class Host(ContinuousSampler):
  """The sampler of the host that has the shards `own`."""

  own: Sequence[int] = ()
  shares_rows: bool = False

  def to_devices(self, tree):
    return tree


class Recorder(CountingSampler):
  """Records what a host says and does, for `limit` segments.

  Without `whole`, of the host of all shards. With it, of one host that gets the
  facts and results that `whole` has recorded. Plans are kept without a limit.
  """

  def __init__(self, sampler, lengths, limit=None, whole=None):
    block = sampler.sizes.page_size
    super().__init__(sampler, lengths, block, tokens_a_step=1.0)
    self.limit, self.whole = limit, whole
    self.shared, self.prefills, self.plans, self.results = [], [], [], []
    self.moved = []
    self.seconds = []  # CPU time of the host before each segment
    self._since = time.process_time()

  def share(self, facts):
    self.shared.append(facts)
    at = len(self.shared) - 1
    return jnp.asarray(self.whole.shared[at] if self.whole else facts)

  def prefill(self, params, state, *arrays):
    self.prefills.append(arrays)
    return state, None

  def move_pages(self, state, *moves):
    self.moved.append(moves)
    return state if self.whole else super().move_pages(state, *moves)

  def move_slots(self, state, *moves):
    self.moved.append(moves)
    return state if self.whole else super().move_slots(state, *moves)

  def move_rows(self, samples, *moves):
    self.moved.append(moves)
    return samples

  def decode(self, params, state, samples, *plan_and_key):
    at = len(self.seconds)
    self.seconds.append(time.process_time() - self._since)
    if at == self.limit:
      raise StopIteration
    if self.limit is None:  # else the plans would fill the memory
      self.plans.append(plan_and_key[:-2])
    if self.whole:
      results = self.whole.results[at]
    else:
      state, samples, results = super().decode(
        params, state, samples, *plan_and_key
      )
    self.results.append(results)
    self._since = time.process_time()
    return state, samples, results


def run_host(
  sampler: ContinuousSampler,
  own: Sequence[int],
  lengths: np.ndarray,
  prompt_lengths: np.ndarray,
  **options,
) -> Recorder:
  """Runs the loop of the host with the shards `own`; see `Recorder`."""
  fields = {
    f.name: getattr(sampler, f.name) for f in dataclasses.fields(sampler)
  }
  recorder = Recorder(sampler, lengths, **options)
  host = Host(**fields | {"jitted": recorder}, own=own)
  S = sampler.sizes.max_prompt_length
  tokens = np.zeros((len(prompt_lengths), S), np.int32)
  with contextlib.suppress(StopIteration):
    host(None, Prompts(tokens, prompt_lengths), None)
  return recorder


def host_seconds(devices: int, segments: int) -> dict[str, float]:
  """CPU seconds of a segment, of a host that plans all shards or its own."""
  S, R, G = 1024, 16384, 16
  B = _RESPONSES * devices
  config = SamplerConfig(G, R, stop_ids=(1,))
  batching = ContinuousBatchingConfig(
    slots=B, page_size=128, num_pages=6000 * devices, prefill_chunk=128
  )
  sampler = ContinuousSampler(
    model.variant("tiny"),
    config,
    batching,
    batching.shard_sizes(config, S, devices),
    devices,
    by_row=False,
    batch_sharding=None,
    jitted=None,
  )
  rng = np.random.default_rng(0)
  lengths = rng.lognormal(np.log(R / 4) - 0.5, 1, B).clip(1, R).astype(np.int32)
  prompts = rng.integers(32, S + 1, B // G).astype(np.int32)
  run = functools.partial(
    run_host, sampler, lengths=lengths, prompt_lengths=prompts, limit=segments
  )
  whole = run(range(devices))
  own = run(range(_OF_HOST), whole=whole)
  median = lambda host: statistics.median(host.seconds[1:])
  return {"all_shards": median(whole), "own_shards": median(own)}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true", help="up to 64 devices")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  rows = []
  for devices in (64,) if args.quick else (64, 512, 4096):
    B = _RESPONSES * devices
    rows.append(
      {
        "devices": devices,
        "packing_bytes": packing_bytes(fsdp=devices // 8, expert=8),
        # Tokens and log-probs of all responses on every device.
        "packing_bytes_by_gathering": 8 * B * 16384,
        "seconds_of_a_segment": host_seconds(devices, _SEGMENTS),
        # A sum needs one vector in place of one of every host.
        "rewards_bytes": 4 * B,
        "rewards_bytes_by_gathering": 4 * B * devices // _OF_HOST,
      }
    )
  record.finish("pod", {"rows": rows}, args.out)


if __name__ == "__main__":
  main()
