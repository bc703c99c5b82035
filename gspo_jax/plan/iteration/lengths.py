"""The lengths of responses and prompts that `--lengths` asks for.

  --lengths=lognormal:mean=.25,sigma=1
  --lengths=lognormal:mean=.25,sigma=1,group=.5
  --lengths=FILE
  --lengths=FILE:prompt_mean=.3

`lognormal` is cut at `sampler.max_new_tokens`. `mean` is the mean after the
cut, as a share of `max_new_tokens`, and `sigma` the standard deviation of the
logarithm before the cut. `group` (0 by default) is the correlation of the
logarithms of two responses to one prompt.

FILE has a line for each response: a number of tokens, or a JSON object with the
number in `length` or the text in `response`, as samples/*.jsonl of a run. The
config's tokenizer counts a text, and a stop token is added. If FILE has exactly
as many responses as an iteration, they are taken in order. Else groups stay
together: neighbours with the same `prompt`, or as many lines as a group has. Of
the groups in the order of their means, evenly spaced ones are taken; one of
another size gives even quantiles.

`prompt_mean` (.5 by default) is the mean length of prompts as a share of
`data.max_prompt_length`; lengths spread evenly around it, as widely as
possible. All is shuffled with a fixed seed.
"""

import functools
import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.program.config import Config
from gspo_jax.runtime.errors import UserError, nearest

_LOGNORMAL = "lognormal"
_PROMPT_MEAN = 0.5
_EXPECTED = "expected a file, or lognormal:mean=.25,sigma=1,group=.5"
_ITERATIONS = 60  # of a bisection; each halves the error


class Lengths(NamedTuple):
  prompts: np.ndarray  # [P] int
  responses: np.ndarray  # [P * G] int, grouped by prompt


def draw(spec: str, config: Config, tokenizer: Tokenizer) -> Lengths:
  """The lengths of an iteration of this config; longer responses are cut.

  Raises UserError if the spec or its file is invalid.
  """
  mistake = lambda text: UserError(f"--lengths={spec}: {text}")
  match = re.fullmatch(r"(.+?):(\w+=[^/]*)", spec)
  name, options = match.groups() if match else (spec, "")
  needed = ["mean", "sigma"] if name == _LOGNORMAL else []
  known = [*needed, "group"] if needed else []
  values = _numbers(spec, options, [*known, "prompt_mean"])
  limit, P = config.sampler.max_new_tokens, config.data.prompts
  G = config.rollout.group_size
  count = P * G
  if name == _LOGNORMAL:
    for key in needed:
      if key not in values:
        raise mistake(f"{key} is missing; {_EXPECTED}")
    mean, sigma = values["mean"], values["sigma"]
    if not 1 / limit < mean < 1:
      raise mistake(
        f"mean={mean:g}: expected a share of sampler.max_new_tokens={limit}, "
        f"above 1/{limit} and below 1"
      )
    if not 0 < sigma <= 5:
      raise mistake(f"sigma={sigma:g}: expected a number above 0, at most 5")
    group = values.get("group", 0.0)
    if not 0 <= group <= 1:
      raise mistake(f"group={group:g}: expected a correlation, from 0 to 1")
    responses = _lognormal(count, limit, mean, sigma)
    if group:
      responses = _correlated(responses.reshape(P, G), group)
  else:
    responses, prompts = _from_file(spec, name, tokenizer)
    if len(responses) != count:
      responses = _resampled(responses, prompts, P, G)
  mean = values.get("prompt_mean", _PROMPT_MEAN)
  if not 0 < mean <= 1:
    raise mistake(
      f"prompt_mean={mean:g}: expected a share of data.max_prompt_length, "
      "above 0 and at most 1"
    )
  spread = min(mean, 1 - mean)
  prompts = mean + spread * (2 * _quantiles(P) - 1)
  longest = config.data.max_prompt_length
  prompts = _shuffled(prompts * longest, seed=1)
  cut = lambda x, limit: np.clip(np.rint(x), 1, limit).astype(int)
  return Lengths(cut(prompts, longest), cut(responses, limit))


