"""Parses an HLO module from the compiler's dumps (plan/compile.py)."""

import dataclasses
import functools
import math
import re

_HEADER = re.compile(r"(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
  r"  (?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<type>.*?) "
  r"(?P<op>[a-z][a-z0-9\-]*)\((?P<literal>[^)]*)\)(?P<attributes>.*)$",
  re.DOTALL,
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of an instruction's result; tile padding is ignored."""

  dtype: str  # the name in HLO, such as bf16
  dims: tuple[int, ...]
  space: int  # 0 is HBM, 1 is VMEM, others are scratch or host memory

  @property
  def bits(self) -> int:  # of one element
    bits = re.match(r"[a-z]+(\d+)", self.dtype)
    widths = {"pred": 8, "token": 0}
    return int(bits[1]) if bits else widths.get(self.dtype, 8)

  @property
  def bytes(self) -> float:
    return math.prod(self.dims) * self.bits / 8


@dataclasses.dataclass(frozen=True)
class Instruction:
  name: str  # unique in the module
  op: str  # the HLO opcode
  arrays: tuple[Array, ...]  # of the result; tuples are flattened
  operands: tuple[str, ...]  # names
  # Text in the parentheses: a constant's value, or a parameter's number.
  literal: str
  attributes: str  # the rest of the line
  root: bool  # whether it is the computation's result

  @property
  def bytes(self) -> float:
    return sum(a.bytes for a in self.arrays)

  @property
  def hbm_bytes(self) -> float:  # of the result
    return sum(a.bytes for a in self.arrays if a.space == 0)

  @property
  def index(self) -> int:  # the element that a get-tuple-element takes
    return int(self.find(r"index=(\d+)"))

  @functools.cached_property
  def source(self) -> str:
    """The JAX operation that it was compiled from, else its name."""
    # tokamax appends the arguments of its operations, a text with quotes.
    return self.find(r'op_name="([^"]*?)(?:/tokamax:[^"]*)?"') or self.name

  def find(self, pattern: str) -> str | None:
    match = re.search(pattern, self.attributes)
    return match and match[1]

  def called(self, attribute: str) -> tuple[str, ...]:
    match = re.search(
      rf"\b{attribute}=(?:%([\w.\-]+)|\{{([^}}]*)\}})", self.attributes
    )
    if not match:
      return ()
    return (match[1],) if match[1] else tuple(_NAME.findall(match[2]))


class Computation:
  """Instructions by name, in the order of the schedule."""

  def __init__(self, instructions: list[Instruction]):
    self.instructions = {i.name: i for i in instructions}

  def __iter__(self):
    return iter(self.instructions.values())

  def get(self, name: str) -> Instruction | None:
    return self.instructions.get(name)

  def operands(self, i: Instruction) -> list[Instruction]:
    return [self.instructions[x] for x in i.operands if x in self.instructions]

  @functools.cached_property
  def root(self) -> Instruction:
    return next(i for i in self if i.root)

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    return {int(i.literal): i for i in self if i.op == "parameter"}

  @functools.cached_property
  def uses(self) -> dict[str, list[tuple[Instruction, int]]]:
    """Name -> (instruction that uses it, operand's number) pairs."""
    uses = {}
    for i in self:
      for position, name in enumerate(i.operands):
        uses.setdefault(name, []).append((i, position))
    return uses


class Module:
  def __init__(self, computations: dict[str, Computation], entry: str):
    self.computations = computations
    self.entry = computations[entry]
    self._inlined = {}

  def __getitem__(self, name: str) -> Computation:
    return self.computations[name]

  def callee(self, i: Instruction) -> Computation:
    """What a fusion or an asynchronous call computes."""
    return self[i.called("calls")[0]]

  def inlined(self, name: str) -> Computation:
    """The computation, with each fusion replaced by its instructions."""
    if name not in self._inlined:
      self._inlined[name] = self._inline(self[name])
    return self._inlined[name]

  def _inline(self, computation) -> Computation:
    result, names = [], {}  # names: instruction -> its replacement
    tuples = {}
    for i in computation:
      operands = tuple(names.get(name, name) for name in i.operands)
      i = dataclasses.replace(i, operands=operands)
      if i.op == "get-tuple-element" and operands[0] in tuples:
        names[i.name] = tuples[operands[0]].operands[i.index]
        continue
      if i.op != "fusion":
        result.append(i)
        continue
      inner = self.inlined(i.called("calls")[0])
      inside = {}
      for x in inner:
        if x.op == "parameter":
          inside[x.name] = operands[int(x.literal)]
          continue
        name = inside[x.name] = f"{i.name}/{x.name}"
        inputs = tuple(inside[name] for name in x.operands)
        result.append(
          dataclasses.replace(x, name=name, operands=inputs, root=False)
        )
      names[i.name] = inside[inner.root.name]
      if inner.root.op == "tuple":
        tuples |= {x.name: x for x in result if x.name == names[i.name]}
    root = names.get(computation.root.name, computation.root.name)
    return Computation(
      [dataclasses.replace(i, root=i.name == root) for i in result]
    )


def parse(text: str) -> Module:
  """Parses the text of a module; ValueError if it is not HLO."""
  computations, name, entry, lines = {}, None, None, []
  for line in text.splitlines():
    if name is None:
      header = _HEADER.match(line)
      if header:
        name, lines = header["name"], []
        entry = name if header["entry"] else entry
    elif line == "}" or line.startswith("}, execution_thread"):
      computations[name] = Computation([_instruction(x) for x in lines])
      name = None
    elif line.startswith(("  %", "  ROOT %")):
      lines.append(line)
    else:
      lines[-1] += line  # the metadata of kernels contains line breaks
  if entry is None:
    raise ValueError("no ENTRY computation in the HLO text")
  return Module(computations, entry)


def _instruction(line: str) -> Instruction:
  match = _INSTRUCTION.match(line)
  if not match:
    raise ValueError(f"not an HLO instruction: {line[:200]}")
  fields = match.groupdict() | {"root": bool(match["root"])}
  operands = tuple(_NAME.findall(match["literal"]))
  return Instruction(
    arrays=arrays(fields.pop("type")), operands=operands, **fields
  )


@functools.lru_cache(maxsize=2**14)
def arrays(text: str) -> tuple[Array, ...]:
  result = []
  for dtype, dims, layout in _ARRAY.findall(text):
    space = re.search(r"S\((\d+)\)", layout)
    sizes = tuple(int(d) for d in dims.split(",") if d)
    result.append(Array(dtype, sizes, int(space[1]) if space else 0))
  return tuple(result)
