"""The table of methods: each policy loss, and what a trainer must know."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.losses.batch import (
  TokenBatch,
  checked_batch,
  sequence_mean,
  token_mean,
)
from gspo_jax.losses.metrics import Histogram, Mean, Metrics, Std
from gspo_jax.losses.terms import NO_TERMS, Terms

# Arguments of a loss that a trainer gives; the others are the method's numbers.
TRAINER_ARGUMENTS = (
  "normalizer",
  "segment_ids",
  "terms",
  "max_length",
  "router_shift",
)


class Surrogate(NamedTuple):
  """The loss of each token, and where its ratio was clipped."""

  loss: jax.Array  # [B, T] float32, to be minimised
  low: jax.Array  # [B, T] bool, clipped from below
  high: jax.Array  # [B, T] bool, clipped from above


@dataclasses.dataclass(frozen=True)
class Method:
  """A policy loss, and what a trainer must know about it.

  The loss takes the arguments of `gspo_loss`, except `clip_low` and
  `clip_high`. A trainer gives `terms`, `segment_ids` and `normalizer=1.0` to
  every loss, and `max_length` (the longest response allowed) and `router_shift`
  to a loss that takes them. All other keyword-only arguments are numbers of the
  method.
  """

  loss: Callable[..., tuple[jax.Array, Metrics]]
  unit: str = "token"  # of the ratio: "sequence" or "token"
  # What `clip_low` and `clip_high` bound: "ratio" (depends on the advantage's
  # sign, allows a dual clip), "log_ratio", or "" for nothing.
  clips: str = ""
  one_advantage: bool = False  # per response; False: one per token
  normalize_std: bool = True  # whether to divide advantages by the group's std
  # Rewards [P, G] -> advantages; None: `group_relative_advantages`.
  advantages: Callable[[jax.Array], jax.Array] | None = None
  critic: bool = False  # whether to use `generalized_advantages`

  def __post_init__(self):
    for field, names in (
      ("unit", ("sequence", "token")),
      ("clips", ("ratio", "log_ratio", "")),
    ):
      if (value := getattr(self, field)) not in names:
        raise ValueError(f"{field}={value!r}: expected one of {names}")
    if self.advantages and (self.critic or not self.normalize_std):
      raise ValueError(
        "advantages: expected critic=False and normalize_std=True, which are "
        "about the advantages of this library"
      )
    for name in ("clip_low", "clip_high") if self.clips else ():
      if not isinstance(self.arguments.get(name), int | float):
        raise ValueError(
          f"clips={self.clips!r}: the loss has no {name!r} with a default"
        )

  @property
  def arguments(self) -> dict[str, object]:
    """The loss's keyword-only arguments with their defaults."""
    return {p.name: p.default for p in _keyword_only(self.loss)}

  @property
  def numbers(self) -> dict[str, Any]:
    """The method's numbers, such as `clip_low`, with their defaults."""
    return {
      name: default
      for name, default in self.arguments.items()
      if name not in TRAINER_ARGUMENTS
    }

  # `objective.name` may be the path of a `Method`; it must be callable.
  def __call__(
    self, *arrays: jax.Array, **options: Any
  ) -> tuple[jax.Array, Metrics]:
    return self.loss(*arrays, **options)


METHODS: dict[str, Method] = {}  # keys are values of `objective.name`


