"""Rewards of the length of a response in tokens; the text does not matter."""

from gspo_jax.rewards.reward import Reward
from gspo_jax.runtime import errors


def overlong(
  prompt: str,
  response: str,
  reference: str,
  *,
  tokens: int,
  limit: int,
  buffer: int,
) -> float:
  """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in [-1, 0].

  0 up to `limit - buffer` tokens, then linear down to -1 at `limit` tokens.
  `tokens` counts the stop token; `limit` is the paper's L_max = 20,480, and
  `buffer` its L_cache = 4,096.
  """
  if buffer > limit:  # every response would be punished
    raise ValueError(
      f"reward 'overlong': expected a buffer up to the {limit} tokens that a "
      f"response may have, got {buffer}"
    )
  return min(0.0, max(-1.0, (limit - buffer - tokens) / buffer))


def short(
  prompt: str, response: str, reference: str, *, tokens: int, limit: int
) -> float:
  """`1 - tokens / limit`, in [0, 1]: the share of the length limit not used.

  An empty response gets the most; so weigh it less than a reward for correct
  responses.
  """
  return max(0.0, 1 - tokens / limit)


def _prepare(*, buffer=None, limit=None, tokens=None) -> None:
  if tokens is not None:
    raise errors.UserError(
      f"reward 'overlong': expected no tokens={tokens!r}: they are the length "
      "of each response"
    )
  if not isinstance(buffer, int) or buffer < 1:
    raise errors.UserError(
      "reward 'overlong': expected a buffer of 1 token or more, as in "
      f"'overlong:buffer=512', got {buffer!r}"
    )
  if limit is not None and (not isinstance(limit, int) or limit < buffer):
    raise errors.UserError(
      f"reward 'overlong': expected a limit of {buffer=} tokens or more, got "
      f"{limit!r}"
    )


OVERLONG = Reward(overlong, prepare=_prepare)
