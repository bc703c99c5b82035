"""Conversations: responses of several turns, with an environment between them.

A conversation is one row of samples: the response of turn 1, the tokens of the
environment's messages, the response of turn 2, and so on, up to
`sampler.max_new_tokens` tokens. `Samples.turns` says who wrote a token.

All conversations take a turn together: one call of the sampler samples the
responses, the next call goes on from the environments' answers. An environment
is asked as soon as its response is there, while others decode; one whose `step`
is `async` is asked about all at once.
"""

import dataclasses
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.data.problem import Problem
from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.record.progress import Progress
from gspo_jax.rewards.pool import Response, RewardPool
from gspo_jax.rollout import environment, scoring
from gspo_jax.rollout.environment import Message
from gspo_jax.rollout.scoring import ComputedRewards, Rewards
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous import ContinuousSampler, PrefixCache
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  FinishedResponse,
  Prompts,
  Samples,
)
from gspo_jax.sampler.stop_strings import StopStrings, response_text

_MAX_REASONS = 3  # for failures, of this host
# The one reward of conversations, and what is counted in each.
REWARD = "environment"
COUNTS = ("turns", "tool_calls", "tool_errors")


class Reply(NamedTuple):
  """The answer of an environment to one call.

  Attributes:
    state: the environment after the call, for the next one.
    messages: what the policy reads next.
    done: whether the conversation has ended.
    reward: of the response.
    tool_calls: tools that the response called.
    tool_errors: of them, those that failed.
    failure: why the call failed; "" if it did not.
  """

  state: str = ""
  messages: Sequence[Message] = ()
  done: bool = True
  reward: float = 0.0
  tool_calls: int = 0
  tool_errors: int = 0
  failure: str = ""


class EnvironmentPool:
  """Worker processes that run environments; a context manager.

  Attributes:
    is_async: whether `step` is `async`; such calls run at once only if they are
      started together.

  Args:
    spec: of the environment, as `environment.named` reads it.
    examples: problems; a conversation about each is begun, to try the
      environment.
    **limits: `workers`, `seconds`, `memory` and `concurrency` of a RewardPool.

  Raises:
    UserError: there is no such environment, or its `reset` fails on an example.
  """

  def __init__(self, spec: str, *, examples: Sequence[Problem] = (), **limits):
    self._spec = spec
    step = environment.named(spec).func.step
    self.is_async = inspect.iscoroutinefunction(step)
    name = environment.reward_spec(spec)
    self._pool = RewardPool((name,), (1.0,), examples=(), **limits)
    self._prefix = name.partition(":")[0] + ": "
    begun = self.run([_to_begin(problem, 0) for problem in examples])
    for problem, reply in zip(examples, begun, strict=True):
      if reply.failure:
        self.close()
        raise UserError(
          f"{reply.failure}, in reset of the problem {problem.text[:40]!r}"
        )

  def run(self, calls: Sequence[Response]) -> list[Reply]:
    """Makes these calls, of `begin` or `step`; waits for all of them."""
    return self.start(calls)()

  def start(self, calls: Sequence[Response]) -> Callable[[], list[Reply]]:
    """Starts these calls; the result waits for all of them."""
    pending = self._pool.submit(calls).calls
    return lambda: [
      self._reply(call) for unit in pending.result() for (call,) in unit
    ]

  def _reply(self, call) -> Reply:
    if call.failure is None:
      messages = tuple(map(tuple, call.value["messages"]))
      return Reply(**call.value | {"messages": messages})
    reason = call.failure.removeprefix(self._prefix)
    return Reply(failure=f"environment {self._spec!r}: {reason}")

  def close(self) -> None:
    """Ends the workers."""
    self._pool.close()

  def __enter__(self) -> "EnvironmentPool":
    return self

  def __exit__(self, *_) -> None:
    self.close()


def _to_begin(problem, seed: int) -> Response:
  """The call that begins a conversation about a problem."""
  columns = {"columns": dict(problem.columns), "seed": seed}
  return Response("", problem.text, problem.reference, columns=columns)


def _to_step(state: str, text: str) -> Response:
  """The call with a response."""
  return Response(state, text, "")


def _reason(error: Exception) -> str:
  """Why messages of an environment did not become tokens."""
  if isinstance(error, UserError):
    return str(error)
  return f"messages of the environment: {type(error).__name__}: {error}"


