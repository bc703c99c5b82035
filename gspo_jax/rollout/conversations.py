"""Conversations: an environment answers between the responses of the policy.

A conversation is one row of samples: the response of turn 1, the tokens of the
environment's messages, the response of turn 2, and so on, up to
`sampler.max_new_tokens` tokens. `Samples.turns` says who wrote a token.

All conversations take a turn together, in one call of the sampler. An
environment gets a response at once, while others decode; if `step` is `async`,
all get their responses together.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.data.tokenizers.base import Turn, as_messages
from gspo_jax.record.progress import Progress
from gspo_jax.rewards.pool import PendingRewards, Rewards
from gspo_jax.rewards.reward import Response
from gspo_jax.rollout import scoring
from gspo_jax.rollout.batch import ScoredSamples, prompts_on_device
from gspo_jax.rollout.environment_pool import EnvironmentPool, Reply
from gspo_jax.rollout.sequences import EpisodeSequence, SequenceLimits, arrange
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous import ContinuousSampler, PrefixCache
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  FinishedResponse,
  Samples,
)
from gspo_jax.sampler.stop_strings import StopStrings, response_text
from gspo_jax.workers.pool import Started

# The one reward of conversations.
REWARD = "environment"


def reason(error: Exception) -> str:
  if isinstance(error, UserError):
    return str(error)
  return f"messages of the environment: {type(error).__name__}: {error}"


@dataclasses.dataclass
class Conversation:
  state: str = ""  # of its environment
  text: str = ""  # all responses and messages so far, for people
  rewards: list[float] = dataclasses.field(default_factory=list)  # of turns
  tool_calls: int = 0
  tool_errors: int = 0
  failure: str = ""  # why a call failed; "" if none did

  def add(self, response: str, reply: Reply) -> None:
    step = reply.step
    self.text += response
    self.rewards.append(step.reward)
    self.tool_calls += step.tool_calls
    self.tool_errors += step.tool_errors
    self.failure, self.state = reply.failure, reply.state
    if not step.done:
      said = [f"\n[{role}] {text}" for role, text, *_ in step.messages]
      self.text += "".join(said) + "\n"


@dataclasses.dataclass(frozen=True)
class Conversations:
  pool: EnvironmentPool
  max_turns: int  # responses of a conversation at most
  prompt_config: PromptConfig  # how messages become tokens
  batch_sharding: jax.sharding.Sharding  # of arrays [B, ...]
  stop: StopStrings | None  # of the sampler

  def __call__(
    self,
    generate: ContinuousSampler,
    params: model.Params,
    batch: PromptBatch,
    key: jax.Array,
    *,
    label: str,
  ) -> ScoredSamples:
    """G conversations about each of P problems; call it on every process.

    The key of token t of row b is made of (key, b, t), as in a single turn; an
    environment's seed is made of the key and the problem.
    """
    P, G = len(batch), generate.config.group_size
    B, R = P * G, generate.config.max_new_tokens
    # The rows whose responses the sampler reports on this host.
    like = multihost.to_global(np.zeros(B, np.int8), generate.batch_sharding)
    chats = {row: Conversation() for row in multihost.local_rows(like)}
    start = time.monotonic()
    with Progress(f"{label}, the environment's prompts"):
      batch = self._begin(batch, chats, G, key)
    waited = time.monotonic() - start  # for environments
    key = sharding.key_beside(self.batch_sharding, key)
    prompts = prompts_on_device(batch, self.batch_sharding)
    turns = np.zeros((B, R), np.int16)
    active, before = np.ones(B, bool), np.zeros(B, np.int32)
    counts = np.zeros(B, np.int32)  # of the environment's newest tokens
    column, slot_steps, samples = np.arange(R), 0, None
    prefix_cache = PrefixCache()
    for turn in range(1, self.max_turns + 1):
      line = f"{label}, turn {turn}" if turn > 1 else label
      asked = {row: chats[row] for row in chats if active[row]}
      answers = _Answers(self, asked, before)
      with Progress(line, int(active.sum()), "responses") as progress:
        samples = generate(
          params,
          prompts,
          key,
          resume_from=samples,
          num_appended=counts,
          prefix_cache=prefix_cache,
          on_finished=answers.ask,
          progress=progress,
        )
      slot_steps += int(samples.slot_steps)
      lengths, finish = multihost.to_host((samples.lengths, samples.finish))
      is_new = (column >= before[:, None]) & (column < lengths[:, None])
      turns[is_new & active[:, None]] = turn
      start = time.monotonic()
      with Progress(f"{line}, the environment's answers"):
        is_read = (finish == STOPPED) & (turn < self.max_turns)
        ids, goes_on = answers.wait(is_read)
      waited += time.monotonic() - start
      tokens, counts = _gather_ids(B, R, ids)
      answered = _gather(B, dict.fromkeys(goes_on, 1.0)) > 0
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
      turns=multihost.to_global(turns, self.batch_sharding),
      slot_steps=multihost.to_global(
        np.int32(slot_steps), samples.slot_steps.sharding
      ),
    )
    return scored(
      batch,
      samples,
      chats,
      dict(zip(chats, before[[*chats]].tolist(), strict=True)),
      group_size=G,
      max_turns=self.max_turns,
      limit=R,
      environment_seconds=waited,
    )

  def state(self, scored: ScoredSamples) -> dict:
    """JSON for a checkpoint: fields that samples and data do not have."""
    prompts, rewards = scored.prompts, scored.rewards.result()
    return {
      "prompts": [prompts.ids(p) for p in range(len(prompts))],
      "rewards": rewards.total.tolist(),
      "failed": rewards.failed.tolist(),
      "conversation": {
        name: x.tolist() for name, x in scored.conversation.items()
      },
    }

  def restore(
    self, batch: PromptBatch, samples: Samples, state: dict
  ) -> ScoredSamples:
    """The scored samples of `state`; `batch` has the data's prompts."""
    tokenizer = self.prompt_config.tokenizer
    tokens, lengths = batch.tokens.copy(), batch.lengths.copy()
    for p, ids in enumerate(state["prompts"]):
      tokens[p] = tokenizer.pad_id
      tokens[p, tokens.shape[1] - len(ids) :] = ids
      lengths[p] = len(ids)
    batch = dataclasses.replace(batch, tokens=tokens, lengths=lengths)
    total = np.array(state["rewards"], np.float32)
    rewards = Rewards(total, {REWARD: total}, np.array(state["failed"]))
    return ScoredSamples(
      batch,
      samples,
      scoring.decode_responses(samples, batch, tokenizer, self.stop),
      PendingRewards.computed(rewards),
      {
        name: np.array(values, np.float32)
        for name, values in state["conversation"].items()
      },
    )

  def _begin(self, batch, chats, G: int, key) -> PromptBatch:
    """Begins this host's conversations; returns the batch with new prompts."""
    prompts = {}  # of this host, where an environment has one
    for row, reply in begin(self.pool, batch, chats, G, key).items():
      if not reply.failure:
        prompts.setdefault(row // G, set()).add(reply.step.messages)
    local = {}
    for p, choices in prompts.items():
      try:
        ids = self._prompt(choices)
      except Exception as error:  # no process may raise alone
        for row in chats:
          if row // G == p:
            chats[row].failure = chats[row].failure or reason(error)
      else:
        if ids:
          local[p] = ids
    if not multihost.any_process(bool(local)):
      return batch
    tokens, lengths = batch.tokens.copy(), batch.lengths.copy()
    width = tokens.shape[1]
    sent = np.zeros((len(batch), 1 + width), np.int32)
    for p, ids in local.items():
      sent[p, 0], sent[p, width - len(ids) + 1 :] = len(ids), ids
    everywhere = multihost.sum_of_all(sent)
    new = everywhere[:, 0] > 0
    lengths[new] = everywhere[new, 0]
    pad = np.arange(width) < width - lengths[:, None]
    ids = np.where(pad, self.prompt_config.tokenizer.pad_id, everywhere[:, 1:])
    tokens[new] = ids[new]
    return dataclasses.replace(batch, tokens=tokens, lengths=lengths)

  def _prompt(self, choices) -> list[int]:
    """The ids of a group's prompt; [] for the data's prompt.

    UserError if the environments gave several prompts, or none that fits.
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
    first = as_messages(first_messages(cfg, messages))
    ids = cfg.tokenizer.chat(first, cfg.tools)
    if len(ids) > cfg.width:
      raise UserError(
        f"the environment's prompt {messages[-1][1][:40]!r} has {len(ids)} "
        f"tokens, more than data.max_prompt_length={cfg.width}"
      )
    return ids


def begin(
  pool: EnvironmentPool,
  batch: PromptBatch,
  chats: Mapping[int, Conversation],
  group_size: int,
  key: jax.Array,
) -> dict[int, Reply]:
  """Begins this host's conversations, by row; returns what `reset` said."""
  # 2**32 - 1 is never a row number, so no response has this key.
  k_seed = jax.random.fold_in(key, np.uint32(2**32 - 1))
  seeds = np.asarray(jax.random.bits(k_seed, (len(batch),), np.uint32)).tolist()
  steps = batch.steps.tolist()
  begun = pool.begin(
    [
      (batch.problems[p], steps[p], seeds[p])
      for p in (row // group_size for row in chats)
    ]
  )
  for chat, reply in zip(chats.values(), begun, strict=True):
    chat.state, chat.failure = reply.state, reply.failure
  return dict(zip(chats, begun, strict=True))


def first_messages(cfg: PromptConfig, messages: Sequence[Turn]) -> list[Turn]:
  """The messages of the prompt that an environment's `reset` gave.

  UserError unless they end with one of the user.
  """
  first = [("system", cfg.system)] if cfg.system else []
  if messages[0][0] == "system":
    first = []
  if messages[-1][0] != "user":
    raise UserError(
      "reset of the environment: expected messages that end with one of "
      f"the user, got roles {[role for role, _ in messages]}"
    )
  return [*first, *messages]


def scored(
  batch: PromptBatch,
  samples: Samples,
  chats: Mapping[int, Conversation],
  num_tokens: Mapping[int, int],
  *,
  group_size: int,
  max_turns: int,
  limit: int,
  **fields,
) -> ScoredSamples:
  """The samples with the rewards of all hosts; call it on every process.

  `chats` and their `num_tokens` are this host's, by row; `limit` is the most
  that they can have. `fields` are others of `ScoredSamples`.
  """
  B, P = len(batch) * group_size, len(batch)
  gather = lambda value: _gather(B, {row: value(c) for row, c in chats.items()})
  failed = gather(lambda chat: bool(chat.failure)) > 0
  lowest = functools.partial(
    scoring.pay_failures_least, failed_B=failed, G=group_size
  )
  sums = gather(lambda chat: sum(chat.rewards))
  total = lowest(sums[:, None]).reshape(P, group_size)
  reasons = dict.fromkeys(c.failure for c in chats.values() if c.failure)
  reasons = tuple(reasons)[: scoring.MAX_REASONS]
  rewards = Rewards(
    total, {REWARD: total}, failed.reshape(total.shape), reasons
  )
  responses = {
    row: Response("", chat.text, "", num_tokens[row], limit).to(
      batch.problems[row // group_size]
    )
    for row, chat in chats.items()
  }
  turns = gather(lambda chat: len(chat.rewards))
  rewards_BN = np.zeros((B, max_turns), np.float32)
  for row, chat in chats.items():
    rewards_BN[row, : len(chat.rewards)] = chat.rewards
  rewards_BN = multihost.sum_of_all(rewards_BN)
  rewards_BN[np.arange(max_turns) >= turns[:, None]] = np.nan
  return ScoredSamples(
    prompts=batch,
    samples=samples,
    responses=responses,
    rewards=PendingRewards.computed(rewards),
    conversation={
      "turns": turns,
      "tool_calls": gather(lambda chat: chat.tool_calls),
      "tool_errors": gather(lambda chat: chat.tool_errors),
      "rewards": lowest(rewards_BN),
    },
    **fields,
  )


def scored_sequences(
  batch: PromptBatch,
  chats: Mapping[int, Conversation],
  episodes: Mapping[int, Sequence[EpisodeSequence]],
  finish: Mapping[int, int],
  limits: SequenceLimits,
  *,
  slot_steps: int,
  pad_id: int,
  batch_sharding: jax.sharding.Sharding,
  group_size: int,
  environment_seconds: float,
) -> ScoredSamples:
  """As `scored`, of episodes that are sequences; see `sequences.arrange`."""
  prompts, samples = arrange(
    episodes,
    finish,
    len(batch) * group_size,
    limits,
    slot_steps=slot_steps,
    pad_id=pad_id,
    batch_sharding=batch_sharding,
  )
  return scored(
    batch,
    samples,
    chats,
    {row: sum(len(s.tokens) for s in own) for row, own in episodes.items()},
    group_size=group_size,
    max_turns=limits.turns,
    limit=limits.longest,
    environment_seconds=environment_seconds,
    sequence_prompts=prompts,
  )


def _gather(B: int, values: Mapping[int, float]) -> np.ndarray:
  """[B] float32 of all hosts; 0 for rows without a value."""
  local = np.zeros(B, np.float32)
  for row, value in values.items():
    local[row] = value
  return multihost.sum_of_all(local)


def _gather_ids(
  B: int, R: int, ids: Mapping[int, Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
  """The ids [B, R] int32 of all hosts, cut at R, and their counts [B]."""
  counts = _gather(B, {row: len(x) for row, x in ids.items()}).astype(np.int32)
  width = min(int(counts.max(initial=0)), R)
  local = np.zeros((B, width), np.int32)
  for row, values in ids.items():
    local[row, : len(values)] = values[:width]
  return np.pad(multihost.sum_of_all(local), ((0, 0), (0, R - width))), counts


class _Answers:
  """The answers of this host's environments to the responses of a turn.

  `asked` has this turn's conversations, by row; `before` [B] counts the tokens
  before the turn.
  """

  def __init__(
    self,
    conversations: Conversations,
    asked: Mapping[int, Conversation],
    before: np.ndarray,
  ):
    self._pool, self._stop = conversations.pool, conversations.stop
    self._tokenizer = conversations.prompt_config.tokenizer
    self._asked, self._before = asked, before
    self._texts: dict[int, str] = {}
    self._has_stop_token: dict[int, bool] = {}
    self._waiting: list[int] = []
    self._started: list[tuple[list[int], Started]] = []

  def ask(self, finished: Mapping[int, FinishedResponse]) -> None:
    """Sends these responses, by row; each row once."""
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
    calls = [(self._asked[row].state, self._texts[row]) for row in rows]
    self._started.append((rows, self._pool.step(calls)))

  def wait(self, is_read: np.ndarray) -> tuple[dict[int, list[int]], list[int]]:
    """Waits for all answers; adds them and the responses to the conversations.

    Returns the ids after each response where the policy may read them
    (`is_read`, [B] bool), by row; and the rows whose environment goes on.
    """
    self._start()
    replies, ids, goes_on = {}, {}, []
    for rows, started in self._started:
      replies |= zip(rows, self._pool.replies(started), strict=True)
    for row, chat in self._asked.items():
      reply = replies.get(row, Reply(failure=chat.failure))
      if not reply.step.done and is_read[row]:
        try:
          ids[row] = self._tokenizer.turn(
            reply.step.messages, stopped=self._has_stop_token[row]
          )
        except Exception as error:  # no process may raise alone
          step = reply.step._replace(done=True)
          reply = reply._replace(step=step, failure=reason(error))
      if not reply.step.done:
        goes_on.append(row)
      chat.add(self._texts[row], reply)
    return ids, goes_on
