"""Where gradients are taken: responses of an old policy, and a new policy.

Dimension key: N pairs of groups, G responses a group, B rows, R response slots.
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


class Sampled(NamedTuple):
  """Prompts, their responses, and the batch to learn from."""

  prompts: Prompts
  samples: Samples
  rollout: TrainBatch


class Point(NamedTuple):
  """Gradients of some responses under a new policy.

  Attributes:
    grams: [N, 2, K, 2, K], of `gradients.grams`.
    facts: measures of the responses and their ratios.
  """

  grams: np.ndarray
  facts: dict


@dataclasses.dataclass(frozen=True)
class Bench:
  """The functions of one length of responses.

  Attributes:
    config: every response has `sampler.max_new_tokens`.
    functions: its program.
    gradient: (params, pairs of groups) -> as `gradients.grams`.
    load: iteration -> the weights after it.
  """

  config: ConfigDict
  functions: Program
  gradient: Callable
  load: Callable[[int], model.Params]

  def sample(self, old: int, pairs: int) -> Iterator[Sampled]:
    """Responses after iteration `old`; half of each group is right."""
    config, params = self.config, self.load(old)
    batches = saved.prompts(config, self.functions)
    groups, size = config.data.prompts, config.rollout.group_size
    for i in range(-(-2 * pairs // groups)):
      key = jax.random.fold_in(jax.random.key(config.seed), i)
      prompts = next(batches)
      samples, rollout = saved.responses(self.functions, params, prompts, key)
      right = np.random.default_rng((config.seed, i)).permuted(
        np.tile(np.arange(size) % 2, (groups, 1)), axis=1
      )
      lots = advantages.group_relative_advantages(right).reshape(-1)
      lots = np.repeat(lots[:, None], rollout.response_mask.shape[1], axis=1)
      rollout = dataclasses.replace(rollout, advantages=lots)
      yield Sampled(prompts, samples, rollout)

  def point(self, sampled: list[Sampled], new: int) -> Point:
    """Their gradients under the policy after iteration `new`."""
    params, size = self.load(new), self.config.rollout.group_size
    paired = lambda x: np.asarray(x).reshape(-1, 2, size, *x.shape[1:])
    each = [
      self.gradient(params, jax.tree.map(paired, d.rollout)) for d in sampled
    ]
    clipped = {
      name: float(np.mean([c[name] for _, c in each]))
      for name in gradients.METHODS
    }
    return Point(
      np.concatenate([np.asarray(g) for g, _ in each]),
      self._facts(sampled, params) | {"clipped tokens": clipped},
    )

  def _facts(self, sampled, params) -> dict[str, float]:
    join = lambda arrays: np.concatenate([np.asarray(a) for a in arrays])
    score = lambda d: saved.log_probs(params, self.functions.cfg, d.rollout)
    old = join(d.rollout.old_logps for d in sampled)
    gaps = join(score(d) for d in sampled) - old
    mask = join(d.rollout.response_mask for d in sampled)
    return {
      "mean log-prob of a token": float(old[mask].mean()),
      "token_std": float(gaps[mask].std()),
      "sequence_std": float((gaps * mask).sum(1).std() / mask[0].sum()),
    }


def bench(run_config: ConfigDict, folder: Path, mesh, length: int) -> Bench:
  """For a run in `folder`; call it and its methods in the mesh's context."""
  config = run_config.copy_and_resolve_references()
  config.log.instruments = False
  config.sampler.max_new_tokens = length
  # Half a batch at a time: responses are long, and windows need no more.
  config.data.prompts //= 2
  config.learner.micro_batch_size //= 2
  parsed = parse(config).replace(sampler={"min_new_tokens": length})
  functions = build_program(parsed, mesh)
  gradient = functools.partial(
    gradients.grams,
    cfg=functions.cfg,
    temperature=config.sampler.temperature,
  )
  load = functools.partial(saved.weights, config, functions, folder)
  return Bench(config, functions, jax.jit(gradient), load)


def windows(sampled: list[Sampled], length: int) -> list[Sampled]:
  """Masks all but `length` tokens in a row of each response, at random.

  Windows of any length are of the same text. The first n tokens of a longer
  response differ: a short one is mostly what the policy would write, and a long
  one is mostly what it writes when it is kept from stopping.
  """
  rng, found = np.random.default_rng(length), []
  for d in sampled:
    B, R = d.rollout.response_mask.shape
    start = rng.integers(R - length + 1, size=(B, 1))
    slot = np.arange(R)
    mask = (slot >= start) & (slot < start + length)
    found.append(
      d._replace(rollout=dataclasses.replace(d.rollout, response_mask=mask))
    )
  return found
