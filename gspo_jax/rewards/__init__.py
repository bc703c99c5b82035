"""Rewards: a prompt, a response and its reference in, a float out.

A reward is any function of these three. Name it in `reward.names` as
`package.module.function`, or `package.module.function:key=value,key=value` to
set its keyword-only arguments:

  def reward(prompt, response, reference) -> float

  prompt     what the policy read, with its chat template
  response   what the policy wrote, without its stop token
  reference  the target, from the column `data.reference_field`

By keyword only (after a `*`) a reward asks for more:

  def reward(prompt, response, reference, *, difficulty, tokens, limit)

  difficulty  any other column of the problem's record, by its name. One with a
              default value is optional. `**columns` gets all other columns.
              What the reward's spec sets ('name:difficulty=3') is not a column.
  tokens      length of the response in tokens, stop token included
  limit       the largest length allowed, in tokens

A reward whose second parameter is named `responses` gets all responses to a
problem (the group; in an evaluation, the samples), and returns a list with one
float for each, in their order. `tokens` is then a list, too. A group may have
one response: greedy evaluation samples one.

  def reward(prompt, responses, reference) -> list[float]

Any of these may be an `async def`: a worker process then runs up to
`reward.concurrency` calls at once, so that they wait for a server together. An
`async` reward must not block; wrap what blocks in `asyncio.to_thread`, which
has as many threads. Other rewards are called one at a time. `reward.seconds` is
the time for one call, of a response or of a group.

Rewards run in processes of their own, of which memory and time are limited;
files and network are not. A process forks for each batch of calls, so that
global variables start anew, and connections are not kept. A call that raises,
takes too long or returns no finite number costs its response, or its group:
`reward/failed` counts it. Before training each reward is called on an example
with the columns of the data, and a mistaken signature, a missing column or a
wrong type of result ends the command.

A reward may carry functions as attributes:

  prepare(**arguments)        called once at the start with the arguments of the
                              reward's spec (of a built-in reward, with all that
                              have a default); raises UserError if the reward
                              cannot run (a missing package, a bad argument)
  fits(seconds, **arguments)  as `prepare`, with the time limit of one call
  columns(**arguments)        the names of columns that it reads out of
                              `**columns`; they must be there

  convert(value)              what the caller of `RewardPool.submit` finds in
                              `Pending.calls` in place of a float; of JSON. Only
                              `rollout.environment` has one

Other wings take `named`, `inputs`, `final_answer`, `gsm8k` and `BUILT_IN` from
here, `pool` (runs rewards in worker processes), `math` and `numbers` (results
in a normal form), `code` and `sandbox` (programs of a policy, and where they
run), `sandbox_files` (what they may read).
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gspo_jax.rewards.numbers import final_answer, gsm8k
from gspo_jax.runtime import errors
from gspo_jax.runtime.spec import arguments, imported, keywords

__all__ = (
  "BUILT_IN",
  "code",
  "config",
  "final_answer",
  "gsm8k",
  "inputs",
  "math",
  "named",
  "numbers",
  "pool",
  "sandbox",
  "sandbox_files",
)

BUILT_IN = {
  "code": "gspo_jax.rewards.code.passes",
  "final_answer": "gspo_jax.rewards.numbers.final_answer",
  "format": "gspo_jax.rewards.format.thinks",
  "gsm8k": "gspo_jax.rewards.numbers.gsm8k",
  "instructions": "gspo_jax.tasks.instructions.follows",
  "judge": "gspo_jax.rewards.judge.score",
  "length": "gspo_jax.rewards.length.short",
  "math": "gspo_jax.rewards.math.equivalent",
  "number": "gspo_jax.rewards.numbers.numbered",
  "overlong": "gspo_jax.rewards.length.overlong",
}
_LENGTHS = ("tokens", "limit")
# By a positional parameter, the trainer whose rewards have it. Three arguments
# may fit such a reward by chance, and mean other things.
_OF_OTHERS = {
  "solution_str": "verl: call it in a reward (prompt, response, reference, *, "
  "data_source, extra_info), which are columns of the data",
  "completions": "TRL: call it in a reward (prompt, responses, reference)",
}


def named(spec: str, within: float | None = None) -> functools.partial:
  """The reward that a config names, ready to be called.

  Args:
    spec: `name` or `name:key=value,key=value`. The name is one of `BUILT_IN` or
      `package.module.function`; the keys are its keyword-only arguments.
    within: seconds that one call may take; None for no limit.

  Raises:
    UserError: no reward has that name, its module does not import, it does not
      take those arguments, its `prepare` or `fits` failed, or it cannot be
      called as a reward.
  """
  name, colon, text = spec.partition(":")
  function = imported(name, BUILT_IN)
  if inspect.isclass(function):
    raise errors.UserError(
      f"reward {name!r} is a class: expected a function or an instance, such "
      f"as {function.__name__.lower()} = {function.__name__}(...) in its module"
    )
  given = arguments(name, function, text) if colon else {}
  if name in BUILT_IN:
    # Set, so that no column that happens to have such a name replaces them.
    given = _defaults(function) | given
  prepare = getattr(function, "prepare", None)
  if prepare:
    prepare(**given)
  fits = getattr(function, "fits", None)
  if fits and within is not None:
    fits(within, **given)
  reward = functools.partial(function, **given)
  _require_call(name, reward)
  return reward


class Inputs(NamedTuple):
  """What a reward takes beside the prompt, the response and the reference.

  Attributes:
    group: whether it takes all responses to a problem at once.
    required: its keywords without a default that its spec does not set: columns
      of the problem's record, `tokens` and `limit`.
    optional: its keywords with a default that its spec does not set.
    rest: whether it takes all other columns, as `**columns`.
    taken: names that a column cannot be passed by: those of the positional
      arguments, and what the spec sets.
  """

  group: bool
  required: tuple[str, ...]
  optional: tuple[str, ...]
  rest: bool
  taken: frozenset[str]

  @property
  def columns(self) -> tuple[str, ...]:
    """The columns that every problem must have."""
    return tuple(name for name in self.required if name not in _LENGTHS)

  @property
  def reads_columns(self) -> bool:
    """Whether it may read a column."""
    return self.rest or not {*self.required, *self.optional} <= {*_LENGTHS}

  def keywords(self, responses: Sequence) -> dict[str, Any]:
    """The keyword arguments of a call.

    Args:
      responses: `pool.Response`s to one problem: all of them for a reward that
        takes a group, else one.

    Raises:
      LookupError: the problem lacks a column.
    """
    if not (self.required or self.optional or self.rest):
      return {}  # most rewards, and 20,000 times a second
    columns = responses[0].columns
    if missing := missing_column(self.columns, columns):
      raise LookupError(missing)
    tokens = [response.tokens for response in responses]
    lengths = {
      "tokens": tokens if self.group else tokens[0],
      "limit": responses[0].limit,
    }
    named = (*self.required, *self.optional)
    if self.rest:
      named += tuple(columns.keys() - self.taken - lengths.keys())
    available = {**columns, **lengths}
    return {name: available[name] for name in named if name in available}


def inputs(reward: functools.partial) -> Inputs:
  """What a reward of `named` takes."""
  parameters = inspect.signature(reward.func).parameters.values()
  positional = [
    p.name
    for p in parameters
    if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
  ]
  free = [
    p
    for p in parameters
    if p.kind is p.KEYWORD_ONLY and p.name not in reward.keywords
  ]
  required = [p.name for p in free if p.default is p.empty]
  if columns := getattr(reward.func, "columns", None):
    required += columns(**reward.keywords)
  return Inputs(
    group=positional[1:2] == ["responses"],
    required=tuple(required),
    optional=tuple(p.name for p in free if p.default is not p.empty),
    rest=any(p.kind is p.VAR_KEYWORD for p in parameters),
    taken=frozenset(positional) | reward.keywords.keys(),
  )


def missing_column(needed: Iterable[str], columns: Mapping[str, Any]) -> str:
  """The error message if a problem lacks one of these columns; else ""."""
  for name in needed:
    if name not in columns:
      hint = errors.nearest(name, columns) if columns else "it has none"
      return f"the problem has no column {name!r}: {hint}"
  return ""


def _require_call(name: str, reward: functools.partial) -> None:
  """UserError unless the pool's call fits the signature of the reward."""
  takes = inputs(reward)
  signature = inspect.signature(reward.func)
  for other in _OF_OTHERS.keys() & takes.taken - reward.keywords.keys():
    raise errors.UserError(
      f"reward {name!r} takes {signature}, as in {_OF_OTHERS[other]}"
    )
  keywords = dict.fromkeys(takes.required, 0)
  try:
    inspect.signature(reward).bind("", "", "", **keywords)
  except TypeError as e:
    raise errors.UserError(
      f"reward {name!r} takes {signature}: expected "
      "(prompt, response, reference) or (prompt, responses, reference), and "
      "behind a *, by keyword only, columns of the data, tokens, limit or what "
      f"'{name}:key=value' sets: {e}"
    ) from e


def _defaults(function: Callable[..., float]) -> dict[str, Any]:
  """The keyword-only arguments that have a default, with it."""
  found = keywords(function).items()
  return {n: p.default for n, p in found if p.default is not p.empty}
