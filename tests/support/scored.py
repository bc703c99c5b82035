"""What a reward pool that needs no time gives for a submission."""

from concurrent import futures
from types import SimpleNamespace


def scored(scores):
  """These `Scores`, with the interface of `rewards.pool.Pending`."""
  calls = futures.Future()
  calls.set_result([])
  count = len(scores.total)
  return SimpleNamespace(
    calls=calls,
    counts=lambda: (count, int(sum(scores.failed))),
    result=lambda wait=True: scores,
  )
