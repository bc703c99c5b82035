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
class _Going(Conversation):
  """A conversation and where it is.

  `transcript`, `messages` and `rendered` are of one that may have several
  sequences.
  """

  prompt: Sequence[int] = ()  # ids before the first response
  transcript: Transcript | None = None
  messages: list[dict] = dataclasses.field(default_factory=list)  # all so far
  rendered: str = ""  # the newest prompt, as the chat template writes it
  sequences: list[EpisodeSequence] = dataclasses.field(default_factory=list)
  generation: Generation | None = None  # the response that is sampled
  response: str = ""  # the newest one
  asked: Started | None = None  # the environment's answer
  finish: int = TRUNCATED


@dataclasses.dataclass(frozen=True)
class AsyncConversations:
  """Plays conversations; called as `Conversations`."""

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
    may sample other responses. Nothing is sampled where `reset` has failed.
    """
    G = generate.config.group_size
    own = local_episodes(len(batch) * G, self.batch_sharding)
    chats = {row: _Going() for row in own}
    start = time.monotonic()
    batch = self._begin(batch, chats, G, key)
    waited = time.monotonic() - start  # for environments
    with (
      Engine(generate, params, key) as engine,
      Progress(label, len(chats), "conversations") as progress,
    ):
      going = [chat for chat in chats.values() if self._start(chat, engine)]
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

  def _begin(self, batch, chats, G, key) -> PromptBatch:
    config = self.prompt_config
    batch, begun = conversation.begin(self.pool, config, batch, chats, G, key)
    for row, reply in begun.items():
      chat, said, p = chats[row], reply.step.messages, row // G
      chat.prompt = batch.ids(p)
      if self.limits.sequences > 1 and not chat.failure:
        first = config.messages_of(batch.problems[p])
        if said:
          first = conversation.first_messages(config, said)
        chat.transcript = Transcript(config.tokenizer)
        chat.messages = as_messages(first)
    return batch

  def _start(self, chat: _Going, engine: Engine) -> bool:
    """Asks the policy for the first response; False if it cannot."""
    if chat.failure:
      return False
    try:
      return self._call(chat, self._context(chat), engine)
    except Exception as error:  # messages that the template refuses
      chat.failure = conversation.reason(error)
      return False

  def _call(self, chat: _Going, ids: list[int], engine: Engine) -> bool:
    """Asks the policy for a response behind `ids`; False without room."""
    last = chat.sequences[-1] if chat.sequences else None
    if last and ids[: len(last.ids)] != last.ids:
      last = None
    if not last and len(chat.sequences) >= self.limits.sequences:
      return False
    room = self.limits.room(ids, last)
    room = min(room, engine.most_new_tokens(len(ids)))
    if room < 1:
      return False
    made = Generation(ids, room)
    chat.generation = engine.submit(made, goes_on=bool(chat.sequences))
    if not last:
      chat.sequences.append(EpisodeSequence(ids))
    return True

  def _context(self, chat: _Going, said: Sequence[Turn] = ()) -> list[int]:
    """The ids before the next response, behind what the environment said."""
    config = self.prompt_config
    if self.limits.sequences > 1:
      chat.messages += as_messages(said)
      ids, chat.rendered = chat.transcript.prompt(chat.messages, config.tools)
      return ids
    if not chat.sequences:
      return [*chat.prompt]
    before = chat.sequences[-1].ids
    stopped = before[-1] in config.tokenizer.stop_ids
    return [*before, *config.tokenizer.turn(said, stopped=stopped)]

  def _advance(self, chat: _Going, engine: Engine) -> bool:
    """Goes on where a response or an answer is there; False at the end."""
    if chat.generation and chat.generation.finish:
      self._ask(chat, engine)
    if not (chat.asked and chat.asked.done.done()):
      return True
    (reply,) = self.pool.replies(chat.asked)
    chat.asked, step, ids = None, reply.step, None
    has_turns = len(chat.rewards) + 1 < self.limits.turns
    if not step.done and chat.finish == STOPPED and has_turns:
      try:
        ids = self._context(chat, step.messages)
      except Exception as error:  # messages that the template refuses
        failure = conversation.reason(error)
        reply = reply._replace(step=step._replace(done=True), failure=failure)
    chat.add(chat.response, reply)
    if reply.step.done:
      return False
    chat.finish = TRUNCATED  # unless it goes on to its end
    return ids is not None and self._call(chat, ids, engine)

  def _ask(self, chat: _Going, engine: Engine) -> None:
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
