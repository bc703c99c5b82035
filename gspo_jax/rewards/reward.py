"""What a reward is, and which one a config names; docs/rewards.md tells users.

Worker processes import this module, so it needs the standard library alone.
"""

import asyncio
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gspo_jax.runtime import errors, spec

BUILT_IN = {
  "code": "gspo_jax.rewards.code.CODE",
  "final_answer": "gspo_jax.rewards.numbers.final_answer",
  "format": "gspo_jax.rewards.format.thinks",
  "gsm8k": "gspo_jax.rewards.numbers.gsm8k",
  "instructions": "gspo_jax.tasks.instructions.follows",
  "judge": "gspo_jax.rewards.judge.JUDGE",
  "length": "gspo_jax.rewards.length.short",
  "math": "gspo_jax.rewards.math.equivalent",
  "number": "gspo_jax.rewards.numbers.numbered",
  "overlong": "gspo_jax.rewards.length.OVERLONG",
}
_LENGTHS = ("tokens", "limit")
# Largest size of a reward: the sum of squares over a group stays finite in
# float32.
LARGEST = 1e9
# Positional parameter -> the trainer whose rewards have it. Our three arguments
# may fit such a reward by chance, with other meanings.
_OTHER_TRAINERS = {
  "solution_str": "verl: call it in a reward (prompt, response, reference, *, "
  "data_source, extra_info), which are columns of the data",
  "completions": "TRL: call it in a reward (prompt, responses, reference)",
}


class Response(NamedTuple):
  prompt: str  # what the policy read
  text: str  # without its stop token
  reference: str  # the target, in the form that the rewards read
  tokens: int = 0  # length, stop token included
  limit: int = 0  # the largest length allowed, in tokens
  columns: Mapping[str, Any] = {}  # other columns of the problem's record
  problem: Any = None  # the `data.problem.Problem`, for a reward model
  step: int = 0  # the iteration that took the prompt; 0 in an evaluation

  def to(self, problem) -> "Response":
    return self._replace(
      prompt=problem.text, reference=problem.reference, columns=problem.columns
    )


EXAMPLE = Response("What is 1+2?", "1+2=3\n#### 3", "3", tokens=8, limit=64)


@dataclasses.dataclass(frozen=True)
class Reward:
  """A function of a prompt, a response and a reference, and what it needs.

  A plain function is a reward without needs. For a function with needs, its
  module has a `Reward(function, prepare=...)`, which the config names instead.
  """

  # (prompt, response, reference) -> float, or (prompt, responses, reference) of
  # a group -> a float for each. Its keywords are columns of the problem's
  # record, `tokens`, `limit`, `step` and `workdir`.
  function: Callable[..., Any]
  # (**arguments), called once at the start; raises UserError if the reward
  # cannot run (a missing package, a bad argument).
  prepare: Callable[..., None] | None = None
  # (seconds, **arguments), as `prepare`, with the time limit of a call.
  fits: Callable[..., None] | None = None
  # (**arguments) -> required columns that it reads from `**columns`.
  columns: Callable[..., Sequence[str]] | None = None
  # Set by `named`: the config's name without arguments, and the keyword
  # arguments that it sets; for a built-in reward, also all defaults.
  name: str = ""
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  workdir: str = ""

  def __call__(self, prompt, response, reference, **keywords):
    keywords = {**self._given, **keywords}
    return self.function(prompt, response, reference, **keywords)

  @functools.cached_property
  def is_async(self) -> bool:
    functions = self.function, type(self.function).__call__
    return any(map(inspect.iscoroutinefunction, functions))

  @functools.cached_property
  def takes_group(self) -> bool:
    return self._positional[1:2] == ("responses",)

  @functools.cached_property
  def needed_columns(self) -> tuple[str, ...]:
    known = *_LENGTHS, "step"
    return tuple(name for name in self._required if name not in known)

  @functools.cached_property
  def reads_columns(self) -> bool:
    return self._takes_rest or not {*self._keywords} <= {*_LENGTHS}

  def keywords(self, responses: Sequence[Response]) -> dict[str, Any]:
    """Columns and lengths for a call; LookupError if a column is missing.

    `responses` are to one problem: all of them if `takes_group`, else one.
    """
    if not (self._keywords or self._takes_rest):
      return {}  # most rewards, and 20,000 times a second
    columns = responses[0].columns
    if missing := missing_column(self.needed_columns, columns):
      raise LookupError(missing)
    tokens = [response.tokens for response in responses]
    lengths = {
      "tokens": tokens if self.takes_group else tokens[0],
      "limit": responses[0].limit,
    }
    names = self._keywords
    if self._takes_rest:
      taken = {*self._positional, *self._given, *lengths}
      names += tuple(columns.keys() - taken)
    # A column may have the name `step`, which the run gives, too.
    available = {"step": responses[0].step} | {**columns, **lengths}
    return {name: available[name] for name in names if name in available}

  def check(self) -> None:
    signature = inspect.signature(self.function)
    for parameter in _OTHER_TRAINERS.keys() & {*self._positional}:
      raise errors.UserError(
        f"reward {self.name!r} takes {signature}, as in "
        f"{_OTHER_TRAINERS[parameter]}"
      )
    keywords = dict.fromkeys(self._required, 0)
    try:
      signature.bind("", "", "", **{**self._given, **keywords})
    except TypeError as e:
      raise errors.UserError(
        f"reward {self.name!r} takes {signature}: expected "
        "(prompt, response, reference) or (prompt, responses, reference), and "
        "behind a *, by keyword only, columns of the data, tokens, limit, "
        f"step, workdir or what '{self.name}:key=value' sets: {e}"
      ) from e

  @functools.cached_property
  def _parameters(self) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(self.function).parameters.values())

  @functools.cached_property
  def _positional(self) -> tuple[str, ...]:
    return tuple(
      p.name
      for p in self._parameters
      if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )

  @functools.cached_property
  def _given(self) -> Mapping[str, Any]:
    """Keyword arguments that are the same in each call."""
    takes = "workdir" in spec.keywords(self.function)
    return ({"workdir": self.workdir} if takes else {}) | {**self.arguments}

  @functools.cached_property
  def _free(self) -> dict[str, inspect.Parameter]:
    keywords = spec.keywords(self.function).items()
    return {name: p for name, p in keywords if name not in self._given}

  @functools.cached_property
  def _required(self) -> tuple[str, ...]:
    """Keywords without a value: columns, `tokens`, `limit` and `step`."""
    names = [name for name, p in self._free.items() if p.default is p.empty]
    return (*names, *(self.columns(**self.arguments) if self.columns else ()))

  @functools.cached_property
  def _keywords(self) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*self._required, *self._free)))

  @functools.cached_property
  def _takes_rest(self) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in self._parameters)


