"""The format of a response: reasoning between tags first, then more text."""

OPEN, CLOSE = "<think>", "</think>"


def thinks(prompt: str, response: str, reference: str) -> float:
  """1.0 iff the response is `<think>thoughts</think>`, once, then more text.

  The thoughts and the text after them must have more than white space. White
  space may stand at the start. If the prompt already ends in the opening tag,
  as in some chat templates, the response must not repeat it.
  """
  if prompt.rstrip().endswith(OPEN):
    response = OPEN + response
  response = response.strip()
  once = response.count(OPEN) == response.count(CLOSE) == 1
  thoughts, _, rest = response.removeprefix(OPEN).partition(CLOSE)
  both_filled = thoughts.strip() != "" != rest.strip()
  return float(once and response.startswith(OPEN) and both_filled)
