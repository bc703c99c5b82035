"""Rewards: a prompt, a response and its reference in, a float out.

Others take `Reward`, `named` and `BUILT_IN`, `pool` (computes rewards in worker
processes), `reward` (what a worker imports), `math` and `numbers` (results in a
normal form), and `code` (the program of a response). A user names a reward in
`reward.names`: see docs/rewards.md.
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
)
