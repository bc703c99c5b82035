"""What a run learns from, is tested on, and imitates."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from gspo_jax.data import pipeline, sources
from gspo_jax.data.tasks import Chain, Problem
from gspo_jax.runtime.errors import UserError


class Stage(NamedTuple):
  """A source, and the iteration from which on it is drawn from."""

  begin: int
  source: pipeline.Source


class Datasets(NamedTuple):
  """Questions to learn from, to be tested on, and to imitate."""

  stages: Sequence[Stage]
  held_out: Sequence[Problem]
  demonstrations: Sequence[Problem]


def load(config) -> Datasets:
  """The material that a config names; of `source` itself the first stage.

  Raises:
    UserError: a source cannot be read, or does not go with another key.
  """
  c, cold = config.data, config.cold_start
  if c.source == "chain":
    if c.eval_source or c.weights or c.stages:
      raise UserError(
        f"data.eval_source={c.eval_source!r}, data.weights={c.weights}, "
        f"data.curriculum={c.stages}: expected none, since data.source='chain' "
        "makes its own held-out questions and mixes with no other source"
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
    c.question_field, c.answer_field, c.demonstration_field
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
  for begin, specs in c.stages:
    later = read(specs)
    stages.append(
      Stage(begin, sources.mix(later if c.eval_source else side(later, False)))
    )
  return Datasets(stages, sources.mix(held_out), train)


def fingerprint(stages: Sequence[Stage]) -> str:
  """Another one where a stage begins elsewhere, or has other questions."""
  first, *later = stages
  named = [f"{begin}:{sources.fingerprint(s)}" for begin, s in later]
  return " ".join([sources.fingerprint(first.source), *named])
