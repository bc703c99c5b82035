"""The trip count of a loop in a compiled module.

A `jax.lax.scan` becomes a `while` loop over a tuple. One element is a counter:
the condition compares it with a bound, the body adds a constant. Both are found
by tracing scalars back to `element + constant`. With any other condition the
trip count depends on the data.
"""

import math
from typing import NamedTuple

from gspo_jax.plan.hlo.module import Computation, Instruction, Module


class Affine(NamedTuple):
  """A scalar: an element of the loop's tuple plus a constant."""

  element: int | None  # its index; None for a constant
  added: int


_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")


def trip_count(
  module: Module, computation: Computation, loop: Instruction
) -> int | None:
  """The trip count of a `while`; None if the data decides."""
  (condition,), (body,) = loop.called("condition"), loop.called("body")
  body = module[body]
  test = _comparison(module, module[condition])
  if test is None:
    return None
  counter, bound = test
  step = _next_value(module, body, counter.element)
  if step is None or step.element != counter.element or step.added <= 0:
    return None
  # A scan starts at 0, also where the value cannot be traced.
  start = _initial_value(module, computation, loop, counter.element) or 0
  limit = bound.added
  if bound.element is not None:
    if _next_value(module, body, bound.element) != Affine(bound.element, 0):
      return None  # the bound changes
    initial = _initial_value(module, computation, loop, bound.element)
    if initial is None:
      return None
    limit += initial
  return max(math.ceil((limit - start - counter.added) / step.added), 0)


def _comparison(module, condition) -> tuple[Affine, Affine] | None:
  """(counter, bound) if the condition is `counter < bound`, else None."""
  root, scope = condition.root, _Scope(module, condition)
  if root.op == "fusion":
    scope = scope.callee(root)
    root = scope.computation.root
  sides = [scope.value(name) for name in root.operands]
  if root.op != "compare" or None in sides:
    return None
  direction = root.find(r"direction=(\w+)")
  if direction not in ("LT", "GT"):
    return None
  small, large = sides if direction == "LT" else sides[::-1]
  return None if small.element is None else (small, large)


def _next_value(module, body, index) -> Affine | None:
  if body.root.op != "tuple":
    return None
  return _Scope(module, body).value(body.root.operands[index])


def _initial_value(module, computation, loop, index) -> int | None:
  """The initial value of a tuple element; None if not constant."""
  initial = computation.get(loop.operands[0])
  if initial is None or initial.op != "tuple":
    return None
  value = _Scope(module, computation).value(initial.operands[index])
  return value.added if value and value.element is None else None


class _Scope:
  """A computation and its parameters' values, by default a loop's tuple."""

  def __init__(self, module, computation, arguments=None):
    self.module, self.computation = module, computation
    self.arguments = arguments

  def callee(self, fusion: Instruction) -> "_Scope":
    arguments = [self.value(name) for name in fusion.operands]
    return _Scope(self.module, self.module.callee(fusion), arguments)

  def value(self, name: str) -> Affine | None:
    i = self.computation.get(name)
    if i is None:
      return None
    if i.op == "constant":
      return Affine(None, int(i.literal)) if i.literal.isdigit() else None
    if i.op == "parameter" and self.arguments is not None:
      return self.arguments[int(i.literal)]
    if i.op == "get-tuple-element":
      return self._tuple_element(i)
    if i.op in _SAME:
      return self.value(i.operands[0])
    if i.op == "add":
      a, b = map(self.value, i.operands)
      if a is None or b is None or None not in (a.element, b.element):
        return None
      element = a.element if b.element is None else b.element
      return Affine(element, a.added + b.added)
    if i.op == "fusion":
      inner = self.callee(i)
      return inner.value(inner.computation.root.name)
    return None

  def _tuple_element(self, i):
    whole = self.computation.get(i.operands[0])
    if whole.op == "parameter" and self.arguments is None:
      return Affine(i.index, 0)
    if whole.op == "fusion":
      inner = self.callee(whole)
      root = inner.computation.root
      return inner.value(root.operands[i.index]) if root.op == "tuple" else None
    return None