@dataclasses.dataclass
class _Conversation:
  """One conversation of this host.

  Attributes:
    state: of its environment.
    text: all responses and messages so far, for people.
    rewards: of its turns.
    tool_calls: of all turns.
    tool_errors: of all turns.
    failure: why a call failed; "" if none did.
  """

  state: str = ""
  text: str = ""
  rewards: list[float] = dataclasses.field(default_factory=list)
  tool_calls: int = 0
  tool_errors: int = 0
  failure: str = ""

  def add(self, response: str, reply: Reply) -> None:
    """A response and its reply."""
    self.text += response
    self.rewards.append(reply.reward)
    self.tool_calls += reply.tool_calls
    self.tool_errors += reply.tool_errors
    self.failure, self.state = reply.failure, reply.state
    if not reply.done:
      said = [f"\n[{role}] {text}" for role, text in reply.messages]
      self.text += "".join(said) + "\n"


class SampledConversations(NamedTuple):
  """P * G conversations.

  Attributes:
    prompts: the batch, with the prompts that the environments began with.
    samples: with `turns`.
    responses: of this host, by row: their text is the whole conversation.
    rewards: of all hosts.
    counts: [B] each, by the names of `COUNTS`.
    turn_rewards: [B, max_turns] float32, NaN for turns that were not taken.
    seconds: that the devices waited for environments.
  """

  prompts: PromptBatch
  samples: Samples
  responses: Mapping[int, Response]
  rewards: ComputedRewards
  counts: dict[str, np.ndarray]
  turn_rewards: np.ndarray
  seconds: float


