"""Sources of problems: files, data sets, or any factory by dotted name.

A source is a sequence of `Problem` with random access.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gspo_jax.data import messages, readers
from gspo_jax.data.config import DataConfig
from gspo_jax.data.problem import Problem, held_out
from gspo_jax.data.tokenizers.base import Message, as_messages
from gspo_jax.rewards import numbers
from gspo_jax.runtime.errors import UserError

# Problems that the fingerprint of a source without a file reads, at most.
_FINGERPRINTED = 1000
# Records of a table that are checked before a run starts.
_CHECKED = 100_000
# Integers above it are rounded in a float.
_EXACT = 2**53
# Goes before a reference that is imitated alone.
_PREFIX = "#### "


class Fields(NamedTuple):
  """The names of the columns of a record; `a.b` is b in the column a."""

  # A text or a conversation. In a conversation the user's last message is the
  # problem, the messages before it are the history, and the assistant's message
  # after it is the demonstration. "": the first of `_PROBLEM` in the record.
  problem: str = ""
  # The reference is the text after the last `####` (as in GSM8K), or the whole
  # text, or `readers.text` of another value. "": the first of `_REFERENCE`, or
  # the conversation's demonstration.
  reference: str = ""
  # "": the conversation's demonstration; else the solution, if the reference is
  # in another column; else the column of the reference, if it has `####`; else
  # `#### ` and the reference, or nothing if the reference is JSON.
  demonstration: str = ""

  @classmethod
  def of(cls, data: DataConfig) -> "Fields":
    return cls(*(getattr(data, f"{name}_field") for name in cls._fields))

  def found_in(self, record, place: str) -> "Fields":
    """These names; where one is "", a column that this record has."""
    if isinstance(record, Problem):  # without columns; a fingerprint has these
      return _GSM8K._replace(**{k: v for k, v in self._asdict().items() if v})
    columns = readers.fields(record, place)
    by_name = {name.lower(): name for name in columns}
    by_name |= {name: name for name in columns}  # exact names win
    first = lambda names: next(filter(None, map(by_name.get, names)), "")

    def require(use, names, column):
      if not column:
        raise UserError(
          f"{place}: no column for the {use}: none of {', '.join(names)}; set "
          f"data.{use}_field to one of {', '.join(sorted(columns))}"[:300]
        )

    problem = self.problem or first(_PROBLEM)
    require("problem", _PROBLEM, problem)
    reference = self.reference or first(_REFERENCE)
    # Without such a column the response of the conversation.
    answer = reference or _asked(record, problem, place)[2].get("content")
    require("reference", _REFERENCE, answer)
    demonstration = self.demonstration
    # In MATH the answer is the reference, and the solution leads to it.
    texts = (columns.get(name) for name in (problem, "solution"))
    worked = reference != "solution" and all(isinstance(x, str) for x in texts)
    if worked and not demonstration:
      demonstration = "solution"
    return Fields(problem, reference, demonstration)

  def note(self, spec: str, record) -> str:
    """A line that says where problem and reference are; "" for a `Problem`."""
    if isinstance(record, Problem):
      return ""
    place = "is the last message of the assistant"
    if self.reference:
      place = f"in {self.reference!r}"
    return f"{spec}: the problem is in {self.problem!r}, the reference {place}"


# Columns of GSM8K, MATH, AIME, OlympiadBench, TRL and verl, in the order in
# which they are tried, without regard to case.
_PROBLEM = ("question", "problem", "prompt", "messages")
_REFERENCE = (
  *("answer", "final_answer", "solution"),
  *("ground_truth", "reward_model.ground_truth"),
)
_GSM8K, _TO_BE_FOUND = Fields("question", "answer"), Fields()
_KEYS = Fields(*(f"data.{name}_field" for name in Fields._fields))


@dataclasses.dataclass(frozen=True)
class ProblemSource(Sequence):
  """The records of a source as problems."""

  records: Sequence  # dicts with `fields`, or problems; random access
  place: Callable[[int], str]  # the name of a record by its index, for errors
  # The columns; only the reference may be "", if it is the response of a
  # conversation.
  fields: Fields = _GSM8K
  # True for the held-out problems only, False for the others, None for all.
  evaluation: bool | None = None
  content: str = ""  # a hash of all records; "" if unknown
  spec: str = ""  # the argument of `load`
  # A hash of each problem that `load` read, on both sides of the split; it does
  # not depend on white space.
  asked: tuple[int, ...] = ()
  note: str = ""  # a line that says which columns `load` found; "" for none

  @functools.cached_property
  def _indices(self) -> Sequence[int]:
    """The records on this side of the split; reads all records once."""
    indices = range(len(self.records))
    if self.evaluation is None:
      return indices
    return [i for i in indices if self._is_held_out(i) == self.evaluation]

  def _is_held_out(self, i: int) -> bool:
    problem = self.parse(i)
    turns = [turn["content"] for turn in as_messages(problem.history)]
    return held_out("\n".join([*turns, problem.text]))

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> Problem:
    return self.parse(self._indices[index])

  def parse(self, i: int) -> Problem:
    """The problem of record i, on either side of the split."""
    return self.problem(self.records[i], self.place(i))

  def problem(self, record, place: str) -> Problem:
    if isinstance(record, Problem):
      return record
    names = self.fields
    history, text, said = _asked(record, names.problem, place)
    solution = response = said.get("content", "")
    if names.reference:
      solution = readers.value(record, names.reference, place, _KEYS.reference)
    _require(text, names.problem, _KEYS.problem, place)
    column = names.reference or names.problem
    reference = _reference(solution, column, place)
    if names.demonstration:
      key = _KEYS.demonstration
      response = readers.value(record, names.demonstration, place, key)
      response = "" if response is None else response
      if not isinstance(response, str):
        raise UserError(
          f"{place}: {names.demonstration!r} ({key}) must be text"
        )
    elif said.get("tool_calls") or said.get("reasoning_content"):
      response = ""  # a demonstration is plain text
    elif not response:
      response = _demonstration(solution)
    columns = readers.plain_columns(record, without=names)
    return Problem(text, reference, response, columns, history)


def _demonstration(solution) -> str:
  if isinstance(solution, str) and "####" in solution:
    return solution
  items = solution if isinstance(solution, list) else [solution]
  if any(isinstance(item, list | dict) for item in items):
    return ""  # the reference is JSON
  return _PREFIX + readers.text(solution).strip()


def _require(text: str, column: str, key: str, place: str) -> None:
  if not text.strip():
    raise UserError(
      f"{place}: {column!r} ({key}) is empty, null or NaN: give it a value, or "
      "leave this record out"
    )


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Several sources; each problem is sampled from one of them."""

  sources: tuple[Sequence[Problem], ...]  # two or more
  weights: tuple[float, ...]  # shares, before long problems are dropped


