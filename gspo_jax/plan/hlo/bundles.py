"""What a TPU kernel issues, by the final bundles that libtpu dumps.

A bundle holds the instructions that a TensorCore issues together. It takes at
least one cycle, and no stall is counted, so bundles bound a time from below.
"""

import dataclasses
import re
from typing import NamedTuple

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:\s*(>*)\s*(.*)")
_BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = (\$region\d+)")
_REGION = re.compile(r"empty region (\d+)")
# Both TensorCores of a chip run a kernel if they meet at its end. Otherwise the
# second one skips it.
_BOTH_CORES = "BarrierMegacore"


@dataclasses.dataclass
class Loop:
  """A loop of a kernel, or the kernel itself."""

  bundles: int = 0  # of a trip, without inner loops
  # The part of `bundles` in each innermost conditional region.
  conditional: list[int] = dataclasses.field(default_factory=list)
  inner: list["Loop"] = dataclasses.field(default_factory=list)

  @property
  def always(self) -> int:
    return self.bundles - sum(self.conditional)

  @property
  def whole(self) -> int:
    """Bundles of a trip with one trip of each inner loop."""
    return self.bundles + sum(loop.whole for loop in self.inner)


class Kernel(NamedTuple):
  body: Loop
  both_cores: bool


class _Conditional(NamedTuple):
  loop: Loop
  name: str
  start: int  # bundles of the loop before it
  has_inner: bool = False


def parse(text: str) -> Kernel:
  """Parses a dump of final bundles; a `>` stands before each loop's bundles."""
  body = Loop()
  stack = [body]
  regions = []  # that are open
  for line in text.splitlines():
    match = _BUNDLE.match(line)
    if not match:
      continue
    label, marks, content = match.groups()
    if content.startswith("{}") and not marks:  # without its loop's marks
      depth = len(stack) - 1
    else:
      depth = len(marks)
    del stack[depth + 1 :]
    if label == "LB" and len(stack) == depth + 1 and depth:
      stack.pop()  # the next loop in the same one
    while len(stack) <= depth:
      inner = stack[-1].inner
      # A bundle of the outer loop may stand among those of an inner one.
      if label == "LB" or not inner:
        inner.append(Loop())
      stack.append(inner[-1])
    loop = stack[-1]
    for number in _REGION.findall(line):
      regions = _close(regions, f"$region{number}")
    loop.bundles += 1
    if branch := _BRANCH.search(content):
      regions.append(_Conditional(loop, branch[1], loop.bundles))
  return Kernel(body, _BOTH_CORES in text)


def _close(regions, name):
  """Ends a conditional region; `regions` are those that are open, in order.

  An innermost one counts. What began in it and did not end is dropped.
  """
  for position, region in enumerate(regions):
    if region.name != name:
      continue
    size = region.loop.bundles - region.start
    outer = regions[:position]
    if size and not region.has_inner:
      region.loop.conditional.append(size)
    return [r._replace(has_inner=True) for r in outer]
  return regions
