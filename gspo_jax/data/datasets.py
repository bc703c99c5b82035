"""The problems of a run: to learn from, to be evaluated on, to imitate."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from gspo_jax.data import pipeline, sources
from gspo_jax.data.tasks import Chain, Problem
from gspo_jax.runtime.errors import UserError


class Stage(NamedTuple):
  """A source, and the first iteration whose prompts are from it."""

  begin: int
  source: pipeline.Source


class Datasets(NamedTuple):
  """Problems to learn from, to be evaluated on, and to imitate."""

  stages: Sequence[Stage]
  held_out: Sequence[Problem]
  demonstrations: Sequence[Problem]


def load(config) -> Datasets:
  """The data sets of a config; `data.source` is the first stage.

  Args:
    config: `program.config.Config`.

  Raises:
    UserError: a source cannot be read, or does not go with another key.
  """
  c, cold = config.data, config.cold_start
  if c.source == "chain":
    if c.eval_source or c.weights or c.curriculum:
      raise UserError(
        f"data.eval_source={c.eval_source!r}, data.weights={c.weights}, "
        f"data.curriculum={c.curriculum}: expected none, since "
        "data.source='chain' makes its own held-out problems and mixes with no "
        "other source"
      )
    chain = Chain(c.chain_steps, seed=config.seed)
    return Datasets(
      [Stage(1, chain)],
      dataclasses.replace(chain, evaluation=True),
      dataclasses.replace(
        chain, steps=cold.chain_steps, noise=cold.chain_noise
      ),
    )
  fields = sources.Fields(
    c.problem_field, c.reference_field, c.demonstration_field
  )

  def read(specs):
    names = [name.strip() for name in specs.split(",")]
    return [sources.load(s, fields=fields, data_dir=c.tfds_dir) for s in names]

  def side(every, evaluation):
    return [dataclasses.replace(s, evaluation=evaluation) for s in every]

  every = read(c.source)
  if c.eval_source:
    train, held_out = every, read(c.eval_source)
  else:
    train, held_out = side(every, False), side(every, True)
  train = sources.mix(train, c.weights)
  stages = [Stage(1, train)]
  for begin, specs in c.curriculum:
    later = read(specs)
    stages.append(
      Stage(begin, sources.mix(later if c.eval_source else side(later, False)))
    )
  return Datasets(stages, sources.mix(held_out), train)


def fingerprint(stages: Sequence[Stage]) -> str:
  """Changes with the problems and with the first iteration of a stage."""
  first, *later = stages
  named = [f"{begin}:{sources.fingerprint(s)}" for begin, s in later]
  return " ".join([sources.fingerprint(first.source), *named])