def load(spec: str, *, fields: Fields = _TO_BE_FOUND) -> ProblemSource:
  """The source that a config names.

  Args:
    spec: `jsonl:FILE`, `parquet:FILE`, `hf:NAME[:SPLIT]`, `tfds:NAME[:SPLIT]`
      (split "train" if not given), or `package.module.factory`. The factory is
      called without arguments and returns anything with a length and records by
      index, each a dict or a `Problem`.
    fields: column names; those that are "" are found in the first record.

  Raises:
    UserError: there is no such source, it is empty, or a record is bad. It
      checks all JSON lines, the first 100,000 records of a table, and no
      records of a factory.
  """
  records, place = readers.read(spec)
  if not len(records):
    raise UserError(f"{spec}: no problem in it")
  columns = fields.found_in(records[0], place(0))
  source = ProblemSource(
    records,
    place,
    columns,
    content=readers.content(spec),
    spec=spec,
    note="" if all(fields[:2]) else columns.note(spec, records[0]),
  )
  if spec.startswith(readers.STORED):
    # A record of a table takes about a tenth of a millisecond.
    is_table = not spec.startswith("jsonl:")
    count = min(len(records), _CHECKED) if is_table else len(records)
    problems = map(source.parse, range(count))
    words = lambda p: (*p.text.split(), *map(str, p.history))
    asked = tuple(hash(words(problem)) for problem in problems)
    source = dataclasses.replace(source, asked=asked)
  return source


