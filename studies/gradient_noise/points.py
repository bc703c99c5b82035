"""Where gradients are taken: answers of an old policy, and a new policy.

Dimension key: N pairs of groups, G answers a group, B rows, R response slots.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from gspo_jax import model
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.losses import advantages
from gspo_jax.program.config import parse
from gspo_jax.program.functions import Program, build_program
from gspo_jax.sampler.samples import Prompts, Samples
from studies import saved
from studies.gradient_noise import gradients


class Drawn(NamedTuple):
  """Prompts, their answers, and the rollout to learn from."""

  prompts: Prompts
  samples: Samples
  rollout: TrainBatch


class Point(NamedTuple):
  """Gradients of some answers under a new policy.

  Attributes:
    grams: [N, 2, K, 2, K], of `gradients.grams`.
    facts: what the answers and their ratios are like.
  """

  grams: np.ndarray
  facts: dict


@dataclasses.dataclass(frozen=True)
class Bench:
  """The functions of one length of answers.

  Attributes:
    config: every answer has `sampler.max_new_tokens`.
    functions: its program.
    gradient: (params, pairs of groups) -> as `gradients.grams`.
    load: iteration -> the weights after it.
  """

  config: ConfigDict
  functions: Program
  gradient: Callable
  load: Callable[[int], model.Params]

  def draw(self, old: int, pairs: int) -> Iterator[Drawn]:
    """Answers of the policy after iteration `old`, half of each group right."""
    config, params = self.config, self.load(old)
    questions = saved.questions(config, self.functions)
    groups, size = config.data.prompts, config.rollout.group_size
    for i in range(-(-2 * pairs // groups)):
      key = jax.random.fold_in(jax.random.key(config.seed), i)
      prompts = next(questions)
      samples, rollout = saved.answers(self.functions, params, prompts, key)
      right = np.random.default_rng((config.seed, i)).permuted(
        np.tile(np.arange(size) % 2, (groups, 1)), axis=1
      )
      lots = advantages.group_relative_advantages(right).reshape(-1)
      rollout = dataclasses.replace(rollout, advantages=lots)
      yield Drawn(prompts, samples, rollout)

  def point(self, drawn: list[Drawn], new: int) -> Point:
    """Their gradients under the policy after iteration `new`."""
    params, size = self.load(new), self.config.rollout.group_size
    paired = lambda x: np.asarray(x).reshape(-1, 2, size, *x.shape[1:])
    each = [
      self.gradient(params, jax.tree.map(paired, d.rollout)) for d in drawn
    ]
    clipped = {
      name: float(np.mean([c[name] for _, c in each]))
      for name in gradients.METHODS
    }
    return Point(
      np.concatenate([np.asarray(g) for g, _ in each]),
      self._facts(drawn, params) | {"clipped tokens": clipped},
    )

  def _facts(self, drawn, params) -> dict[str, float]:
    join = lambda arrays: np.concatenate([np.asarray(a) for a in arrays])
    score = lambda d: saved.log_probs(params, self.functions.cfg, d.rollout)
    old = join(d.rollout.old_logps for d in drawn)
    gaps = join(score(d) for d in drawn) - old
    mask = join(d.rollout.response_mask for d in drawn)
    return {
      "mean log-prob of a token": float(old[mask].mean()),
      "token_std": float(gaps[mask].std()),
      "sequence_std": float((gaps * mask).sum(1).std() / mask[0].sum()),
    }


def bench(run_config: ConfigDict, folder: Path, mesh, length: int) -> Bench:
  """For a run in `folder`; call it and its methods in the mesh's context."""
  config = run_config.copy_and_resolve_references()
  config.log.instruments = False
  config.sampler.min_new_tokens = config.sampler.max_new_tokens = length
  # Half a batch at a time: answers are long, and windows need no more.
  config.data.prompts //= 2
  config.learner.micro_batch_size //= 2
  functions = build_program(parse(config), mesh)
  gradient = functools.partial(
    gradients.grams,
    cfg=functions.cfg,
    temperature=config.sampler.temperature,
  )
  load = functools.partial(saved.weights, config, functions, folder)
  return Bench(config, functions, jax.jit(gradient), load)


def windows(drawn: list[Drawn], length: int) -> list[Drawn]:
  """Of each answer only `length` tokens in a row count, from a random one on.

  Windows of any length are of the same text: where an answer of n tokens is
  the first n of a longer one, most of a short answer is what the policy would
  write, and most of a long one is what comes of keeping it from stopping.
  """
  rng, found = np.random.default_rng(length), []
  for d in drawn:
    B, R = d.rollout.response_mask.shape
    start = rng.integers(R - length + 1, size=(B, 1))
    slot = np.arange(R)
    mask = (slot >= start) & (slot < start + length)
    found.append(
      d._replace(rollout=dataclasses.replace(d.rollout, response_mask=mask))
    )
  return found
