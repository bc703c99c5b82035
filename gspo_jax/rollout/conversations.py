"""Conversations: an environment answers between the responses of the policy.

No conversation waits for another: a response is a request to an engine, and its
environment answers while others decode. With `rollout.max_sequences` = 1 a
conversation is one sequence: the response of turn 1, the tokens of the
environment's messages, the response of turn 2, and so on. With more it may be
several: chat templates such as Qwen3's and GLM's drop the thinking of earlier
turns once the user has answered. Then the context of a response does not begin
with what the policy read and wrote before, and the response begins a sequence
of its own.
"""

import dataclasses
from collections.abc import Collection, Generator, Mapping, Sequence

import jax
import numpy as np

from gspo_jax.data.prompt_batch import PromptConfig
from gspo_jax.data.tokenizers.base import Turn, as_messages
from gspo_jax.endpoint.requests import ApiError, Call
from gspo_jax.rewards import thinking
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.rollout.episode import Episode
from gspo_jax.rollout.player import Conversation, EpisodeBatch, Player
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous.engine import STOP, Engine, Generation
from gspo_jax.sampler.samples import STOPPED, TRUNCATED
from gspo_jax.sampler.stop_strings import response_text
from gspo_jax.workers.pool import Started

_TAIL = 32  # tokens at the end of a prompt that may open the thinking


@dataclasses.dataclass(kw_only=True)
class _Going(Conversation):
  """A conversation and where it is.

  `messages` and `rendered` are of one that may have several sequences.
  """

  episode: Episode
  state: str = ""  # of its environment
  # All so far.
  messages: list[Mapping] = dataclasses.field(default_factory=list)
  rendered: str = ""  # the newest prompt, as the chat template writes it
  ids: Sequence[int] = ()  # of the newest response, and all before it
  generation: Generation | None = None  # the response that is sampled
  response: str = ""  # the newest one
  asked: tuple[Started, int] | None = None  # the environment's answer


