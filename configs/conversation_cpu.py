"""A tiny MoE learns to use a tool, or to play a game, in conversations.

  python -m gspo_jax.main --config=configs/conversation_cpu.py:calculator \
    --workdir=runs/calculator
  python -m gspo_jax.main --config=configs/conversation_cpu.py:guessing \
    --workdir=runs/guessing
"""

from ml_collections import ConfigDict

from gspo_jax.configs import tiny_cpu


def get_config(game: str = "calculator") -> ConfigDict:
  """game: "calculator" or "guessing"; see gspo_jax/rollout/games.py."""
  if game not in ("calculator", "guessing"):
    raise ValueError(
      f"configs/conversation_cpu.py:{game}: expected 'calculator' or 'guessing'"
    )
  c = tiny_cpu.get_config()
  c.data.source = f"gspo_jax.rollout.games.{game}_problems"
  c.data.max_prompt_length = 8
  c.rollout.environment = game
  c.reward.names = ()  # the environment gives the reward
  c.reward.weights = ()
  c.continuous_batching.slots = 256
  c.continuous_batching.page_size = 8
  c.continuous_batching.prefill_chunk = 40  # one length to compile
  c.eval.prompts = 128
  c.cold_start.check_every = 100
  if game == "calculator":
    c.sampler.max_new_tokens = 28
    c.rollout.max_turns = 3
  else:
    c.sampler.max_new_tokens = 32
    c.rollout.max_turns = 4
    # Half of the demonstrated guesses are random, so that greedy ones are no
    # measure of a cold start.
    c.cold_start.steps = 300
    c.cold_start.gate = 0.0
  return c
