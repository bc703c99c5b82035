"""The table of methods: each policy loss, and what a trainer must know."""

import dataclasses
import inspect
from collections.abc import Callable

import jax

from gspo_jax.losses import policy
from gspo_jax.losses.metrics import Metrics

# Arguments of a loss that a trainer gives; the others are the method's numbers.
TRAINER_ARGUMENTS = (
  "normalizer",
  "segment_ids",
  "terms",
  "max_length",
  "router_shift",
)


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
    parameters = inspect.signature(self.loss).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

  @property
  def numbers(self) -> dict[str, object]:
    """The method's numbers, such as `clip_low`, with their defaults."""
    return {
      name: default
      for name, default in self.arguments.items()
      if name not in TRAINER_ARGUMENTS
    }

  # `objective.name` may be the path of a `Method`; it must be callable.
  def __call__(self, *arrays, **options) -> tuple[jax.Array, Metrics]:
    return self.loss(*arrays, **options)


# Keys are values of `objective.name`.
METHODS = {
  "gspo": Method(policy.gspo_loss, "sequence", "ratio", one_advantage=True),
  "gspo_token": Method(policy.gspo_token_loss, "sequence", "ratio"),
  "grpo": Method(policy.grpo_loss, "token", "ratio"),
  "dr_grpo": Method(policy.dr_grpo_loss, "token", "ratio", normalize_std=False),
  "dapo": Method(policy.dapo_loss, "token", "ratio"),
  "ppo": Method(policy.ppo_loss, "token", "ratio", critic=True),
  "gmpo": Method(policy.gmpo_loss, "token", "log_ratio", one_advantage=True),
  "rspo": Method(policy.rspo_loss, "token", "log_ratio", one_advantage=True),
  "cispo": Method(policy.cispo_loss),
  "sapo": Method(policy.sapo_loss),
  "luspo": Method(policy.luspo_loss, "sequence", "ratio", one_advantage=True),
  "vespo": Method(policy.vespo_loss, "sequence"),
  "dppo_tv": Method(policy.dppo_tv_loss, normalize_std=False),
  "dppo_kl": Method(policy.dppo_kl_loss, normalize_std=False),
  "ctpo": Method(policy.ctpo_loss, "token", "log_ratio"),
}