@dataclasses.dataclass(frozen=True)
class Conversations:
  """Samples conversations.

  Attributes:
    pool: runs the environments.
    max_turns: responses of a conversation at most.
    prompt_config: how messages become tokens.
    batch_sharding: of arrays whose first axis is the batch.
    stop: the stop strings of the sampler; None: there are none.
  """

  pool: EnvironmentPool
  max_turns: int
  prompt_config: PromptConfig
  batch_sharding: jax.sharding.Sharding
  stop: StopStrings | None

  def __call__(
    self,
    generate: ContinuousSampler,
    params: model.Params,
    batch: PromptBatch,
    key: jax.Array,
    *,
    what: str,
  ) -> SampledConversations:
    """G conversations about each of P problems; call it on every process.

    Token t of row b is sampled with a key made of (key, b, t), as in a single
    turn; the seed of an environment is made of the key and the problem.

    Args:
      generate: samples G responses to each prompt.
      params: of the policy.
      batch: P prompts of a `Curriculum` or of `pipeline.take`.
      key: a typed PRNG key, on any devices.
      what: is done, for the log.

    """
    P, G = len(batch), generate.config.group_size
    B, R = P * G, generate.config.max_new_tokens
    # The rows whose responses the sampler reports on this host.
    like = multihost.to_global(np.zeros(B, np.int8), generate.batch_sharding)
    chats = {row: _Conversation() for row in multihost.local_rows(like)}
    clock = _Clock()
    with clock, Progress(f"{what}, the environment's prompts"):
      batch = self._begin(batch, chats, G, key)
    key = sharding.key_beside(self.batch_sharding, key)
    prompts = Prompts(batch.tokens, batch.lengths)
    prompts = multihost.to_global(prompts, self.batch_sharding)
    turns, turn_rewards = np.zeros((B, R), np.int16), []
    active, before = np.ones(B, bool), np.zeros(B, np.int32)
    column, slot_steps, samples = np.arange(R), 0, None
    prefix_cache = PrefixCache()
    for turn in range(1, self.max_turns + 1):
      line = f"{what}, turn {turn}" if turn > 1 else what
      asked = {row: chats[row] for row in chats if active[row]}
      answers = _Answers(self, asked, before)
      with Progress(line, int(active.sum()), "responses") as progress:
        samples = generate(
          params,
          prompts,
          key,
          resume_from=samples,
          turn_start=before,
          prefix_cache=prefix_cache,
          on_finished=answers.ask,
          progress=progress,
        )
      slot_steps += int(samples.slot_steps)
      lengths, finish = multihost.to_host((samples.lengths, samples.finish))
      is_new = (column >= before[:, None]) & (column < lengths[:, None])
      turns[is_new & active[:, None]] = turn
      with clock, Progress(f"{line}, the environment's answers"):
        is_read = (finish == STOPPED) & (turn < self.max_turns)
        ids, goes_on = answers.wait(is_read)
      turn_rewards.append(
        self._gather({row: chat.rewards[-1] for row, chat in asked.items()}, B)
      )
      tokens, counts = self._gather_ids(ids, B, R)
      answered = self._gather(dict.fromkeys(goes_on, 1.0), B) > 0
      answered &= finish == STOPPED
      has_room = lengths + counts < R  # for a token
      active = answered & has_room & (turn < self.max_turns)
      finish = np.where(answered, TRUNCATED, finish)
      finish = np.where(active, UNFINISHED, finish).astype(np.int8)
      counts = np.where(active, counts, 0)
      before = lengths + counts
      samples = generate.append_tokens(samples, tokens, counts, finish)
      if not active.any():
        break
    samples = dataclasses.replace(
      samples,
      turns=self._global(turns),
      slot_steps=multihost.to_global(
        np.int32(slot_steps), samples.slot_steps.sharding
      ),
    )
    counts = {
      "turns": turns.max(1).astype(np.float32),
      "tool_calls": self._gather_of(chats, B, lambda chat: chat.tool_calls),
      "tool_errors": self._gather_of(chats, B, lambda chat: chat.tool_errors),
    }
    failed = self._gather_of(chats, B, lambda chat: bool(chat.failure)) > 0
    return SampledConversations(
      batch,
      samples,
      _responses(batch, chats, before, G, R),
      self._rewards(chats, failed, G),
      counts,
      self._turn_rewards(turn_rewards, turns.max(1), failed, G),
      clock.seconds,
    )

  def _begin(self, batch, chats, G: int, key) -> PromptBatch:
    """Begins the conversations of this host; the batch with their prompts."""
    problems = batch.problems
    # No row has this number, so no response has its key.
    k_seed = jax.random.fold_in(key, np.uint32(2**32 - 1))
    seeds = np.asarray(jax.random.bits(k_seed, (len(problems),), np.uint32))
    calls = [
      _to_begin(problems[row // G], int(seeds[row // G])) for row in chats
    ]
    prompts = {}  # of this host, where an environment has one
    for row, reply in zip(chats, self.pool.run(calls), strict=True):
      chats[row].state, chats[row].failure = reply.state, reply.failure
      if not reply.failure:
        prompts.setdefault(row // G, set()).add(reply.messages)
    own = {}
    for p, choices in prompts.items():
      try:
        ids = self._prompt(choices)
      except Exception as error:  # no process may raise alone
        for row in chats:
          if row // G == p:
            chats[row].failure = chats[row].failure or _reason(error)
      else:
        if ids:
          own[p] = ids
    if not multihost.any_process(bool(own)):
      return batch
    tokens, lengths = batch.tokens.copy(), batch.lengths.copy()
    mine = np.zeros((len(problems), 1 + tokens.shape[1]), np.int32)
    for p, ids in own.items():
      mine[p, 0], mine[p, tokens.shape[1] - len(ids) + 1 :] = len(ids), ids
    every = multihost.sum_of_all(mine)
    new = every[:, 0] > 0
    lengths[new] = every[new, 0]
    pad = np.arange(tokens.shape[1]) < tokens.shape[1] - lengths[:, None]
    ids = np.where(pad, self.prompt_config.tokenizer.pad_id, every[:, 1:])
    tokens[new] = ids[new]
    return dataclasses.replace(batch, tokens=tokens, lengths=lengths)

  def _prompt(self, choices) -> list[int]:
    """The ids of the prompt with which the environments of a group began.

    Args:
      choices: what their `reset` gave, a set.

    Returns:
      The ids; none, if the prompt is that of the data.

    Raises:
      UserError: they differ, are no prompt, or are too long.
    """
    cfg = self.prompt_config
    if len(choices) > 1:
      raise UserError(
        "the environment began with several prompts for one problem: "
        "expected reset(problem, seed) to depend on these two alone"
      )
    (messages,) = choices
    if not messages:
      return []
    history, system = list(messages), cfg.system
    if history[0][0] == "system":
      _, system = history.pop(0)
    if not history or history[-1][0] != "user":
      raise UserError(
        "reset of the environment: expected messages that end with one of "
        f"the user, got roles {[role for role, _ in messages]}"
      )
    ids = cfg.tokenizer.prompt(history.pop()[1], system, history)
    if len(ids) > cfg.width:
      raise UserError(
        f"the environment's prompt {messages[-1][1][:40]!r} has {len(ids)} "
        f"tokens, more than data.max_prompt_length={cfg.width}"
      )
    return ids

  def _gather_ids(self, ids, B: int, R: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids [B, R] int32 of all hosts, cut at R, and their counts [B]."""
    counts = self._gather({row: len(x) for row, x in ids.items()}, B)
    counts = counts.astype(np.int32)
    width = min(int(counts.max(initial=0)), R)
    mine = np.zeros((B, width), np.int32)
    for row, values in ids.items():
      mine[row, : len(values)] = values[:width]
    return np.pad(multihost.sum_of_all(mine), ((0, 0), (0, R - width))), counts

  def _gather(self, values: Mapping[int, float], B: int) -> np.ndarray:
    """[B] float32 of all hosts; 0 for rows without a value."""
    mine = np.zeros(B, np.float32)
    for row, value in values.items():
      mine[row] = value
    return multihost.sum_of_all(mine)

  def _gather_of(self, chats, B: int, value) -> np.ndarray:
    return self._gather({row: value(chat) for row, chat in chats.items()}, B)

  def _rewards(self, chats, failed_B, G: int) -> ComputedRewards:
    sums = self._gather_of(chats, len(failed_B), lambda chat: sum(chat.rewards))
    total = scoring.pay_failures_least(sums[:, None], failed_B, G).reshape(
      -1, G
    )
    reasons = dict.fromkeys(t.failure for t in chats.values() if t.failure)
    return ComputedRewards(
      Rewards(
        total=total,
        parts={REWARD: total},
        failed=failed_B.reshape(-1, G),
        reasons=tuple(reasons)[:_MAX_REASONS],
      )
    )

  def _turn_rewards(self, rewards, taken_B, failed_B, G: int) -> np.ndarray:
    """[B, max_turns] float32, NaN for turns that were not taken.

    Args:
      rewards: [B] of each turn that some conversation took.
      taken_B: turns of each conversation.
      failed_B: whether a conversation failed.
      G: conversations of a group.
    """
    rewards_BT = np.full((len(taken_B), self.max_turns), np.nan, np.float32)
    rewards_BT[:, : len(rewards)] = np.transpose(rewards)
    taken_BT = np.arange(self.max_turns) < taken_B[:, None]
    rewards_BT = np.where(taken_BT, rewards_BT, np.nan)
    return scoring.pay_failures_least(rewards_BT, failed_B, G)

  def _global(self, array: np.ndarray) -> jax.Array:
    return multihost.to_global(array, self.batch_sharding)


class _Answers:
  """What the environments of this host answer to the responses of a turn.

  Args:
    conversations: with the pool, the tokenizer and the stop strings.
    asked: the conversations of this turn, by row.
    before: [B], the tokens of all conversations before it.
  """

  def __init__(
    self,
    conversations: Conversations,
    asked: Mapping[int, _Conversation],
    before: np.ndarray,
  ):
    self._pool, self._stop = conversations.pool, conversations.stop
    self._tokenizer = conversations.prompt_config.tokenizer
    self._asked, self._before = asked, before
    self._texts: dict[int, str] = {}
    self._has_stop_token: dict[int, bool] = {}
    self._waiting: list[int] = []
    self._started: list[tuple[list[int], Callable[[], list[Reply]]]] = []

  def ask(self, finished: Mapping[int, FinishedResponse]) -> None:
    """Asks about these responses, by row; each row once."""
    stop = self._stop
    for row, response in finished.items():
      # A stop string must not begin before the turn.
      new = response.tokens[self._before[row] : response.length].tolist()
      has_token = new[-1] in self._tokenizer.stop_ids
      stopped = has_token or (stop is not None and stop.ended(new))
      self._texts[row] = response_text(new, stopped, self._tokenizer, stop)
      self._has_stop_token[row] = has_token
      if not self._asked[row].failure:
        self._waiting.append(row)
    if not self._pool.is_async:
      self._start()

  def _start(self) -> None:
    rows, self._waiting = self._waiting, []
    if not rows:
      return
    calls = [_to_step(self._asked[row].state, self._texts[row]) for row in rows]
    self._started.append((rows, self._pool.start(calls)))

  def wait(self, is_read: np.ndarray) -> tuple[dict[int, list[int]], list[int]]:
    """Adds responses and answers to the conversations; all were asked.

    Args:
      is_read: [B] bool, whether the policy may read the answer.

    Returns:
      The ids behind the response, by row, where the policy reads them; and the
      rows whose conversation goes on for its environment.
    """
    self._start()
    replies, ids, goes_on = {}, {}, []
    for rows, result in self._started:
      replies |= zip(rows, result(), strict=True)
    for row, chat in self._asked.items():
      reply = replies.get(row) or Reply(failure=chat.failure)
      if not reply.done and is_read[row]:
        try:
          ids[row] = self._tokenizer.turn(
            reply.messages, stopped=self._has_stop_token[row]
          )
        except Exception as error:  # no process may raise alone
          reply = reply._replace(done=True, failure=_reason(error))
      if not reply.done:
        goes_on.append(row)
      chat.add(self._texts[row], reply)
    return ids, goes_on


class _Clock:
  """Adds up the seconds inside its contexts."""

  def __init__(self):
    self.seconds = 0.0

  def __enter__(self) -> None:
    self.seconds -= time.monotonic()

  def __exit__(self, *_) -> None:
    self.seconds += time.monotonic()


def _responses(batch, chats, lengths, G, R) -> dict[int, Response]:
  problems = batch.problems
  return {
    row: Response(
      problems[row // G].text,
      chat.text,
      problems[row // G].reference,
      int(lengths[row]),
      R,
      problems[row // G].columns,
    )
    for row, chat in chats.items()
  }
