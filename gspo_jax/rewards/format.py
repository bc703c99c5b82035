"""The format of a response: thinking between tags first, then more text."""

from gspo_jax.rewards import thinking


def thinks(prompt: str, response: str, reference: str) -> float:
  """1.0 iff the response is `<think>thoughts</think>`, once, then more text.

  The thoughts and the text after them must have more than white space. White
  space may stand at the start. If the prompt already ends in the opening tag,
  as in some chat templates, the response must not repeat it.
  """
  response = thinking.opening(prompt) + response
  tags = thinking.OPEN, thinking.CLOSE
  once = all(response.count(tag) == 1 for tag in tags)
  thoughts, rest = thinking.split(response)
  return float(once and bool(thoughts) and bool(rest.strip()))