def method(
  mean: Callable[..., Mean], **facts: Any
) -> Callable[[Callable[..., Surrogate]], Callable]:
  """The decorator of a loss: it checks, reduces and adds a row to `METHODS`.

  The function `NAME_loss` takes a `TokenBatch` and the numbers of the method,
  and returns the loss of each token. It becomes a loss with the arguments of
  `gspo_loss`, these numbers, and the keyword-only arguments of `mean`, which is
  as in `reduce`. `facts` are fields of `Method`.
  """
  of_mean = _keyword_only(mean)

  def decorate(tokens):
    @functools.wraps(tokens, assigned=("__module__", "__qualname__", "__doc__"))
    def loss(
      logps: jax.Array,
      old_logps: jax.Array,
      advantages: jax.Array,
      mask: jax.Array,
      *,
      normalizer: jax.Array | float | None = None,
      segment_ids: jax.Array | None = None,
      terms: Terms = NO_TERMS,
      **numbers,
    ) -> tuple[jax.Array, Metrics]:
      if row.one_advantage and segment_ids is None and advantages.ndim != 1:
        raise ValueError(
          f"{name} takes one advantage a sequence, [B], got "
          f"{advantages.shape=}; gspo_token_loss takes [B, T], packed rows "
          "need segment_ids"
        )
      if row.clips != "ratio" and terms.dual_clip is not None:
        raise ValueError(f"{name} has no dual clip, got {terms.dual_clip=}")
      batch = checked_batch(
        logps, old_logps, advantages, mask, segment_ids, terms
      )
      sizes = {p.name: numbers.pop(p.name, p.default) for p in of_mean}
      aggregate = functools.partial(mean, **sizes)
      return reduce(batch, tokens(batch, **numbers), aggregate, normalizer)

    name = loss.__name__ = tokens.__name__
    shared = inspect.signature(loss, follow_wrapped=False)
    *arguments, _ = shared.parameters.values()  # without **numbers
    arguments[4:4] = [*_keyword_only(tokens), *of_mean]
    loss.__signature__ = shared.replace(parameters=arguments)  # type: ignore[attr-defined]  # for `inspect`
    row = METHODS[name.removesuffix("_loss")] = Method(loss, **facts)
    return loss

  return decorate


def _keyword_only(function) -> list[inspect.Parameter]:
  parameters = inspect.signature(function).parameters.values()
  return [p for p in parameters if p.kind is p.KEYWORD_ONLY]


def reduce(
  batch: TokenBatch,
  surrogate: Surrogate,
  aggregate: Callable[[TokenBatch, jax.Array], Mean],
  normalizer: jax.Array | float | None,
) -> tuple[jax.Array, Metrics]:
  """The loss of a batch with its terms, and the metrics that all losses share.

  `aggregate` is `sequence_mean`, `token_mean` or another function
  (batch, [B, T]) -> Mean. `normalizer` replaces the mean's count as the
  divisor.
  """
  weights, penalty = batch.terms.weights, batch.terms.penalty
  loss = surrogate.loss if weights is None else weights * surrogate.loss
  policy = aggregate(batch, loss)
  metrics: Metrics = {"loss/policy": policy} | _ratio_metrics(batch, surrogate)
  total = policy.total
  if penalty is not None:
    metrics["loss/penalty"] = mean = aggregate(batch, penalty)
    total = total + mean.total
  if normalizer is None:
    normalizer = jnp.maximum(policy.count, 1.0)
  return total / normalizer, jax.lax.stop_gradient(metrics)


def _ratio_metrics(batch: TokenBatch, surrogate: Surrogate) -> Metrics:
  """Metrics of every loss; the ratios are without `log_ratio_shift`."""
  token_log_ratio = batch.raw_log_ratio
  # Std sums squares of r - 1: in float32 squares of r would round them away.
  offset = jnp.expm1(token_log_ratio)
  metrics: Metrics = {
    "ratio/moved": token_mean(batch, token_log_ratio != 0),
    "kl/old_new": token_mean(batch, offset - token_log_ratio),
  }
  sequence_log_ratio = batch.means(token_log_ratio)
  has_tokens = batch.lengths() > 0
  for unit, mean, log_ratio, mask in (
    ("sequence", sequence_mean, sequence_log_ratio, has_tokens),
    ("token", token_mean, token_log_ratio, batch.mask),
  ):
    metrics |= {
      f"ratio/{unit}_std": Std.of(jnp.expm1(log_ratio), mask),
      f"ratio/{unit}_log": Histogram.of(log_ratio, mask),
      f"clip_frac/{unit}": mean(batch, surrogate.low | surrogate.high),
      f"clip_frac/{unit}_low": mean(batch, surrogate.low),
      f"clip_frac/{unit}_high": mean(batch, surrogate.high),
    }
  return metrics
