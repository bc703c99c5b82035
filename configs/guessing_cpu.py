"""A tiny MoE learns to halve, in a guessing game of up to four turns.

  python -m gspo_jax.main --config=configs/guessing_cpu.py \
    --workdir=runs/guessing

A letter between two others, such as `c-n?`, is to be found; the environment
says whether it comes later or earlier, and leaves the larger part
(gspo_jax/tasks/games.py). The guesses that the cold start shows
are random.

Seeds 0, 1, 2, from after the cold start to after 60 iterations: held-out pass@1
.14, .12, .15 to .53, .47, .49 (benchmarks/guessing_cpu.json).

`configs/guessing_cpu.py:debug` shrinks every size: nothing is learnt.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import calculator_cpu


def get_config(mode: str = "") -> ConfigDict:
  """mode: "" or "debug"."""
  if mode not in ("", "debug"):
    raise ValueError(
      f"configs/guessing_cpu.py:{mode}: expected 'debug' or nothing"
    )
  c = calculator_cpu.get_config(mode)
  c.data.source = "gspo_jax.tasks.games.guessing_problems"
  c.rollout.environment = "guessing"
  c.rollout.max_turns = 4  # enough for 15 letters
  c.sampler.max_new_tokens = 32
  c.continuous_batching.prefill_chunk = 40
  if not mode:
    c.num_steps = 60
    c.cold_start.steps = 200
  return c
