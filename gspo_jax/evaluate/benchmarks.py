"""Benchmarks by name: how their files are read, and who scores responses.

AIME24, AIME25, AMC23, MATH500, Minerva, OlympiadBench, GSM8K
                problem and reference, in columns found as in training
                (gspo_jax/data/sources.py)
LiveCodeBench, CodeForces
                programs and tests (gspo_jax/evaluate/programs.py);
                CodeForces has a rating, which may be null

Rows whose tests need more than standard input and output are left out and
counted.
"""

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gspo_jax.data import readers
from gspo_jax.data.problem import Problem
from gspo_jax.data.sources import Fields, ProblemSource
from gspo_jax.evaluate import programs
from gspo_jax.runtime.errors import UserError, nearest

_IDS = ("id", "ID", "unique_id", "question_id", "url")


class Benchmark(NamedTuple):
  name: str  # as the papers spell it
  reward: str  # the name of a reward
  samples: int  # responses to each problem
  problems: list[Problem]
  ids: list[str]  # the id of the row, else its number
  ratings: list[float | None]  # difficulties; None where a row has none
  skipped: dict[str, int]  # reason -> how many rows are left out
  content: str  # a hash of the file, or of all problems
  note: str = ""  # which columns were taken; "" if they are fixed


class _Format(NamedTuple):
  name: str  # as the papers spell it
  reward: str = "math"  # a name in gspo_jax/rewards/
  # AIME has 32 and LiveCodeBench 8 as in GSPO, section 5.1; by analogy AMC, as
  # small as AIME, has 32 and CodeForces 8. The others are large.
  samples: int = 1
  # (record, its name) -> problem; None: as training reads it
  parse: Callable[[Mapping, str], Problem] | None = None
  rated: bool = False  # whether rows have a rating


def read(
  name: str,
  file: str,
  *,
  reward: str = "",
  limit: int | None = None,
  fields: Fields | None = None,
) -> Benchmark:
  """Reads a benchmark.

  Args:
    name: a benchmark above, in any case; another name needs `reward`.
    file: a file or spec; see `readers.spec_of`.
    reward: replaces the benchmark's reward.
    limit: how many problems to read, from the start; None: all.
    fields: column names. A known benchmark searches only for columns that its
      first row lacks.
  """
  known = _FORMATS.get(name.lower())
  if known is None and not reward:
    names = [f.name for f in _FORMATS.values()]
    raise UserError(
      f"--set={name}: no such benchmark; {nearest(name, names)} (another name "
      "needs --reward)"
    )
  form, spec = known or _Format(name), readers.spec_of(file)
  records = readers.read(spec)
  if not len(records.rows):
    raise UserError(f"{file}: no problem in it")
  problem_of, note = _parser(form, spec, records, fields or Fields())
  rows, skipped = [], Counter()
  for i in range(len(records.rows)):
    if len(rows) == limit:
      break
    record, place = records.rows[i], records.place(i)
    try:
      problem = problem_of(record, place)
    except programs.Skipped as reason:
      skipped[str(reason)] += 1
      continue
    if not reward:  # only a user's reward reads columns
      problem = problem._replace(columns={})
    rating = _rating(record, place) if form.rated else None
    ids = (record[k] for k in _IDS if record.get(k) not in (None, ""))
    rows.append((problem, str(next(ids, i + 1)), rating))
  if not rows:
    raise UserError(f"{file}: no usable row; left out: {dict(skipped)}")
  problems, ids, ratings = map(list, zip(*rows, strict=True))
  return Benchmark(
    name=form.name,
    reward=reward or form.reward,
    samples=form.samples,
    problems=problems,
    ids=ids,
    ratings=ratings,
    skipped=dict(skipped),
    content=readers.content(spec)
    or hashlib.sha256(json.dumps(problems, default=str).encode()).hexdigest(),
    note=note,
  )


def _parser(
  form: _Format, spec: str, records: readers.Records, fields: Fields
) -> tuple[Callable[[Mapping, str], Problem], str]:
  """(record, its name) -> problem; and a note about the columns."""
  if form.parse:
    plain = functools.partial(readers.plain_columns, without=())
    return lambda record, place: form.parse(plain(record), place), ""
  first, place = records.rows[0], records.place(0)
  if form in _FORMATS.values() and isinstance(first, Mapping):
    there = readers.fields(first, place)
    fields = Fields(*(name if name in there else "" for name in fields))
  fields = fields.found_in(first, place)
  return ProblemSource(*records, fields).problem, fields.note(spec, first)


def _rating(record: Mapping, place: str) -> float | None:
  rating = readers.field(record, "rating", place)
  number = type(rating) in (int, float) and math.isfinite(rating)
  if not (rating is None or number):
    raise UserError(f"{place}: 'rating': expected a number, got {rating!r}")
  return rating


_FORMATS = {
  f.name.lower(): f
  for f in (
    _Format("AIME24", samples=32),
    _Format("AIME25", samples=32),
    _Format("AMC23", samples=32),
    _Format("MATH500"),
    _Format("Minerva"),
    _Format("OlympiadBench"),
    _Format("GSM8K", "gsm8k"),
    _Format("LiveCodeBench", "code", 8, programs.livecodebench),
    _Format("CodeForces", "code", 8, programs.codeforces, rated=True),
  )
}
