"""Somebody who calls the policy: an engine, and what it has answered."""

import asyncio
from collections.abc import Callable

from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.endpoint.answers import Choice
from gspo_jax.endpoint.requests import (
  HONOURED,
  ApiError,
  Call,
  sampling_params,
)
from gspo_jax.endpoint.transcript import Transcript
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous.engine import Engine, Generation


class Client:
  honours = HONOURED  # fields of a request

  def __init__(self, engine: Engine, tokenizer: Tokenizer):
    self.engine, self.transcript = engine, Transcript(tokenizer)
    self.open = 0  # requests
    self.encodes = asyncio.Lock()  # one request at a time

  def room(self, prompt: list[int]) -> int:
    """Tokens of an answer at most; a subclass raises ApiError to refuse it."""
    return self.engine.most_new_tokens(len(prompt))

  def sample(
    self,
    call: Call,
    prompt: list[int],
    notify: Callable[[], None] = lambda: None,
    index: int = 0,
  ) -> Generation:
    """Asks the policy for choice `index`; ApiError if that is refused."""
    room = self.room(prompt)
    if room < 1:
      raise ApiError(
        f"the prompt has {len(prompt)} tokens, which leaves no room for an "
        f"answer: expected fewer, of {len(prompt) + room} for both",
        param="messages" if call.messages else "prompt",
        code="context_length_exceeded",
      )
    most = min(room, call.max_tokens or room)
    generation = Generation(
      prompt,
      most,
      notify,
      streams=call.stream or bool(call.stop),
      logprobs=call.logprobs,
    )
    if self.honours:
      generation.params = sampling_params(call, self.engine.params)
      if "seed" in call.sampling:
        generation.seed = call.sampling["seed"] + index
    self.started(generation)
    try:
      self.engine.submit(generation)
    except UserError as error:
      self.gave_up(generation)
      raise ApiError(str(error)) from error
    return generation

  def started(self, generation: Generation) -> None:
    """Its request is sent to the engine; a subclass sets the row."""

  def ended(self, choice: Choice) -> None:
    """Its request has a whole answer."""

  def gave_up(self, generation: Generation) -> None:
    """Its request ended without a whole answer."""