def named(text: str, seconds: float | None = None, workdir: str = "") -> Reward:
  """The reward that a config names, checked and prepared.

  Args:
    text: `name` or `name:key=value,key=value`. The name is one of `BUILT_IN` or
      `package.module.name` of a function or a `Reward`; the keys are its
      keyword-only arguments.
    seconds: time limit of one call; None: no limit.
    workdir: the run's folder, for a function with this keyword.
  """
  name, colon, arguments = text.partition(":")
  reward = spec.imported(name, BUILT_IN)
  if inspect.isclass(reward):
    raise errors.UserError(
      f"reward {name!r} is a class: expected a function or an instance, such "
      f"as {reward.__name__.lower()} = {reward.__name__}(...) in its module"
    )
  if not isinstance(reward, Reward):
    for attribute in ("prepare", "fits", "columns"):
      if hasattr(reward, attribute):
        raise errors.UserError(
          f"reward {name!r}: a function's attribute {attribute!r} is not read: "
          f"expected a Reward(function, {attribute}=...) by that name"
        )
    reward = Reward(reward)
  values = spec.arguments(name, reward.function, arguments) if colon else {}
  if name in BUILT_IN:
    # Set them all: no column of the same name may replace a default.
    keywords = spec.keywords(reward.function).items()
    defaults = {k: p.default for k, p in keywords if p.default is not p.empty}
    values = defaults | values
  if reward.prepare:
    reward.prepare(**values)
  if reward.fits and seconds is not None:
    reward.fits(seconds, **values)
  reward = dataclasses.replace(
    reward, name=name, arguments=values, workdir=workdir
  )
  reward.check()
  return reward


def missing_column(needed: Iterable[str], columns: Mapping[str, Any]) -> str:
  """The error if a problem lacks one of these columns; else ""."""
  for name in needed:
    if name not in columns:
      hint = errors.nearest(name, columns) if columns else "it has none"
      return f"the problem has no column {name!r}: {hint}"
  return ""


class Needs(NamedTuple):
  group: bool
  columns: tuple[str, ...]
  reads_columns: bool


class Outcome(NamedTuple):
  """What a reward returned for a response, or why it failed."""

  value: float | None  # None without a failure: the reward is left out
  failure: str | None = None
  is_wrong_type: bool = False

  @property
  def part(self) -> float:
    """The value; 0 for a failure, NaN for a reward that is left out."""
    if self.value is None:
      return 0.0 if self.failure else math.nan
    return self.value


def load(names: Sequence[str], workdir: str, seconds: float):
  """The rewards as tasks of `workers.pool`, and the `Needs` of each.

  A task takes a group or one response and returns an `Outcome` for each.
  """
  rewards = [named(name, seconds, workdir) for name in names]
  needs = [
    Needs(r.takes_group, r.needed_columns, r.reads_columns) for r in rewards
  ]
  return [_task(reward) for reward in rewards], needs


def _task(reward: Reward) -> Callable[[Sequence[Response]], Any]:
  def begin(responses):
    prompt, text, reference, *_ = responses[0]
    if reward.takes_group:
      text = [response.text for response in responses]
    return reward(prompt, text, reference, **reward.keywords(responses))

  def outcomes(value, responses):
    if not reward.takes_group:
      return [_outcome(value)]
    count = len(responses)
    is_list = hasattr(value, "__len__") and not isinstance(value, str | dict)
    if is_list and len(value) == count:
      return list(map(_outcome, value))
    got = f"{len(value)} of them" if is_list else type(value).__name__
    failure = (
      f"expected a list of floats, {count} for as many responses, got {got}"
    )
    return [Outcome(None, failure, True)] * count

  def call(responses):
    value = begin(responses)
    if inspect.iscoroutine(value):
      value = asyncio.run(value)
    return outcomes(value, responses)

  async def call_async(responses):
    return outcomes(await begin(responses), responses)

  return call_async if reward.is_async else call


def _outcome(value) -> Outcome:
  if value is None:
    return Outcome(None)
  if not hasattr(value, "__float__"):  # float() also takes strings
    failure = f"expected a number, got {type(value).__name__}"
    return Outcome(None, failure, True)
  try:
    number = float(value)
  except Exception as e:
    return Outcome(None, ascii(f"{type(e).__name__}: {e}"[:300])[1:-1])
  if not abs(number) <= LARGEST:  # NaN too
    return Outcome(None, f"expected a number up to 1e9, got {number}")
  return Outcome(number)
