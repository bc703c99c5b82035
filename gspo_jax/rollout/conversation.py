"""A conversation: how it begins, what it gathers, its reward."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.data.tokenizers.base import Turn, as_messages
from gspo_jax.rewards.pool import PendingRewards, Rewards
from gspo_jax.rewards.reward import Response
from gspo_jax.rollout import scoring
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.rollout.environment_pool import EnvironmentPool, Reply
from gspo_jax.rollout.sequences import EpisodeSequence, SequenceLimits, arrange
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import Samples

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


def begin(
  pool: EnvironmentPool,
  prompt_config: PromptConfig,
  batch: PromptBatch,
  chats: Mapping[int, Conversation],
  group_size: int,
  key: jax.Array,
) -> tuple[PromptBatch, dict[int, Reply]]:
  """Begins this host's conversations, by row; call it on every process.

  Returns the batch with the prompts that environments have written, and what
  `reset` said, by row.
  """
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
  replies = dict(zip(chats, begun, strict=True))
  batch = _with_prompts(prompt_config, batch, chats, group_size, replies)
  return batch, replies


def _with_prompts(
  cfg: PromptConfig,
  batch: PromptBatch,
  chats: Mapping[int, Conversation],
  group_size: int,
  replies: Mapping[int, Reply],
) -> PromptBatch:
  """The batch with the prompts of `reset`; a wrong one fails its group."""
  prompts = {}  # of this host, where an environment has one
  for row, reply in replies.items():
    if not reply.failure:
      prompts.setdefault(row // group_size, set()).add(reply.step.messages)
  local = {}
  for p, choices in prompts.items():
    try:
      ids = prompt_ids(cfg, choices)
    except Exception as error:  # no process may raise alone
      why = reason(error)
      for row, chat in chats.items():
        if row // group_size == p:
          chat.failure = chat.failure or why
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
  ids = np.where(pad, cfg.tokenizer.pad_id, everywhere[:, 1:])
  tokens[new] = ids[new]
  return dataclasses.replace(batch, tokens=tokens, lengths=lengths)


def prompt_ids(cfg: PromptConfig, choices: Collection) -> list[int]:
  """The ids of a group's prompt; [] for the data's prompt.

  UserError if the environments gave several prompts, or none that fits.
  """
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
  gather = lambda value: gather_rows(
    B, {row: value(chat) for row, chat in chats.items()}
  )
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


def gather_rows(B: int, values: Mapping[int, float]) -> np.ndarray:
  """[B] float32 of all hosts; 0 for rows without a value."""
  local = np.zeros(B, np.float32)
  for row, value in values.items():
    local[row] = value
  return multihost.sum_of_all(local)
