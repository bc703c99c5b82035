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
from gspo_jax.rollout.sequences import SequenceLimits
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
  rewards: list[float] = dataclasses.field(default_factory=list)  # of turns
  tool_calls: int = 0
  tool_errors: int = 0
  failure: str = ""  # why a call failed; "" if none did
  prompt: Sequence[int] = ()  # ids before the first response

  def add(self, reply: Reply) -> None:
    step = reply.step
    self.rewards.append(step.reward)
    self.tool_calls += step.tool_calls
    self.tool_errors += step.tool_errors
    self.failure, self.state = reply.failure, reply.state


def begin(
  pool: EnvironmentPool,
  prompt_config: PromptConfig,
  batch: PromptBatch,
  chats: Mapping[int, Conversation],
  group_size: int,
  key: jax.Array,
) -> dict[int, Sequence[Turn]]:
  """Begins this host's conversations, by episode.

  Returns the messages of the prompts that environments gave; () for the data's
  prompt. A wrong prompt fails its group.
  """
  # 2**32 - 1 is never a row number, so no response has this key.
  k_seed = jax.random.fold_in(key, np.uint32(2**32 - 1))
  seeds = np.asarray(jax.random.bits(k_seed, (len(batch),), np.uint32)).tolist()
  steps, groups = batch.steps.tolist(), [b // group_size for b in chats]
  begun = pool.begin([(batch.problems[p], steps[p], seeds[p]) for p in groups])
  prompts: dict[int, set] = {}  # of a group
  for p, chat, reply in zip(groups, chats.values(), begun, strict=True):
    chat.state, chat.failure = reply.state, reply.failure
    if not reply.failure:
      prompts.setdefault(p, set()).add(reply.step.messages)
  said = {b: reply.step.messages for b, reply in zip(chats, begun, strict=True)}
  for p, choices in prompts.items():
    try:
      ids = prompt_ids(prompt_config, choices) or batch.ids(p)
      why = ""
    except Exception as error:  # no process may raise alone
      ids, why = [], reason(error)
    for b, chat in chats.items():
      if b // group_size == p:
        chat.failure, chat.prompt = chat.failure or why, ids
  return said


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
  responses: Mapping[int, Response],
  limits: SequenceLimits,
  *,
  group_size: int,
  environment_seconds: float,
) -> ScoredSamples:
  """The samples with the rewards of all hosts; call it on every process.

  `chats` and their `responses`, for people, are this host's, by episode.
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
  turns = gather(lambda chat: len(chat.rewards))
  rewards_BN = np.zeros((B, limits.turns), np.float32)
  for row, chat in chats.items():
    rewards_BN[row, : len(chat.rewards)] = chat.rewards
  rewards_BN = multihost.sum_of_all(rewards_BN)
  rewards_BN[np.arange(limits.turns) >= turns[:, None]] = np.nan
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
    environment_seconds=environment_seconds,
  )


def gather_rows(B: int, values: Mapping[int, float]) -> np.ndarray:
  """[B] float32 of all hosts; 0 for rows without a value."""
  local = np.zeros(B, np.float32)
  for row, value in values.items():
    local[row] = value
  return multihost.sum_of_all(local)
