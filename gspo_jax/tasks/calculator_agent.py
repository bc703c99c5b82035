"""An agent that plays the calculator of `games` over HTTP.

The policy calls `calc(37*48)`, reads `1776`, and answers `#1776`.
"""

import json
import re
import urllib.request

from gspo_jax.rollout.environment import Question
from gspo_jax.tasks.games import calc, is_result

_CALL = re.compile(r"calc\((.*)\)", re.DOTALL)
_CALLS = 3  # one more than needed: a wrong call can be repeated


def play(
  problem: Question, *, base_url: str, api_key: str, model: str
) -> float:
  """1.0 iff the policy gives the right result."""
  messages = [{"role": "user", "content": problem.text}]
  for _ in range(_CALLS):
    body = {"model": model, "messages": messages}
    text = _answer(f"{base_url}/chat/completions", api_key, body)
    call = _CALL.fullmatch(text)
    if not call:
      return is_result(problem.text, text, problem.reference)
    try:
      result = str(calc(call[1]))
    except ValueError:
      result = "error"
    messages.append({"role": "assistant", "content": text})
    messages.append({"role": "tool", "content": result})
  return 0.0


def _answer(url: str, key: str, body) -> str:
  request = urllib.request.Request(
    url,
    json.dumps(body).encode(),
    {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
  )
  with urllib.request.urlopen(request) as answer:
    return json.load(answer)["choices"][0]["message"]["content"]
