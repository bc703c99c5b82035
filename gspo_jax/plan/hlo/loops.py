"""How often a loop of a compiled module runs.

JAX's scans become `while` loops over a tuple whose element i counts: the
condition compares it with a bound, the body adds a step. Both are found by
following scalars backwards as `element + constant`. A loop that ends by any
other test is one that data decides.
"""

import math

from gspo_jax.plan.hlo.module import Computation, Instruction, Module

# A scalar's value: (tuple element or None for a constant, what is added).
Affine = tuple[int | None, int]

_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")


def trip_count(
  module: Module, computation: Computation, loop: Instruction
) -> int | None:
  """Trips of a `while` of `computation`; None where data decides.

  A start that cannot be traced counts as 0, where scans begin.
  """
  (condition,), (body,) = loop.called("condition"), loop.called("body")
  body = module[body]
  test = _comparison(module, module[condition])
  if test is None:
    return None
  (counter, ahead), bound = test
  step = _element(module, body, counter)
  if step is None or step[0] != counter or step[1] <= 0:
    return None
  start = _start(module, computation, loop, counter) or 0
  limit = bound[1]
  if bound[0] is not None:
    if _element(module, body, bound[0]) != (bound[0], 0):
      return None
    first = _start(module, computation, loop, bound[0])
    if first is None:
      return None
    limit += first
  return max(math.ceil((limit - start - ahead) / step[1]), 0)


def _comparison(module, condition) -> tuple[Affine, Affine] | None:
  """The two sides of `counter < bound`, if that is all the condition says."""
  root, scope = condition.root, _Scope(module, condition)
  if root.op == "fusion":
    scope = scope.inside(root)
    root = scope.computation.root
  sides = [scope.value(name) for name in root.operands]
  if root.op != "compare" or None in sides:
    return None
  direction = root.find(r"direction=(\w+)")
  if direction not in ("LT", "GT"):
    return None
  small, large = sides if direction == "LT" else sides[::-1]
  return None if small[0] is None else (small, large)


def _element(module, body, index) -> Affine | None:
  """What an iteration makes of an element of the loop's tuple."""
  if body.root.op != "tuple":
    return None
  return _Scope(module, body).value(body.root.operands[index])


def _start(module, computation, loop, index) -> int | None:
  """The constant that an element starts as."""
  before = computation.get(loop.operands[0])
  if before is None or before.op != "tuple":
    return None
  value = _Scope(module, computation).value(before.operands[index])
  return value[1] if value and value[0] is None else None


class _Scope:
  """A computation, and what its parameters are."""

  def __init__(self, module, computation, arguments=None):
    self.module, self.computation = module, computation
    self.arguments = arguments

  def inside(self, call: Instruction) -> "_Scope":
    arguments = [self.value(name) for name in call.operands]
    callee = self.module[call.called("calls")[0]]
    return _Scope(self.module, callee, arguments)

  def value(self, name: str) -> Affine | None:
    """A scalar followed back to an element of the tuple, or to a constant."""
    i = self.computation.get(name)
    if i is None:
      return None
    if i.op == "constant":
      return (None, int(i.literal)) if i.literal.isdigit() else None
    if i.op == "parameter" and self.arguments is not None:
      return self.arguments[int(i.literal)]
    if i.op == "get-tuple-element":
      return self._taken(i)
    if i.op in _SAME:
      return self.value(i.operands[0])
    if i.op == "add":
      return self._sum(*i.operands)
    if i.op == "fusion":
      inner = self.inside(i)
      return inner.value(inner.computation.root.name)
    return None

  def _taken(self, i):
    whole = self.computation.get(i.operands[0])
    if whole.op == "parameter" and self.arguments is None:
      return (i.index, 0)
    if whole.op == "fusion":
      inner = self.inside(whole)
      root = inner.computation.root
      return inner.value(root.operands[i.index]) if root.op == "tuple" else None
    return None

  def _sum(self, a, b):
    a, b = self.value(a), self.value(b)
    if a is None or b is None or None not in (a[0], b[0]):
      return None
    return (a[0] if b[0] is None else b[0], a[1] + b[1])
