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
from collections.abc import Mapping, Sequence

import jax

from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.data.tokenizers.base import Turn, as_messages
from gspo_jax.endpoint.requests import ApiError, Call
from gspo_jax.record.progress import Progress
from gspo_jax.rollout import conversation
from gspo_jax.rollout.conversation import Conversation
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.rollout.episode import Episode
from gspo_jax.rollout.player import Play, Player
from gspo_jax.sampler.continuous.engine import STOP, Engine, Generation
from gspo_jax.sampler.samples import STOPPED, TRUNCATED
from gspo_jax.sampler.stop_strings import response_text
from gspo_jax.workers.pool import Started


@dataclasses.dataclass(kw_only=True)
class _Going(Conversation):
  """A conversation and where it is.

  `messages` and `rendered` are of one that may have several sequences.
  """

  episode: Episode
  # All so far.
  messages: list[Mapping] = dataclasses.field(default_factory=list)
  rendered: str = ""  # the newest prompt, as the chat template writes it
  ids: Sequence[int] = ()  # all of the newest response, and before it
  generation: Generation | None = None  # the response that is sampled
  response: str = ""  # the newest one
  asked: tuple[Started, int] | None = None  # the environment's answer


class Conversations(Player):
  """Plays environments; nothing is sampled where `reset` has failed."""

  pool: EnvironmentPool

  def play(
    self,
    batch: PromptBatch,
    episodes: Mapping[int, Episode],
    engine: Engine,
    key: jax.Array,
    group_size: int,
    progress: Progress,
  ) -> Play:
    chats = {b: _Going(episode=episode) for b, episode in episodes.items()}
    self._begin(batch, chats, engine, key, group_size)
    going = [chat for chat in chats.values() if self._start(chat)]
    progress.advance(len(chats) - len(going))
    while going:
      yield
      self._ask([chat for chat in going if self._has_response(chat)], engine)
      still = [chat for chat in going if self._advance(chat)]
      progress.advance(len(going) - len(still))
      going = still
    return chats

  def _begin(
    self, batch, chats: Mapping[int, _Going], engine, key, group_size
  ) -> None:
    config = self.prompt_config
    with engine.idle():
      begun = conversation.begin(
        self.pool, config, batch, chats, group_size, key
      )
    for b, said in begun.items():
      if self.limits.sequences > 1 and not chats[b].failure:
        first = config.messages_of(batch.problems[b // group_size])
        if said:
          first = conversation.first_messages(config, said)
        chats[b].messages = as_messages(first)

  def _start(self, chat: _Going) -> bool:
    """Asks the policy for the first response; False if it cannot."""
    if chat.failure:
      return False
    try:
      ids = self._context(chat)
    except Exception as error:  # messages that the template refuses
      chat.failure = conversation.reason(error)
      return False
    return self._call(chat, ids)

  def _call(self, chat: _Going, ids: list[int]) -> bool:
    """Asks the policy for a response behind `ids`; False without room."""
    try:
      chat.generation = chat.episode.sample(Call(), ids)
    except ApiError:
      chat.episode.finish = TRUNCATED  # it does not go on to its end
      return False
    return True

  def _context(self, chat: _Going, said: Sequence[Turn] = ()) -> list[int]:
    """The ids before the next response, behind what the environment said."""
    config = self.prompt_config
    if self.limits.sequences > 1:
      chat.messages += as_messages(said)
      ids, chat.rendered = chat.episode.transcript.prompt(
        chat.messages, config.tools
      )
      return ids
    if not chat.ids:
      return [*chat.prompt]
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
    chat.response = response_text(made.tokens, stopped, tokenizer, self.stop)
    if self.limits.sequences > 1:
      answer = {"role": "assistant", "content": chat.response}
      chat.episode.transcript.record(
        chat.messages, tools, answer, chat.ids, chat.rendered
      )
      chat.messages.append(answer)
    return True

  def _ask(self, chats: list[_Going], engine: Engine) -> None:
    """Asks the environments; an `async` step answers several at once."""
    size = len(chats) if self.pool.is_async else 1
    for begin in range(0, len(chats), max(size, 1)):
      some = chats[begin : begin + size]
      calls = [(chat.state, chat.response) for chat in some]
      started = self.pool.step(calls, engine.wake)
      for i, chat in enumerate(some):
        chat.asked = started, i

  def _advance(self, chat: _Going) -> bool:
    """Goes on where the environment has answered; False at the end."""
    if not (chat.asked and chat.asked[0].has_ended(chat.asked[1])):
      return True
    reply, episode = self.pool.reply(*chat.asked), chat.episode
    chat.asked, step, ids = None, reply.step, None
    if (
      not step.done
      and episode.finish == STOPPED
      and episode.calls < self.limits.turns
    ):
      try:
        ids = self._context(chat, step.messages)
      except Exception as error:  # messages that the template refuses
        failure = conversation.reason(error)
        reply = reply._replace(step=step._replace(done=True), failure=failure)
    chat.add(reply)
    if reply.step.done:
      return False
    if ids is None:
      episode.finish = TRUNCATED
      return False
    return self._call(chat, ids)
