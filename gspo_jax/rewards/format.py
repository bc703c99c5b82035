"""The form of an answer: thinking first, between tags."""

OPEN, CLOSE = "<think>", "</think>"


def thinks(prompt: str, answer: str, reference: str) -> float:
  """1.0 iff the answer is `<think>thoughts</think>`, once, and then more text.

  White space may stand before and between, and is neither. Where the prompt
  already ends in the opening tag, as some chat templates do, the answer must
  not repeat it.

  Args:
    prompt: looked at for its end only.
    answer: what the policy wrote.
    reference: not used.
  """
  if prompt.rstrip().endswith(OPEN):
    answer = OPEN + answer
  answer = answer.strip()
  once = answer.count(OPEN) == answer.count(CLOSE) == 1
  thoughts, _, rest = answer.removeprefix(OPEN).partition(CLOSE)
  said = thoughts.strip() != "" != rest.strip()
  return float(once and answer.startswith(OPEN) and said)
