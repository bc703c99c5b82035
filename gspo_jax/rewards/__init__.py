"""Rewards: a prompt, a response and its reference in, a float out.

Other wings take `Reward`, `named`, `BUILT_IN`, `pool` (worker processes),
`reward` (imported by workers), `math` and `numbers` (normal forms of results),
`thinking` (where it ends), and `code` (a response's program). docs/rewards.md
tells users how to name one.
"""

from gspo_jax.rewards.numbers import final_answer, gsm8k
from gspo_jax.rewards.reward import BUILT_IN, Reward, named

__all__ = (
  "BUILT_IN",
  "Reward",
  "code",
  "config",
  "final_answer",
  "gsm8k",
  "math",
  "named",
  "numbers",
  "pool",
  "reward",
  "thinking",
)