def mix(
  sources: Sequence[Sequence[Problem]], weights: Sequence[float] = ()
) -> Sequence[Problem] | Mixture:
  """A mixture of sources, or the only source; equal weights by default."""
  weights = tuple(weights) or (1.0,) * len(sources)
  if len(weights) != len(sources):
    raise UserError(
      f"data.{weights=}: expected one for each source of data.source, which "
      f"names {len(sources)}"
    )
  if not all(0 < w < math.inf for w in weights):
    raise UserError(f"data.{weights=}: expected numbers above 0")
  return Mixture(tuple(sources), weights) if len(sources) > 1 else sources[0]


def fingerprint(source) -> str:
  """A hash of the content and options of a source, wherever it is stored.

  A checkpoint has it, so that a run does not resume on other data. It covers
  all bytes of JSON lines and Parquet; of other sources the length, and up to
  1000 problems without the columns that only rewards read.
  """
  if isinstance(source, Mixture):
    options = [*map(fingerprint, source.sources), *source.weights]
  elif isinstance(source, ProblemSource):
    options = [source.fields, source.evaluation, _PREFIX]
    options.append(source.content or _sample(source))
  elif dataclasses.is_dataclass(source):
    options = dataclasses.asdict(source)
  else:
    options = _sample(source)
  text = json.dumps([type(source).__name__, options])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sample(source: Sequence[Problem]) -> list:
  """The length, and up to 1000 problems in even steps, with first and last."""
  last = len(source) - 1
  steps = min(_FINGERPRINTED - 1, last)
  indices = [i * last // steps for i in range(steps + 1)] if last > 0 else [0]
  problems = [source[i] for i in indices]
  turns = lambda p: [x for x in (p.history, p.turns) if x]
  return [
    len(source),
    [[p.text, p.reference, p.demonstration, *turns(p)] for p in problems],
  ]


def _asked(record, name: str, place: str) -> tuple[tuple, str, Message]:
  """History and text as in `Problem`; the assistant's message, {} for none."""
  value = readers.value(record, name, place, _KEYS.problem)
  if isinstance(value, str):
    return (), value, {}
  if not isinstance(value, list):
    _require(readers.text(value), name, _KEYS.problem, place)
    raise UserError(f"{place}: {name!r} must be text or a list of messages")
  turns = [
    messages.read(message, f"{place}: {name}[{i}]")
    for i, message in enumerate(value)
  ]
  response = {}
  if turns and turns[-1]["role"] == "assistant":
    response = turns.pop()
  if not turns or turns[-1]["role"] != "user":
    raise UserError(
      f"{place}: {name!r} must end with a message of the user, or with one of "
      f"the assistant after it, got roles {[m.get('role') for m in value]}"
    )
  return tuple(turns[:-1]), turns[-1]["content"], response


def _reference(solution, column: str, place: str) -> str:
  marked = numbers.marked(solution) if isinstance(solution, str) else None
  if marked == "":
    raise UserError(
      f"{place}: {column!r} ({_KEYS.reference}) has nothing after its last ####"
    )
  for item in solution if isinstance(solution, list) else [solution]:
    if isinstance(item, float) and _EXACT < abs(item) < math.inf:
      raise UserError(
        f"{place}: {column!r} ({_KEYS.reference}) is {item!r}, a float, which "
        "has 53 bits: write the number as text"
      )
  reference = readers.text(solution).strip() if marked is None else marked
  missing = reference.lower() == "nan"  # as pandas writes it
  _require("" if missing else reference, column, _KEYS.reference, place)
  return reference
