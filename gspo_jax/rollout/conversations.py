"""Conversations: an environment answers between the responses of the policy.

A conversation is one row of samples: the response of turn 1, the tokens of the
environment's messages, the response of turn 2, and so on, up to
`sampler.max_new_tokens` tokens. `Samples.turns` says who wrote a token.

All conversations take a turn together, in one call of the sampler. An
environment gets a response at once, while others decode; if `step` is `async`,
all get their responses together.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.record.progress import Progress
from gspo_jax.rewards.pool import PendingRewards, Rewards
from gspo_jax.rollout import conversation, scoring
from gspo_jax.rollout.batch import ScoredSamples, prompts_on_device
from gspo_jax.rollout.conversation import Conversation, gather_rows
from gspo_jax.rollout.environment_pool import EnvironmentPool, Reply
from gspo_jax.runtime import multihost, sharding
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
      batch, _ = conversation.begin(
        self.pool, self.prompt_config, batch, chats, G, key
      )
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
      answered = gather_rows(B, dict.fromkeys(goes_on, 1.0)) > 0
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
    return conversation.scored(
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
    parts, failed = {conversation.REWARD: total}, np.array(state["failed"])
    rewards = Rewards(total, parts, failed)
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


def _gather_ids(
  B: int, R: int, ids: Mapping[int, Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
  """The ids [B, R] int32 of all hosts, cut at R, and their counts [B]."""
  counts = gather_rows(B, {row: len(x) for row, x in ids.items()})
  counts = counts.astype(np.int32)
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
          reply = reply._replace(step=step, failure=conversation.reason(error))
      if not reply.step.done:
        goes_on.append(row)
      chat.add(self._texts[row], reply)
    return ids, goes_on
