"""The cost of a compiled module on a device, with all trips of its loops.

docs/scaling.md explains the two estimates. At best, an operation takes the
longest of three times: of its products at peak, of its bytes in HBM, and, for a
kernel, of the bundles that it issues; a kernel has the peak of the TensorCores
that run it. In the compiler's estimate, an operation takes the
cycles that libtpu states, but it states none for a kernel, which takes its time
at best. So neither is below what the kernels issue, and both are too low where
they stall. A collective takes the longer of two times, to send its bytes over
the links of its group, and to read and write operand and result in HBM, after
the latency of its hops.

Control flow that depends on data is listed, and its balanced case is counted:
one trip of a loop (an even expert load, or one decode step), and the cheapest
branch of a `conditional` (no overflow, or decoding is done). The caller can
set the trip count or the branch, by JAX scope.

Not modelled: stalls, the start of operations, the padding of layouts, and the
slowdown of operations beside an asynchronous collective.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence

from gspo_jax.plan.chips import Chip
from gspo_jax.plan.hlo import cost, kernels, work
from gspo_jax.plan.hlo.bundles import Kernel
from gspo_jax.plan.hlo.collectives import awaited, is_collective, started
from gspo_jax.plan.hlo.cost import DataDependent, HloCost
from gspo_jax.plan.hlo.kernels import BlockPages
from gspo_jax.plan.hlo.loops import trip_count
from gspo_jax.plan.hlo.module import Computation, Module, parse

_parse = functools.lru_cache(maxsize=1)(parse)  # each text is walked in a row
# Opcode -> the attribute that names the computations to run.
_CALLEES = {"call": "to_apply", "custom-call": "called_computations"}
# (indices of a group in the device order, whether each device sends different
# bytes to every other) -> bytes a second that each device can send.
Bandwidth = Callable[[Sequence[int], bool], float]
# The same indices -> the seconds of a byte to the farthest of them.
Latency = Callable[[Sequence[int]], float]


def cost_of(
  text: str,
  chip: Chip,
  bandwidth: Bandwidth,
  devices: int,
  **options,
) -> HloCost:
  """Costs a dumped module on one device; `options` are fields of `_Walk`."""
  walk = _Walk(_parse(text), chip, bandwidth, devices, **options)
  return walk.cost_of(walk.module.entry)


class _Links:
  """The links of a device, which carry one collective at a time."""

  def __init__(self):
    self.free_at, self.ends_at = 0.0, {}

  def start(self, key, now, seconds) -> None:
    self.free_at = max(self.free_at, now) + seconds
    self.ends_at[key] = self.free_at

  def wait(self, key, now) -> float:
    return max(self.ends_at.pop(key, now) - now, 0.0)


@dataclasses.dataclass
class _Walk:
  """Visits each computation once, in the order of the schedule."""

  module: Module
  chip: Chip
  bandwidth: Bandwidth
  devices: int
  # Scope of a conditional -> whether to take its most expensive branch, not its
  # cheapest. These conditionals are not listed.
  branches: Mapping[str, bool] = dataclasses.field(default_factory=dict)
  # Scope of a loop -> its trip count. These loops are not listed.
  trips: Mapping[str, int] = dataclasses.field(default_factory=dict)
  filled: float = 1.0  # share of a grouped product's rows with a token
  by_compiler: bool = False  # use the compiler's estimates of operations
  # Name of an instruction -> what it issues, and all instructions like it.
  kernels: Mapping[str, Kernel] = dataclasses.field(default_factory=dict)
  block_pages: BlockPages | None = None  # needed with `kernels`
  latency: Latency = lambda members: 0.0
  costs: dict[int, HloCost] = dataclasses.field(default_factory=dict)

  def cost_of(self, computation: Computation) -> HloCost:
    if id(computation) not in self.costs:
      total, links = HloCost(), _Links()
      for i in computation:
        self._wait(total, links, awaited(self.module, i))
        self._visit(total, links, computation, i)
      for key in list(links.ends_at):
        self._wait(total, links, key)
      self.costs[id(computation)] = total
    return self.costs[id(computation)]

  def _wait(self, total, links, key):
    total.stalled_seconds += links.wait(key, total.now)

  def _visit(self, total, links, computation, i):
    if i.op == "while":
      self._loop(total, computation, i)
    elif i.op == "conditional":
      self._conditional(total, i)
    elif i.op == "async-start":
      self._async_start(total, links, i)
    elif i.op == "async-update":
      if i.operands[0] in links.ends_at:
        links.ends_at[i.name] = links.ends_at.pop(i.operands[0])
    elif i.op in _CALLEES and (callees := i.called(_CALLEES[i.op])):
      for callee in callees:
        total.add(self.cost_of(self.module[callee]))
    else:
      self._operation(total, links, computation, i)

  def _loop(self, total, computation, i):
    body, test = (
      self.cost_of(self.module[i.called(attribute)[0]])
      for attribute in ("body", "condition")
    )
    if test.collectives:  # of a loop that ends when all devices agree
      body, alone = HloCost(), body
      body.add(alone)
      body.add(test)
    trips = trip_count(self.module, computation, i)
    for scope, count in self.trips.items():
      if i.source.endswith(f"/{scope}/while"):
        trips = count
    if trips is None:
      total.loops.append(DataDependent(i.source, i.bytes, 1, body))
    total.add(body, 1 if trips is None else trips)

  def _conditional(self, total, i):
    names = i.called("branch_computations") or (
      *i.called("true_computation"),
      *i.called("false_computation"),
    )
    costs = sorted(
      (self.cost_of(self.module[name]) for name in names),
      key=lambda c: c.scheduled,
    )
    for scope, most_expensive in self.branches.items():
      if re.search(rf"\b{scope}\)*/cond$", i.source):  # also jvp(scope)/cond
        total.add(costs[-1] if most_expensive else costs[0])
        return
    total.add(costs[0])
    total.branches.append(DataDependent(i.source, i.bytes, 1, costs[-1]))

  def _async_start(self, total, links, i):
    """Another core starts a computation; its collectives overlap."""
    inner = self.cost_of(self.module.callee(i))
    total.add(dataclasses.replace(inner, stalled_seconds=0.0))
    if inner.collectives:
      links.start(i.name, total.now, inner.collective_seconds)

  def _operation(self, total, links, computation, i):
    collectives = started(self.module, computation, i, self.devices)
    for c in collectives:
      hbm_seconds = c.hbm_bytes / self.chip.hbm_bandwidth
      bandwidth = self.bandwidth(c.members, "to-all" in c.kind)
      seconds = max(c.wire / bandwidth, hbm_seconds)
      seconds += c.passes * self.latency(c.members)
      total.hbm_bytes += c.hbm_bytes
      total.hbm_seconds += hbm_seconds
      kind = cost.CollectiveKind(c.kind, len(c.members))
      traffic = cost.Traffic(1, c.wire, seconds, c.hbm_bytes)
      cost.add(total.collectives[kind], traffic)
      key = c.key or i.name
      links.start(key, total.now, seconds)
      if c.key is None:
        self._wait(total, links, key)
    if not is_collective(i):
      synchronous = any(c.key is None for c in collectives)
      self._compute(total, computation, i, synchronous)

  def _compute(self, total, computation, i, with_collective):
    """Adds an operation, which may contain a synchronous collective."""
    chip = self.chip
    w = work.work(self.module, computation, i, self.filled)
    if with_collective and not w.flops:
      return  # its bytes are the collective's operand and result
    hbm_seconds = w.hbm_bytes / chip.hbm_bandwidth
    seconds = max(
      (w.flops + w.padding_flops) / chip.flops,
      hbm_seconds,
      w.sorted_bytes / chip.vector_bandwidth,
    )
    if kernel := self._kernel(computation, i):
      issuing = self._kernel_seconds(total, kernel, computation, i, w)
      seconds = max(seconds, issuing)
    cycles = work.estimated_cycles(i)
    compiler_seconds = cycles / chip.clock if cycles else seconds
    if cycles and self.by_compiler:
      total.estimated_seconds += compiler_seconds
    cost.add(total, w)
    total.hbm_seconds += hbm_seconds
    total.roofline_seconds += compiler_seconds if self.by_compiler else seconds
    if work.is_unknown_kernel(computation, i):
      total.unknown_kernels[work.kernel_name(i)] += 1
    if seconds or compiler_seconds:
      operation = cost.OperationCost(
        seconds, w.flops, w.hbm_bytes, compiler_seconds
      )
      cost.add(total.by_source[i.source], operation)

  def _kernel(self, computation, i) -> Kernel | None:
    """What a kernel issues; None if unknown."""
    if not self.kernels or i.op != "custom-call":
      return None
    of_equal = self._by_operands.get(_operands(computation, i))
    return self.kernels.get(i.name, of_equal)

  @functools.cached_property
  def _by_operands(self):
    return {
      _operands(computation, i): self.kernels[i.name]
      for computation in self.module.computations.values()
      for i in computation
      if i.name in self.kernels
    }

  def _kernel_seconds(self, total, kernel, computation, i, w) -> float:
    """The longer of bundles and products, on the cores that run a kernel."""
    chip = self.chip
    running = chip.cores if kernel.both_cores else 1
    rate = chip.clock * running  # bundles a second
    if pages := kernels.pages(kernel, computation, i, self.block_pages):
      row = pages.parts * pages.row / rate
      page = max(
        pages.parts * pages.page / rate, pages.page_bytes / chip.hbm_bandwidth
      )
      if pages.window:
        row, page = row + pages.window * page, 0.0
      full = row * pages.rows + page * pages.pages
      cost.add(total.reading, cost.Reading(row, page, full))
      return full
    products = (w.flops + w.padding_flops) / chip.flops * chip.cores / running
    issued = kernels.issued(kernel, computation, i, w)
    if issued is None:
      return products
    seconds = max(products, issued.bundles / rate)
    total.block_seconds += seconds * issued.of_blocks / issued.bundles
    return seconds


def _operands(computation, i):
  """What kernels of the same program have in common: name, result, operands."""
  arrays = [a for x in (i, *computation.operands(i)) for a in x.arrays]
  shapes = tuple((a.dtype, a.dims) for a in arrays)
  return work.kernel_name(i), shapes
