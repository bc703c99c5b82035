"""Conversations that do not wait for each other.

A response is a request to an engine; its environment answers while others
decode. With `rollout.max_sequences` = 1 a conversation is one sequence, as in
`conversations`. With more it may be several: chat templates such as Qwen3's and
GLM's drop the thinking of earlier turns once the user has answered. Then the
context of a response does not begin with what the policy read and wrote before,
and the response begins a sequence of its own. All sequences of a conversation
get its advantage; each has an importance ratio over the tokens of its own
responses.
"""

import dataclasses
import time
from collections.abc import Sequence

import jax

from gspo_jax import model
from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.data.tokenizers.base import Turn, as_messages
from gspo_jax.endpoint.transcript import Transcript
from gspo_jax.record.progress import Progress
from gspo_jax.rollout import conversation
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.rollout.conversation import Conversation
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.rollout.sequences import (
  EpisodeSequence,
  SequenceLimits,
  local_episodes,
)
from gspo_jax.sampler.engine import (
  LENGTH,
  STOP,
  Engine,
  EngineSampler,
  Generation,
)
from gspo_jax.sampler.samples import STOPPED, TRUNCATED
from gspo_jax.sampler.stop_strings import StopStrings, response_text
from gspo_jax.workers.pool import Started


@dataclasses.dataclass
class _Conversation(Conversation):
  prompt: Sequence[int] = ()  # ids before the first response
  said: Sequence[Turn] = ()  # by the environment, after the newest response
  response: str = ""  # the newest one
  # Where there may be several sequences: all so far, for the chat template.
  transcript: Transcript | None = None
  messages: list[dict] = dataclasses.field(default_factory=list)
  rendered: str = ""  # the newest prompt, as the template writes it
  sequences: list[EpisodeSequence] = dataclasses.field(default_factory=list)
  generation: Generation | None = None  # the response that is sampled
  asked: Started | None = None  # the environment's answer
  finish: int = TRUNCATED


@dataclasses.dataclass(frozen=True)
class AsyncConversations:
  """Called as `Conversations`."""

  pool: EnvironmentPool
  limits: SequenceLimits
  prompt_config: PromptConfig
  batch_sharding: jax.sharding.Sharding  # of arrays [B, ...]
  stop: StopStrings | None  # of the sampler

  def __call__(
    self,
    generate: EngineSampler,
    params: model.Params,
    batch: PromptBatch,
    key: jax.Array,
    *,
    label: str,
  ) -> ScoredSamples:
    """G conversations about each of P problems.

    The random key of a token depends on when its request comes: the same run
    may sample other responses.
    """
    G = generate.config.group_size
    own = local_episodes(len(batch) * G, self.batch_sharding)
    chats = {row: _Conversation() for row in own}
    start = time.monotonic()
    self._begin(batch, chats, G, key)
    waited = time.monotonic() - start  # for environments
    with (
      Engine(generate, params, key) as engine,
      Progress(label, len(chats), "conversations") as progress,
    ):
      going = [chat for chat in chats.values() if self._call(chat, engine)]
      progress.advance(len(chats) - len(going))

      def all_ended() -> bool:
        nonlocal going
        still = [chat for chat in going if self._advance(chat, engine)]
        progress.advance(len(going) - len(still))
        going = still
        return not going

      engine.run(all_ended)
    return conversation.scored_sequences(
      batch,
      chats,
      {row: chat.sequences for row, chat in chats.items()},
      {row: chat.finish for row, chat in chats.items()},
      self.limits,
      slot_steps=engine.slot_steps,
      pad_id=self.prompt_config.tokenizer.pad_id,
      batch_sharding=self.batch_sharding,
      group_size=G,
      environment_seconds=waited + engine.idle_seconds,
    )

  def _begin(self, batch, chats, G, key) -> None:
    config = self.prompt_config
    begun = conversation.begin(self.pool, batch, chats, G, key)
    for row, reply in begun.items():
      chat, said, p = chats[row], reply.step.messages, row // G
      chat.transcript = Transcript(config.tokenizer)
      try:
        first = config.messages_of(batch.problems[p])
        chat.prompt = batch.ids(p)
        if said:
          first = conversation.first_messages(config, said)
          chat.prompt = config.tokenizer.chat(as_messages(first), config.tools)
      except Exception as error:
        chat.failure = chat.failure or conversation.reason(error)
      else:
        chat.messages = as_messages(first)

  def _call(self, chat: _Conversation, engine: Engine) -> bool:
    """Asks the policy; False if the conversation has ended, or has no room."""
    if chat.failure or len(chat.rewards) >= self.limits.turns:
      return False
    try:
      ids = self._context(chat)
    except Exception as error:  # messages that the template refuses
      chat.failure = conversation.reason(error)
      return False
    last = chat.sequences[-1] if chat.sequences else None
    if last and ids[: len(last.ids)] != last.ids:
      last = None
    if not last and len(chat.sequences) >= self.limits.sequences:
      return False
    room = self.limits.room(ids, last)
    room = min(room, engine.most_new_tokens(len(ids)))
    if room < 1:
      return False
    if not last:
      chat.sequences.append(EpisodeSequence(ids))
    chat.generation = engine.submit(Generation(ids, room))
    return True

  def _context(self, chat: _Conversation) -> list[int]:
    """The ids before the next response."""
    config = self.prompt_config
    if self.limits.sequences > 1:
      ids, chat.rendered = chat.transcript.prompt(chat.messages, config.tools)
      return ids
    if not chat.sequences:
      return [*chat.prompt]
    before = chat.sequences[-1].ids
    stopped = before[-1] in config.tokenizer.stop_ids
    return [*before, *config.tokenizer.turn(chat.said, stopped=stopped)]

  def _advance(self, chat: _Conversation, engine: Engine) -> bool:
    """Goes on where a response or an answer is there; False at the end."""
    if chat.generation and chat.generation.finish:
      self._ask(chat, engine)
    if not (chat.asked and chat.asked.done.done()):
      return True
    (reply,) = self.pool.replies(chat.asked)
    chat.asked = None
    chat.add(chat.response, reply)
    if reply.step.done:
      return False
    if chat.finish == TRUNCATED:
      return False
    chat.finish = TRUNCATED  # unless it goes on to its end
    chat.said = reply.step.messages
    chat.messages += as_messages(chat.said)
    return self._call(chat, engine)

  def _ask(self, chat: _Conversation, engine: Engine) -> None:
    """Records a response, and asks the environment."""
    made, chat.generation = chat.generation, None
    sequence = chat.sequences[-1]
    sequence.read(made.prompt[len(sequence.ids) :])
    sequence.add(made.tokens, made.logps, len(chat.rewards) + 1)
    chat.finish = TRUNCATED if made.finish == LENGTH else STOPPED
    chat.response = response_text(
      made.tokens,
      made.finish == STOP,
      self.prompt_config.tokenizer,
      self.stop,
    )
    if self.limits.sequences > 1:
      answer = {"role": "assistant", "content": chat.response}
      ids = [*made.prompt, *made.tokens]
      tools = self.prompt_config.tools
      chat.transcript.record(chat.messages, tools, answer, ids, chat.rendered)
      chat.messages.append(answer)
    chat.asked = self.pool.step([(chat.state, chat.response)])
    chat.asked.done.add_done_callback(lambda _: engine.wake())
