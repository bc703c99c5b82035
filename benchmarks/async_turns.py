"""An environment of slow answers, for `benchmarks.regression`."""

import time

import numpy as np

_TURNS = 4


class Sleeps:
  """Answers "go on" after some time; `mean` is in seconds."""

  def __init__(self, *, mean: float):
    self.mean = mean

  def reset(self, problem, seed):
    self.turns = 0
    return ()

  def step(self, response):
    # Other conversations and turns sleep for other times.
    seed = [self.turns, *response.encode()]
    time.sleep(self.mean * np.random.default_rng(seed).exponential())
    self.turns += 1
    return [("user", "go on")], self.turns == _TURNS, 0.0
