"""What plays the episodes of a batch: environments or agents."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Generator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.record.progress import Progress
from gspo_jax.rewards.pool import PendingRewards, Rewards
from gspo_jax.rewards.reward import Response
from gspo_jax.rollout import scoring
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.rollout.episode import Episode, SequenceLimits, episode_samples
from gspo_jax.runtime import multihost
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.continuous.engine import Engine
from gspo_jax.sampler.samples import Samples, SamplingParams
from gspo_jax.sampler.stop_strings import StopStrings
from gspo_jax.workers.pool import Pool


@dataclasses.dataclass(kw_only=True)
class Conversation:
  """What became of an episode."""

  rewards: list[float] = dataclasses.field(default_factory=list)  # of turns
  tool_calls: int = 0
  tool_errors: int = 0
  failure: str = ""  # why a call failed; "" if none did


REWARD = "environment"  # the one reward of a conversation


class EpisodeBatch(NamedTuple):
  """This host's episodes about a batch of prompts, and what plays them."""

  prompts: PromptBatch
  episodes: Mapping[int, Episode]  # by number
  engine: Engine
  key: jax.Array
  group_size: int
  progress: Progress
  chats: dict[int, Conversation]  # gets what becomes of the episodes


@dataclasses.dataclass(frozen=True)
class Player:
  pool: Pool
  limits: SequenceLimits
  prompt_config: PromptConfig  # how messages become tokens
  stop: StopStrings | None  # of the sampler

  def play(self, batch: EpisodeBatch) -> Generator[None]:
    """Plays this host's episodes; yields while some go on."""
    raise NotImplementedError

  def __call__(
    self,
    generate: ContinuousSampler,
    params: model.Params,
    batch: PromptBatch,
    key: jax.Array,
    *,
    label: str,
    group_size: int = 0,
    sampling: SamplingParams | None = None,
  ) -> ScoredSamples:
    """G episodes about each of P problems; call it on every process.

    `group_size` and `sampling` as of `ContinuousSampler`.

    The key of a token is made of `key`, its episode, its sequence and its
    number: the same calls in any order give the same samples.
    """
    limits, config = self.limits, self.prompt_config
    group_size = group_size or generate.config.group_size
    size = len(batch) * group_size
    own = generate.played_rows(size)
    with (
      self._open(generate, params, key, size * limits.sequences) as engine,
      Progress(label, len(own), "episodes") as progress,
    ):
      episodes = {
        b: Episode(engine, config.tokenizer, limits, b, size, sampling)
        for b in own
      }
      chats: dict[int, Conversation] = {}
      played = EpisodeBatch(
        batch, episodes, engine, key, group_size, progress, chats
      )
      with contextlib.closing(self.play(played)) as play:
        engine.run(lambda: bool(next(play, True)))
      sequences = {b: episode.end() for b, episode in episodes.items()}
      finish = {b: episode.finish for b, episode in episodes.items()}
      samples = episode_samples(engine, sequences, finish, limits)
    tokens = {b: [s.tokens for s in own] for b, own in sequences.items()}
    rewards, conversation = self._gathered(chats, (len(batch), group_size))
    return ScoredSamples(
      batch,
      samples,
      self._responses(batch, tokens, group_size),
      rewards,
      conversation,
      engine.idle_seconds,
    )

  def _open(self, generate, params, key, rows: int) -> Engine:
    return generate.open(params, key, rows)

  def _gathered(
    self, chats: Mapping[int, Conversation], shape: tuple[int, int]
  ) -> tuple[PendingRewards, dict[str, np.ndarray]]:
    """The rewards [P, G] of all hosts, and `ScoredSamples.conversation`.

    `chats` are this host's, by episode; call it on every process.
    """
    B, N = math.prod(shape), self.limits.turns
    gather = lambda value: multihost.allgather_rows(
      {row: value(chat) for row, chat in chats.items()}, B
    )
    failed = gather(lambda chat: bool(chat.failure)) > 0
    lowest = functools.partial(
      scoring.pay_failures_least, failed_B=failed, G=shape[1]
    )
    sums = gather(lambda chat: sum(chat.rewards))
    total = lowest(sums[:, None]).reshape(shape)
    failures = dict.fromkeys(c.failure for c in chats.values() if c.failure)
    reasons = tuple(failures)[: scoring.MAX_REASONS]
    rewards = Rewards(total, {REWARD: total}, failed.reshape(shape), reasons)
    turns = gather(lambda chat: len(chat.rewards))
    rewards_BN = np.zeros((B, N), np.float32)
    for row, chat in chats.items():
      rewards_BN[row, : len(chat.rewards)] = chat.rewards
    rewards_BN = multihost.sum_of_all(rewards_BN)
    rewards_BN[np.arange(N) >= turns[:, None]] = np.nan
    return PendingRewards.computed(rewards), {
      "turns": turns,
      "tool_calls": gather(lambda chat: chat.tool_calls),
      "tool_errors": gather(lambda chat: chat.tool_errors),
      "rewards": lowest(rewards_BN),
    }

  def _responses(
    self, batch: PromptBatch, tokens: Mapping[int, list], group_size: int
  ) -> dict[int, Response]:
    """Each episode for people, from the tokens of its sequences."""
    tokenizer, responses = self.prompt_config.tokenizer, {}
    for b, parts in tokens.items():
      ids = ([i for i in x if i not in tokenizer.stop_ids] for x in parts)
      response = Response(
        prompt="",
        text="\n\n".join(map(tokenizer.decode, ids)),
        reference="",
        tokens=sum(map(len, parts)),
        limit=self.limits.longest,
      )
      responses[b] = response.to(batch.problems[b // group_size])
    return responses

  def state(self, scored: ScoredSamples) -> dict:
    """JSON for a checkpoint: fields that samples and data do not have."""
    rewards = scored.rewards.result()
    return {
      "rewards": rewards.total.tolist(),
      "failed": rewards.failed.tolist(),
      "conversation": {
        name: x.tolist() for name, x in scored.conversation.items()
      },
    }

  def restore(
    self, batch: PromptBatch, samples: Samples, state: dict
  ) -> ScoredSamples:
    """The scored samples of `state`."""
    total = np.array(state["rewards"], np.float32)
    by_name, failed = {REWARD: total}, np.array(state["failed"])
    tokens: dict[int, list] = {}
    lengths = multihost.local_rows(samples.lengths)
    for row, ids in multihost.local_rows(samples.tokens).items():
      sequences = tokens.setdefault(row // self.limits.sequences, [])
      if lengths[row]:
        sequences.append(ids[: int(lengths[row])].tolist())
    return ScoredSamples(
      batch,
      samples,
      self._responses(batch, tokens, total.shape[1]),
      PendingRewards.computed(Rewards(total, by_name, failed)),
      {
        name: np.array(values, np.float32)
        for name, values in state["conversation"].items()
      },
    )