class Conversations(Player):
  """Plays environments; nothing is sampled where `reset` has failed."""

  pool: EnvironmentPool

  def play(self, batch: EpisodeBatch) -> Generator[None]:
    begun = {
      b: _Going(episode=episode) for b, episode in batch.episodes.items()
    }
    batch.chats.update(begun)
    self._begin(batch, begun)
    going = [c for c in begun.values() if not c.failure and self._call(c)]
    batch.progress.advance(len(begun) - len(going))
    while going:
      yield
      self._ask(
        [chat for chat in going if self._has_response(chat)], batch.engine
      )
      still = [chat for chat in going if self._advance(chat)]
      batch.progress.advance(len(going) - len(still))
      going = still

  def _begin(self, batch: EpisodeBatch, chats: Mapping[int, _Going]) -> None:
    """Begins this host's conversations; a wrong prompt fails its group."""
    # 2**32 - 1 is never a row number, so no response has this key.
    k_seed = jax.random.fold_in(batch.key, np.uint32(2**32 - 1))
    prompts = batch.prompts
    bits = jax.random.bits(k_seed, (len(prompts),), np.uint32)
    seeds, steps = np.asarray(bits).tolist(), prompts.steps.tolist()
    groups = [b // batch.group_size for b in chats]
    with batch.engine.idle():
      begun = self.pool.begin(
        [(prompts.problems[p], steps[p], seeds[p]) for p in groups]
      )
      said: dict[int, set] = {}  # in a group
      for p, reply in zip(groups, begun, strict=True):
        if not reply.failure:
          said.setdefault(p, set()).add(reply.step.messages)
      made = {p: self._prompt(prompts.ids(p), x) for p, x in said.items()}
    for p, chat, reply in zip(groups, chats.values(), begun, strict=True):
      chat.state, chat.failure = reply.state, reply.failure
      if not chat.failure:
        chat.ids, chat.failure = made[p]
      if self.limits.sequences > 1 and not chat.failure:
        config, messages = self.prompt_config, reply.step.messages
        chat.messages = (
          _first_messages(config, messages)
          if messages
          else config.messages_of(prompts.problems[p])
        )

  def _prompt(
    self, ids: list[int], choices: Collection
  ) -> tuple[list[int], str]:
    """The ids of a group's prompt, by default the data's; or what is wrong."""
    try:
      return prompt_ids(self.prompt_config, choices) or ids, ""
    except Exception as error:  # no process may raise alone
      return [], _reason(error)

  def _call(self, chat: _Going, said: Sequence[Turn] = ()) -> bool:
    """Asks the policy for a response to what was said; False if it cannot."""
    try:
      ids = self._context(chat, said)
    except Exception as error:  # messages that the template refuses
      chat.failure = _reason(error)
      return False
    try:
      chat.generation = chat.episode.sample(Call(), ids)
    except ApiError:
      chat.episode.finish = TRUNCATED  # it does not go on to its end
      return False
    return True

  def _context(self, chat: _Going, said: Sequence[Turn]) -> list[int]:
    """The ids before the next response, behind what the environment said."""
    config = self.prompt_config
    if self.limits.sequences > 1:
      chat.messages += as_messages(said)
      ids, chat.rendered = chat.episode.transcript.prompt(
        chat.messages, config.tools
      )
      return ids
    if not said:  # the first response
      return [*chat.ids]
    stopped = chat.ids[-1] in config.tokenizer.stop_ids
    return [*chat.ids, *config.tokenizer.turn(said, stopped=stopped)]

  def _has_response(self, chat: _Going) -> bool:
    """Whether a response has ended; it is recorded."""
    made = chat.generation
    if not (made and made.finish):
      return False
    chat.generation, chat.ids = None, [*made.prompt, *made.tokens]
    chat.episode.record(made)
    tokenizer, tools = self.prompt_config.tokenizer, self.prompt_config.tools
    stopped = made.finish == STOP
    prompt = tokenizer.decode(made.prompt[-_TAIL:])
    chat.response = thinking.opening(prompt) + response_text(
      made.tokens, stopped, tokenizer, self.stop
    )
    if self.limits.sequences > 1:
      answer = {"role": "assistant", "content": chat.response}
      chat.episode.transcript.record(
        chat.messages, tools, answer, chat.ids, chat.rendered
      )
      chat.messages.append(answer)
    return True

  def _ask(self, chats: list[_Going], engine: Engine) -> None:
    """Asks the environments; an `async` step answers several at once."""
    at_once = chats and self.pool.is_async
    for some in [chats] if at_once else [[chat] for chat in chats]:
      calls = [(chat.state, chat.response) for chat in some]
      started = self.pool.step(calls, engine.wake)
      for i, chat in enumerate(some):
        chat.asked = started, i

  def _advance(self, chat: _Going) -> bool:
    """Goes on where the environment has answered; False at the end."""
    if not (chat.asked and chat.asked[0].has_ended(chat.asked[1])):
      return True
    reply, episode = self.pool.reply(*chat.asked), chat.episode
    step, chat.asked = reply.step, None
    chat.failure, chat.state = reply.failure, reply.state
    chat.rewards.append(step.reward)
    chat.tool_calls += step.tool_calls
    chat.tool_errors += step.tool_errors
    if step.done:
      return False
    if episode.finish == STOPPED and episode.calls < self.limits.turns:
      return self._call(chat, step.messages)
    episode.finish = TRUNCATED
    return False


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
  ids = cfg.tokenizer.chat(_first_messages(cfg, messages), cfg.tools)
  if len(ids) > cfg.width:
    raise UserError(
      f"the environment's prompt {messages[-1][1][:40]!r} has {len(ids)} "
      f"tokens, more than data.max_prompt_length={cfg.width}"
    )
  return ids


def _first_messages(
  cfg: PromptConfig, messages: Sequence[Turn]
) -> list[Mapping]:
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
  return as_messages([*first, *messages])


def _reason(error: Exception) -> str:
  if isinstance(error, UserError):
    return str(error)
  return f"messages of the environment: {type(error).__name__}: {error}"
