"""Reads the text of a compiled HLO module: what is computed, and how often.

Written for what libtpu dumps as `*after_codegen.txt`. Text in, values out.
"""

import dataclasses
import functools
import math
import re

_HEADER = re.compile(r"(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
  r"  (?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<type>.*?) "
  r"(?P<op>[a-z][a-z0-9\-]*)\((?P<inside>[^)]*)\)(?P<attributes>.*)$",
  re.DOTALL,
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of an instruction's result, without the padding of its tiles.

  Attributes:
    dtype: as HLO writes it.
    dims: its sizes.
    space: where it lives; 0 is HBM, 1 VMEM, others scratch or the host.
  """

  dtype: str
  dims: tuple[int, ...]
  space: int

  @property
  def bytes(self) -> float:
    bits = re.match(r"[a-z]+(\d+)", self.dtype)
    widths = {"pred": 8, "token": 0}
    width = int(bits[1]) if bits else widths.get(self.dtype, 8)
    return math.prod(self.dims) * width / 8


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: unique in the module.
    op: the HLO opcode.
    arrays: of the result, tuples flattened.
    operands: names.
    literal: what stands in the parentheses: a constant's value, a parameter's
      number.
    attributes: the rest of the line.
    root: whether it is the computation's result.
  """

  name: str
  op: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  literal: str
  attributes: str
  root: bool

  @property
  def bytes(self) -> float:
    return sum(a.bytes for a in self.arrays)

  @property
  def hbm(self) -> float:
    """Bytes of the result that live in HBM."""
    return sum(a.bytes for a in self.arrays if a.space == 0)

  @property
  def index(self) -> int:
    """Which element a get-tuple-element takes."""
    return int(self.find(r"index=(\d+)"))

  @functools.cached_property
  def source(self) -> str:
    """The JAX operation it came from, else its own name."""
    return self.find(r'op_name="([^"]*)"') or self.name

  def find(self, pattern: str) -> str | None:
    """The first group of a pattern in the attributes."""
    match = re.search(pattern, self.attributes)
    return match and match[1]

  def called(self, attribute: str) -> tuple[str, ...]:
    """The computations that an attribute names."""
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

  @functools.cached_property
  def root(self) -> Instruction:
    return next(i for i in self if i.root)

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    return {int(i.literal): i for i in self if i.op == "parameter"}

  @functools.cached_property
  def uses(self) -> dict[str, list[tuple[Instruction, int]]]:
    """Per name, the instructions that take it and as which operand."""
    uses = {}
    for i in self:
      for position, name in enumerate(i.operands):
        uses.setdefault(name, []).append((i, position))
    return uses


class Module:
  """A compiled program.

  Attributes:
    computations: by name.
    entry: the one that runs.
  """

  def __init__(self, computations: dict[str, Computation], entry: str):
    self.computations = computations
    self.entry = computations[entry]

  def __getitem__(self, name: str) -> Computation:
    return self.computations[name]


def parse(text: str) -> Module:
  """Parses a dump.

  Raises:
    ValueError: no entry computation in it.
  """
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
      lines[-1] += line  # metadata of kernels has raw line breaks
  if entry is None:
    raise ValueError("no ENTRY computation in the HLO text")
  return Module(computations, entry)


def _instruction(line: str) -> Instruction:
  match = _INSTRUCTION.match(line)
  if not match:
    raise ValueError(f"not an HLO instruction: {line[:200]}")
  return Instruction(
    name=match["name"],
    op=match["op"],
    arrays=arrays(match["type"]),
    operands=tuple(_NAME.findall(match["inside"])),
    literal=match["inside"],
    attributes=match["attributes"],
    root=bool(match["root"]),
  )


@functools.lru_cache(maxsize=2**14)
def arrays(text: str) -> tuple[Array, ...]:
  """The arrays of a type, tuples flattened."""
  found = []
  for dtype, dims, layout in _ARRAY.findall(text):
    space = re.search(r"S\((\d+)\)", layout)
    sizes = tuple(int(d) for d in dims.split(",") if d)
    found.append(Array(dtype, sizes, int(space[1]) if space else 0))
  return tuple(found)
