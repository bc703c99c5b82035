"""The problems of a run: for training, evaluation and imitation."""

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gspo_jax.data import pipeline, sources
from gspo_jax.data.config import DataConfig
from gspo_jax.data.problem import Problem
from gspo_jax.runtime import spec
from gspo_jax.runtime.errors import UserError

BUILT_IN = {"chain": "gspo_jax.tasks.chain.sources"}


class Stage(NamedTuple):
  """A source, and the first iteration whose prompts are from it."""

  begin: int
  source: pipeline.Source


class Datasets(NamedTuple):
  stages: Sequence[Stage]
  held_out: pipeline.Source
  demonstrations: Sequence[Problem]
  notes: Sequence[str] = ()  # lines on columns found, and on equal problems


def load(data: DataConfig, seed: int) -> Datasets:
  """The data sets of a config; `data.source` is the first stage."""
  name, colon, text = data.source.partition(":")
  if name in BUILT_IN:
    if data.eval_source or data.weights or data.curriculum:
      raise UserError(
        f"data.eval_source={data.eval_source!r}, data.weights={data.weights}, "
        f"data.curriculum={data.curriculum}: expected none, since "
        f"data.source={data.source!r} makes its own held-out problems and "
        "mixes with no other source"
      )
    # `chain`, or `chain:steps=1|2,noise=0.1`.
    make = spec.imported(name, BUILT_IN)
    numbers = spec.arguments(name, make, text, "data.source") if colon else {}
    train, held_out, demonstrated = make(seed, **numbers)
    return Datasets([Stage(1, train)], held_out, demonstrated)
  fields = sources.Fields.of(data)
  load_once = functools.cache(functools.partial(sources.load, fields=fields))
  read = lambda specs: [load_once(name.strip()) for name in specs.split(",")]
  split = lambda whole, evaluation: [
    dataclasses.replace(source, evaluation=evaluation) for source in whole
  ]
  begins, specs = zip((1, data.source), *data.curriculum, strict=True)
  whole = [*map(read, specs)]
  evaluated = read(data.eval_source) if data.eval_source else ()
  parts = whole if evaluated else [split(stage, False) for stage in whole]
  train = sources.mix(parts[0], data.weights)
  stages = [*map(Stage, begins, (train, *map(sources.mix, parts[1:])))]
  held_out = sources.mix(evaluated or split(whole[0], True))
  return Datasets(stages, held_out, train, _notes(whole, evaluated))


def _notes(stages, evaluated) -> tuple[str, ...]:
  sources = {s.spec: s for stage in (*stages, evaluated) for s in stage}
  lines = [source.note for source in sources.values()]
  # A later stage may name a source again, but a stage names it once.
  counts = [Counter(s.spec for s in stage) for stage in stages]
  trained = functools.reduce(operator.or_, counts).elements()
  trained = [asked for spec in trained for asked in sources[spec].asked]
  known = {*trained}
  if again := len(trained) - len(known):
    lines.append(
      f"data.source and data.curriculum: of the {len(trained)} problems read "
      f"{again} are equal to an earlier one"
    )
  of_eval = [asked in known for source in evaluated for asked in source.asked]
  if any(of_eval):
    lines.append(
      f"data.eval_source: of the {len(of_eval)} problems read {sum(of_eval)} "
      "are in data.source or data.curriculum, too: they are trained on"
    )
  return tuple(filter(None, lines))


def fingerprint(stages: Sequence[Stage]) -> str:
  """Changes with the problems and with the first iteration of a stage."""
  first, *later = stages
  named = [f"{begin}:{sources.fingerprint(s)}" for begin, s in later]
  return " ".join([sources.fingerprint(first.source), *named])
