"""A conversation: how it begins, what it gathers, its reward."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.data.tokenizers.base import Turn, as_messages
from gspo_jax.rollout.environment_pool import EnvironmentPool, Reply
from gspo_jax.runtime.errors import UserError


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
