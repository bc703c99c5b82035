"""What a compiled module costs on a TPU at best, its loops multiplied out.

An operation takes the longer of its FLOPs at the peak and its HBM bytes at the
bandwidth; one after the other, they make the roofline. Collectives are apart:
their time is the bytes on the wire over the links that their group can use.

Where data decides, the balanced case is summed, and the rest is listed:
- a loop that does not just count runs once: the rows of an even load, one step
  of decoding;
- a `conditional` takes its cheapest branch: no overflow, decoding is over;
  unless the caller knows, by the JAX scope that it stands in.

Not modelled: the HBM bytes of collectives (what they read, write and, in a sum,
read again are charged to nobody, nor do they slow the operations beside them),
the latency of a collective or a kernel's start, and the padding of tiles.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping

from gspo_jax.plan.chips import Chip
from gspo_jax.plan.hlo import work
from gspo_jax.plan.hlo.collectives import (
  Collective,
  awaited,
  is_collective,
  started,
)
from gspo_jax.plan.hlo.cost import HloCost, Open, Traffic
from gspo_jax.plan.hlo.loops import trip_count
from gspo_jax.plan.hlo.module import Computation, Module

Bandwidth = Callable[[Collective], float]


def walk(
  module: Module,
  chip: Chip,
  bandwidth: Bandwidth,
  devices: int,
  branches: Mapping[str, bool] | None = None,
) -> HloCost:
  """The cost of a module's entry.

  Args:
    module: compiled for one of `devices` devices.
    chip: its peaks.
    bandwidth: bytes a second at which a device sends for a collective.
    devices: how many run it.
    branches: scope of a conditional -> whether it takes its dearest branch,
      or else its cheapest; neither is listed.
  """
  walk = _Walk(module, chip, bandwidth, devices, branches or {})
  return walk.of(module.entry)


class _Links:
  """The links of a device, which carry one collective after the other."""

  def __init__(self):
    self.free, self.ends = 0.0, {}

  def start(self, key, now, seconds) -> None:
    self.free = max(self.free, now) + seconds
    self.ends[key] = self.free

  def wait(self, key, now) -> float:
    """Seconds until the collective is there."""
    return max(self.ends.pop(key, now) - now, 0.0)


class _Walk:
  """Goes through computations in the order of the schedule, each once."""

  def __init__(self, module, chip, bandwidth, devices, branches):
    self.module, self.chip = module, chip
    self.bandwidth, self.devices = bandwidth, devices
    self.branches = branches
    self.known = {}

  def of(self, computation: Computation) -> HloCost:
    if id(computation) not in self.known:
      total, links = HloCost(), _Links()
      for i in computation:
        self._wait(total, links, awaited(self.module, i))
        self._step(total, links, computation, i)
      for key in list(links.ends):
        self._wait(total, links, key)
      self.known[id(computation)] = total
    return self.known[id(computation)]

  def _wait(self, total, links, key):
    total.stalled += links.wait(key, total.seconds + total.stalled)

  def _step(self, total, links, computation, i):
    if i.op == "while":
      self._loop(total, computation, i)
    elif i.op == "conditional":
      self._branch(total, i)
    elif i.op == "async-start":
      self._start(total, links, i)
    elif i.op == "async-update":
      if i.operands[0] in links.ends:
        links.ends[i.name] = links.ends.pop(i.operands[0])
    elif self._callees(i):
      for callee in self._callees(i):
        total.add(self.of(self.module[callee]))
    else:
      self._operation(total, links, computation, i)

  def _callees(self, i):
    if i.op == "call":
      return i.called("to_apply")
    return i.called("called_computations") if i.op == "custom-call" else ()

  def _loop(self, total, computation, i):
    body = self.of(self.module[i.called("body")[0]])
    trips = trip_count(self.module, computation, i)
    if trips is None:
      total.loops.append(Open(i.source, i.bytes, 1, body))
    total.add(body, 1 if trips is None else trips)

  def _branch(self, total, i):
    names = i.called("branch_computations") or (
      *i.called("true_computation"),
      *i.called("false_computation"),
    )
    costs = sorted(
      (self.of(self.module[name]) for name in names), key=lambda c: c.serial
    )
    for scope, dearest in self.branches.items():
      if i.source.endswith(f"/{scope}/cond"):
        total.add(costs[-1] if dearest else costs[0])
        return
    total.add(costs[0])
    total.branches.append(Open(i.source, i.bytes, 1, costs[-1]))

  def _start(self, total, links, i):
    """Another core begins a computation; its collectives run beside us."""
    inner = self.of(self.module[i.called("calls")[0]])
    beside = collections.defaultdict(Traffic)
    for (kind, size, _), traffic in inner.collectives.items():
      beside[kind, size, True] = traffic
    total.add(dataclasses.replace(inner, stalled=0.0, collectives=beside))
    if beside:
      now = total.seconds + total.stalled
      links.start(i.name, now, inner.wire_seconds)

  def _operation(self, total, links, computation, i):
    for c in started(self.module, i, self.devices):
      seconds = c.wire / self.bandwidth(c)
      kind = c.kind, len(c.members), c.key is not None
      traffic = total.collectives[kind]
      traffic.count += 1
      traffic.wire += c.wire
      traffic.seconds += seconds
      key = c.key or i.name
      links.start(key, total.seconds + total.stalled, seconds)
      if c.key is None:
        self._wait(total, links, key)
    if not is_collective(i):
      self._compute(total, computation, i)

  def _compute(self, total, computation, i):
    flops = work.flops(self.module, computation, i)
    hbm = work.hbm_bytes(self.module, computation, i)
    seconds = max(flops / self.chip.flops, hbm / self.chip.hbm_bandwidth)
    total.flops += flops
    total.attention += work.attention_flops(computation, i)
    total.hbm += hbm
    total.seconds += seconds
    if work.is_unknown_kernel(computation, i):
      total.unknown[i.name.rpartition(".")[0] or i.name] += 1
    if seconds:
      total.credit(i.source, seconds, flops, hbm)
