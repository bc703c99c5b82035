"""A reward that takes its time, as one that runs tests or asks a model does."""

import time

from gspo_jax.rewards import final_answer


def final(
  prompt: str, response: str, reference: str, *, milliseconds: float = 10.0
) -> float:
  """`final_answer`, and as long a wait, in which no processor is in use."""
  time.sleep(milliseconds / 1000)
  return final_answer(prompt, response, reference)