def _numbers(spec, options, known) -> dict[str, float]:
  values = {}
  for option in filter(None, options.split(",")):
    key, _, value = option.partition("=")
    if key not in known:
      raise UserError(f"--lengths={spec}: {key}: {nearest(key, known)}")
    try:
      values[key] = float(value)
    except ValueError:
      raise UserError(
        f"--lengths={spec}: {key}={value}: expected a number"
      ) from None
  return values


def _quantiles(count):
  return (np.arange(count) + 0.5) / count


def _shuffled(values, seed=0):
  return np.random.default_rng(seed).permutation(values)


def _lognormal(count, limit, mean, sigma) -> np.ndarray:
  """[count] lengths with mean `mean * limit`, by bisection."""
  standard = statistics.NormalDist()
  normal = np.array([standard.inv_cdf(q) for q in _quantiles(count)])
  spread = limit * np.exp(sigma * normal)
  lengths = lambda median: np.clip(median * spread, 1, limit)
  # At `low` all lengths are 1, at `high` all are `limit`.
  low, high = -math.log(limit) - 5 * sigma, 5 * sigma
  for _ in range(_ITERATIONS):
    middle = (low + high) / 2
    if lengths(math.exp(middle)).mean() < mean * limit:
      low = middle
    else:
      high = middle
  return _shuffled(lengths(math.exp(high)))


def _correlated(lengths_PG, correlation) -> np.ndarray:
  """The lengths in an order in which those of a group correlate."""
  P, G = lengths_PG.shape
  rng = np.random.default_rng(0)
  shared, own = rng.standard_normal((P, 1)), rng.standard_normal((P, G))
  normal = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
  rank = normal.ravel().argsort().argsort()
  return np.sort(lengths_PG, axis=None)[rank]


def _resampled(lengths, prompts, P, G) -> np.ndarray:
  """The lengths [P * G] of P whole groups."""
  starts = np.flatnonzero([a != b for a, b in itertools.pairwise(prompts)]) + 1
  if len(starts) == 0:  # no prompts
    starts = np.arange(G, len(lengths), G)
  groups = sorted(np.split(lengths, starts), key=np.mean)
  rng = np.random.default_rng(0)
  chosen = rng.permutation((_quantiles(P) * len(groups)).astype(int))
  # Hazen's quantiles are the values themselves where the group has G.
  values = functools.partial(np.quantile, q=_quantiles(G), method="hazen")
  evenly = lambda group: rng.permutation(values(group))
  return np.concatenate([evenly(groups[i]) for i in chosen])


def _from_file(spec, path, tokenizer) -> tuple[np.ndarray, Sequence]:
  """The length of each line, and its prompt, None without one."""
  try:
    lines = epath.Path(path).read_text().splitlines()
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or "it is not text"
    raise UserError(
      f"--lengths={spec}: cannot read {path!r}: {reason}; {_EXPECTED}"
    ) from error
  pairs = [
    _length(f"--lengths={spec}: {path}:{number}", text, tokenizer)
    for number, text in enumerate(lines, 1)
    if text.strip()
  ]
  if not pairs:
    raise UserError(f"--lengths={spec}: {path} has no line with a length")
  lengths, prompts = zip(*pairs, strict=True)
  return np.array(lengths), prompts


def _length(place, text, tokenizer) -> tuple[float, str | None]:
  """The length that a line states, and its prompt."""
  prompt = None
  try:
    line = json.loads(text)
  except ValueError:
    line = None
  if isinstance(line, dict):
    prompt = line.get("prompt")
    if "length" not in line and isinstance(line.get("response"), str):
      # A stop token ends it.
      return len(tokenizer.encode(line["response"])) + 1, prompt
    line = line.get("length")
  if isinstance(line, bool) or not isinstance(line, int | float):
    line = math.nan
  if not 1 <= line < math.inf:
    raise UserError(
      f"{place}: expected a number of tokens, at least 1, or a JSON object "
      f"with a `length` or a `response`, got {text.strip()[:60]!r}"
    )
  return line, prompt
