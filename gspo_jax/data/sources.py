"""Where questions come from: JSON lines, TFDS, any source by dotted name.

A source is a random-access sequence of `tasks.Problem`, and so is
`tasks.Chain`, the embedded task.
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

_SAMPLED = 1000  # rows of a source without a file that its fingerprint reads


class Fields(NamedTuple):
  """The names of what a row holds.

  Attributes:
    problem: text.
    reference: the reference is what follows the last `####` in this column (as
      in GSM8K), or all of it. One that is no text (the tests of a program)
      becomes JSON.
    demonstration: a worked response to imitate. "": the column of the
      reference, with `mark` and its reference where it has no `####`, and none
      where it is no text.
  """

  problem: str = "question"
  reference: str = "answer"
  demonstration: str = ""


_FIELDS = Fields()


@dataclasses.dataclass(frozen=True)
class ProblemSource(Sequence):
  """The rows of a source as problems.

  Attributes:
    rows: dicts with `fields`, or problems; random access.
    where: says in an error which row it is.
    fields: names in a dict.
    evaluation: True keeps the held-out questions only, False the others, None
      all of them.
    mark: goes before an answer that is imitated, where it has no `####`.
    content: a hash of all the rows; "": not known.
  """

  rows: Sequence
  where: Callable[[int], str]
  fields: Fields = _FIELDS
  evaluation: bool | None = None
  mark: str = "#### "
  content: str = ""

  @functools.cached_property
  def _kept(self) -> Sequence[int]:
    """The rows of this side of the split; reads all of them once."""
    every = range(len(self.rows))
    if self.evaluation is None:
      return every
    wanted = lambda i: held_out(self._parse(i).text) == self.evaluation
    return list(filter(wanted, every))

  def __len__(self) -> int:
    return len(self._kept)

  def __getitem__(self, index: int) -> Problem:
    return self._parse(self._kept[index])

  def _parse(self, i: int) -> Problem:
    row, where = self.rows[i], self.where(i)
    if isinstance(row, Problem):
      return row
    question = readers.plain(
      readers.field(row, self.fields.problem, where), where
    )
    answer = readers.plain(
      readers.field(row, self.fields.reference, where), where
    )
    if not isinstance(question, str):
      raise UserError(f"{where}: {self.fields.problem!r} must be text")
    if answer is None:
      raise UserError(f"{where}: {self.fields.reference!r} is null")
    reference = _reference(answer)
    if not (question and reference):
      raise UserError(f"{where}: an empty question or answer")
    return Problem(question, reference, self._demonstration(row, answer, where))

  def _demonstration(self, row, answer, where: str) -> str:
    if self.fields.demonstration:
      shown = readers.plain(
        readers.field(row, self.fields.demonstration, where), where
      )
      if not isinstance(shown, str):
        raise UserError(f"{where}: {self.fields.demonstration!r} must be text")
      return shown
    if isinstance(answer, str) and "####" in answer:
      return answer
    if isinstance(answer, list | dict):
      return ""
    return self.mark + _reference(answer)


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Several sources, each question drawn from one of them.

  Attributes:
    sources: two or more.
    weights: shares of the questions, before those too long are left out.
  """

  sources: tuple[Sequence[Problem], ...]
  weights: tuple[float, ...]


def load(
  spec: str,
  *,
  fields: Fields = _FIELDS,
  data_dir: str = "",
  evaluation: bool | None = None,
  mark: str = "#### ",
) -> ProblemSource:
  """The questions that a config names; see `Questions` for the options.

  Args:
    spec: `jsonl:FILE`, `tfds:NAME[:SPLIT]` (split "train" if not given), or
      `package.module.factory`: called without arguments, it gives anything
      with a length and rows by index, each a dict or a `tasks.Problem`.
    data_dir: where TFDS sets lie; "": its own default.

  Raises:
    UserError: there is no such source, it is empty, or a row of it is bad; of
      JSON lines, every row is looked at now.
  """
  kind, _, rest = spec.partition(":")
  content = ""
  if kind == "jsonl":
    numbered = list(readers.json_lines(rest))
    rows = [row for _, row in numbered]
    where = lambda i: numbered[i][0]
    content = _file_hash(rest)
  elif kind == "tfds":
    rows, where = readers.tfds(rest, data_dir), lambda i: f"{spec}[{i}]"
  else:
    rows, where = readers.called(spec), lambda i: f"{spec}[{i}]"
  found = ProblemSource(rows, where, fields, evaluation, mark, content)
  if kind == "jsonl":
    for i in range(len(rows)):
      found._parse(i)
  if not len(found):
    raise UserError(f"{spec}: no question in it")
  return found


def mix(
  sources: Sequence[Sequence[Problem]], weights: Sequence[float] = ()
) -> Sequence[Problem] | Mixture:
  """The one source, or the mixture of several; equal weights if none given."""
  weights = tuple(weights) or (1.0,) * len(sources)
  if len(weights) != len(sources):
    raise UserError(f"{weights=}: expected one for each of {len(sources)}")
  if not all(0 < w < math.inf for w in weights):
    raise UserError(f"{weights=}: expected numbers above 0")
  return Mixture(tuple(sources), weights) if len(sources) > 1 else sources[0]


def fingerprint(source) -> str:
  """Tells one source from another by content and options, wherever it lies.

  A checkpoint carries it, so that a run never resumes on other data. Of a
  source that is no file it reads the length and up to 1000 rows.
  """
  if isinstance(source, Mixture):
    options = [*map(fingerprint, source.sources), *source.weights]
  elif isinstance(source, ProblemSource):
    options = [source.fields, source.evaluation, source.mark]
    options.append(source.content or _sample(source))
  elif dataclasses.is_dataclass(source):
    options = dataclasses.asdict(source)
  else:
    options = _sample(source)
  text = json.dumps([type(source).__name__, options])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sample(source: Sequence[Problem]) -> list:
  """Its length, and up to 1000 of its rows in even steps, the last one too."""
  last = len(source) - 1
  steps = min(_SAMPLED - 1, last)
  picked = [i * last // steps for i in range(steps + 1)] if last > 0 else [0]
  return [len(source), [list(source[i]) for i in picked]]


def _reference(answer) -> str:
  if not isinstance(answer, str):
    return json.dumps(answer)
  return answer.rsplit("####", 1)[-1].strip()


def _file_hash(path: str) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
