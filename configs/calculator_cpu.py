"""A tiny MoE learns to call a calculator, in conversations of two turns.

  python -m gspo_jax.main --config=configs/calculator_cpu.py \
    --workdir=runs/calculator

`37*48?` is answered with `calc(37*48)`, the tool replies `1776`, and the answer
is `#1776` (gspo_jax/tasks/games.py). In seven of ten
demonstrations of the cold start the tool is not called, in one it is called
with another number.

Seeds 0, 1, 2, from after the cold start to after 40 iterations: held-out pass@1
.15, .13, .15 to .90, .82, .91; conversations that call the tool .28, .32, .37
to .99, .98, .98 (benchmarks/calculator_cpu.json), in 250 to 314 s of two cores
that did other work.

`configs/calculator_cpu.py:debug` shrinks every size: nothing is learnt.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import tiny_cpu


def get_config(mode: str = "") -> ConfigDict:
  """mode: "" or "debug"."""
  if mode not in ("", "debug"):
    raise ValueError(
      f"configs/calculator_cpu.py:{mode}: expected 'debug' or nothing"
    )
  c = tiny_cpu.get_config(mode)
  c.data.source = "gspo_jax.tasks.games.calculator_problems"
  c.data.max_prompt_length = 8
  c.rollout.environment = "calculator"
  c.rollout.max_turns = 3  # one more than needed: a wrong call can be repeated
  c.reward.names = ()  # the environment gives the reward
  c.sampler.max_new_tokens = 28  # of the whole conversation
  c.continuous_batching.slots = c.data.prompts * c.rollout.group_size
  c.continuous_batching.page_size = 4
  c.continuous_batching.prefill_chunk = 36  # one length to compile
  if not mode:
    c.eval.prompts = 128
    c.cold_start.steps = 300
    c.cold_start.gate = 0.0  # most demonstrations are wrong
  return c
