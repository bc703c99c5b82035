"""Sources of problems: JSON lines, TFDS, or any factory by dotted name.

A source is a random-access sequence of `tasks.Problem`. `tasks.Chain`, the
embedded task, is one too.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gspo_jax.data import readers
from gspo_jax.data.tasks import Problem, held_out
from gspo_jax.runtime.errors import UserError

# Problems that the fingerprint of a source without a file reads, at most.
_FINGERPRINTED = 1000


class Fields(NamedTuple):
  """The names of the fields of a record.

  Attributes:
    problem: text.
    reference: the reference is the text after the last `####` (as in GSM8K), or
      all of it. A value that is not text, such as the tests of a program, is
      written as JSON.
    demonstration: a worked response to imitate. "" for the field of the
      reference: its text if that holds `####`, else the prefix and the
      reference; none if it is a list or an object.
  """

  problem: str = "question"
  reference: str = "answer"
  demonstration: str = ""


_FIELDS = Fields()


@dataclasses.dataclass(frozen=True)
class ProblemSource(Sequence):
  """The records of a source as problems.

  Attributes:
    records: dicts with `fields`, or problems; random access.
    where: the name of a record by its index, for errors.
    fields: names in a dict.
    evaluation: True for the held-out problems only, False for the others, None
      for all.
    prefix: goes before a reference that is imitated alone.
    content: a hash of all records; "" if unknown.
  """

  records: Sequence
  where: Callable[[int], str]
  fields: Fields = _FIELDS
  evaluation: bool | None = None
  prefix: str = "#### "
  content: str = ""

  @functools.cached_property
  def _indices(self) -> Sequence[int]:
    """Indices of the records on this side of the split; reads all once."""
    every = range(len(self.records))
    if self.evaluation is None:
      return every
    belongs = lambda i: held_out(self.parse(i).text) == self.evaluation
    return list(filter(belongs, every))

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> Problem:
    return self.parse(self._indices[index])

  def parse(self, i: int) -> Problem:
    """The problem of record i, on either side of the split."""
    record, where = self.records[i], self.where(i)
    if isinstance(record, Problem):
      return record
    text = self._field(record, self.fields.problem, where)
    solution = self._field(record, self.fields.reference, where)
    if not isinstance(text, str):
      raise UserError(f"{where}: {self.fields.problem!r} must be text")
    if solution is None:
      raise UserError(f"{where}: {self.fields.reference!r} is null")
    reference = _reference(solution)
    if not (text and reference):
      raise UserError(f"{where}: an empty problem or reference")
    return Problem(
      text, reference, self._demonstration(record, solution, where)
    )

  def _demonstration(self, record, solution, where: str) -> str:
    if self.fields.demonstration:
      text = self._field(record, self.fields.demonstration, where)
      if not isinstance(text, str):
        raise UserError(f"{where}: {self.fields.demonstration!r} must be text")
      return text
    if isinstance(solution, str) and "####" in solution:
      return solution
    if isinstance(solution, list | dict):
      return ""
    return self.prefix + _reference(solution)

  def _field(self, record, name: str, where: str):
    return readers.plain(readers.field(record, name, where), where)


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Several sources; each problem is sampled from one of them.

  Attributes:
    sources: two or more.
    weights: shares of the problems, before those too long are dropped.
  """

  sources: tuple[Sequence[Problem], ...]
  weights: tuple[float, ...]


def load(
  spec: str,
  *,
  fields: Fields = _FIELDS,
  data_dir: str = "",
  evaluation: bool | None = None,
  prefix: str = "#### ",
) -> ProblemSource:
  """The source that a config names; see `ProblemSource` for the options.

  Args:
    spec: `jsonl:FILE`, `tfds:NAME[:SPLIT]` (split "train" if not given), or
      `package.module.factory`. The factory is called without arguments and
      returns anything with a length and records by index, each a dict or a
      `tasks.Problem`.
    fields: names in a dict.
    data_dir: the folder of TFDS sets; "" for the default of TFDS.
    evaluation: the side of the split, None for both.
    prefix: goes before a reference that is imitated alone.

  Raises:
    UserError: there is no such source, it is empty, or a record of it is bad.
      Of JSON lines every record is checked now.
  """
  kind, _, rest = spec.partition(":")
  content = ""
  if kind == "jsonl":
    lines = list(readers.json_lines(rest))
    records = [line.record for line in lines]
    where = lambda i: lines[i].where
    content = _file_hash(rest)
  elif kind == "tfds":
    records, where = readers.tfds(rest, data_dir), lambda i: f"{spec}[{i}]"
  else:
    records, where = readers.from_factory(spec), lambda i: f"{spec}[{i}]"
  source = ProblemSource(records, where, fields, evaluation, prefix, content)
  if kind == "jsonl":
    for i in range(len(records)):
      source.parse(i)
  if not len(source):
    raise UserError(f"{spec}: no problem in it")
  return source


def mix(
  sources: Sequence[Sequence[Problem]], weights: Sequence[float] = ()
) -> Sequence[Problem] | Mixture:
  """A mixture of sources, or the source if there is only one.

  Args:
    sources: one or more.
    weights: one for each source, above 0; () for equal weights.

  Raises:
    UserError: the weights do not fit.
  """
  weights = tuple(weights) or (1.0,) * len(sources)
  if len(weights) != len(sources):
    raise UserError(f"{weights=}: expected one for each of {len(sources)}")
  if not all(0 < w < math.inf for w in weights):
    raise UserError(f"{weights=}: expected numbers above 0")
  return Mixture(tuple(sources), weights) if len(sources) > 1 else sources[0]


def fingerprint(source) -> str:
  """A hash of the content and options of a source, wherever it is stored.

  A checkpoint holds it, so that a run never resumes on other data. Of a source
  without a file it covers the length and up to 1000 problems.
  """
  if isinstance(source, Mixture):
    options = [*map(fingerprint, source.sources), *source.weights]
  elif isinstance(source, ProblemSource):
    options = [source.fields, source.evaluation, source.prefix]
    options.append(source.content or _sample(source))
  elif dataclasses.is_dataclass(source):
    options = dataclasses.asdict(source)
  else:
    options = _sample(source)
  text = json.dumps([type(source).__name__, options])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sample(source: Sequence[Problem]) -> list:
  """Its length, and up to 1000 problems in even steps, first and last too."""
  last = len(source) - 1
  steps = min(_FINGERPRINTED - 1, last)
  indices = [i * last // steps for i in range(steps + 1)] if last > 0 else [0]
  return [len(source), [list(source[i]) for i in indices]]


def _reference(solution) -> str:
  if not isinstance(solution, str):
    return json.dumps(solution)
  return solution.rsplit("####", 1)[-1].strip()


def _file_hash(path: str) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
