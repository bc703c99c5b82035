"""The routes of the endpoint, and who may call them.

Each client has a key. All handlers run in one thread, that of the
server; the engine runs in another.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from absl import logging
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gspo_jax.data.messages import WrongField, wrong
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.endpoint import requests
from gspo_jax.endpoint.answers import Answer, Choice
from gspo_jax.endpoint.client import Client
from gspo_jax.endpoint.requests import ApiError, Call
from gspo_jax.rewards import thinking
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous.engine import ABORT
from gspo_jax.sampler.samples import SamplerConfig
from gspo_jax.sampler.stop_strings import StopFinder, bytes_of_ids

T = TypeVar("T")
MODEL = "policy"  # its name in the API
# Bytes of a request: so many, and more for each token of the context.
_MAX_BODY, _MORE_BODY = 1 << 20, 64
_MOST_OPEN = 64  # answers of one client at once
_LONG = 1 << 16  # bytes of a request; a client's are encoded one at a time
_MOST_TOLD = 100  # unknown fields that the log names
_SECONDS = 60.0  # to receive a request, and to make token ids of it
_LOOK = 1.0  # seconds after which a handler looks whether its client has left


class Endpoint:
  """Answers the clients that were admitted; `app` is the ASGI application."""

  def __init__(self, tokenizer: Tokenizer, config: SamplerConfig):
    self._tokenizer, self._config = tokenizer, config
    self._clients: dict[bytes, Client] = {}
    self._told: set[str] = set()  # fields that the log has named
    post = lambda path, parse: Route(
      path, self._handler(parse), methods=["POST"]
    )
    self.app = Starlette(
      routes=[
        Route("/health", self._health),
        Route("/v1/models", self._models),
        Route("/v1/models/{name}", self._models),
        post("/v1/chat/completions", requests.chat),
        post("/v1/completions", requests.completion),
      ],
      exception_handlers=dict.fromkeys(
        (ApiError, WrongField, HTTPException), _refusal
      ),
    )
    self.app.router.redirect_slashes = False  # to the host of a header

  def admit(self, client: Client, key: str = "") -> str:
    """Lets a client in; returns its key, made anew unless it is given."""
    key = key or secrets.token_urlsafe(32)
    self._clients[_digest(key)] = client
    return key

  def dismiss(self, key: str) -> None:
    self._clients.pop(_digest(key), None)

  def _client(self, request: Request) -> Client:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    # Digests are looked up, so the time tells nothing about a key.
    client = self._clients.get(_digest(key.strip()))
    if scheme.lower() != "bearer" or client is None:
      raise ApiError(
        "Authorization: expected a key that is valid now, as 'Bearer KEY'",
        code="invalid_api_key",
        status=401,
      )
    return client

  async def _health(self, request: Request) -> Response:
    return Response(status_code=200 if self._clients else 503)

  async def _models(self, request: Request) -> Response:
    context = self._client(request).engine.context
    model = {
      "id": MODEL,
      "object": "model",
      "created": 0,
      "owned_by": "gspo_jax",
      "max_model_len": context,
    }
    if name := request.path_params.get("name"):
      _require_model(name)
      return JSONResponse(model)
    return JSONResponse({"object": "list", "data": [model]})

  def _handler(self, parse: Callable) -> Callable:
    async def handle(request: Request) -> Response:
      client = self._client(request)
      with _counted(client, 1):
        limit = _MAX_BODY + _MORE_BODY * client.engine.context
        body, size = await _in_time(_body(request, limit))
        call = self._checked(parse(body), client)
        with _counted(client, call.n - 1):
          answer, changed = await self._start(client, call, size > _LONG)
      changes = self._changes(request, client, answer, changed)
      if call.stream:
        events = _events(answer, changes)
        return StreamingResponse(events, media_type="text/event-stream")
      async for _ in changes:
        pass
      return JSONResponse(answer.whole())

    return handle

  def _checked(self, call: Call, client: Client) -> Call:
    """The call; ApiError for another model, or what the run does not do.

    Logs what the run samples otherwise.
    """
    _require_model(call.model)
    for name, value in call.template_args.items():
      if value is None:
        continue
      if (own := self._tokenizer.template_args.get(name)) != value:
        expected = f"{own!r}, as in data.template_args"
        raise wrong(name, value, expected)
    if not client.honours:
      own = self._config.stop.strings if self._config.stop else ()
      if not {*call.stop} <= {*own}:
        expected = f"none but those of the run (sampler.stop={own})"
        raise wrong("stop", call.stop, expected)
      if call.n > 1:
        raise wrong("n", call.n, "1 in an episode")
      call = dataclasses.replace(call, stop=())
    ignored = dict.fromkeys(call.unknown, "no such field is known: ignored")
    for name, value in call.sampling.items():
      if not client.honours and value != getattr(self._config, name, None):
        ignored[name] = "the run's sampling stays"
    for name in ignored.keys() - self._told:
      if name in requests.FIELDS or len(self._told) < _MOST_TOLD:
        self._told.add(name)
        value = {**call.sampling, **call.unknown}[name]
        logging.warning(
          "a client asks for %.40r: %.40r; %s", name, value, ignored[name]
        )
    return call

  async def _start(self, client: Client, call: Call, is_long: bool):
    """The answer, whose tokens are now sampled, and the event of a change."""
    if is_long:
      await client.encodes.acquire()
    # In a thread, for a long prompt may not hold up others.
    work = asyncio.ensure_future(asyncio.to_thread(self._prompt, client, call))
    if is_long:  # the thread goes on when nobody waits for it
      work.add_done_callback(lambda _: client.encodes.release())
    prompt, text = await _in_time(asyncio.shield(work))
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify():
      with contextlib.suppress(RuntimeError):  # the server has ended
        loop.call_soon_threadsafe(changed.set)

    made = [client.sample(call, prompt, notify, i) for i in range(call.n)]
    client.open += call.n
    opening = thinking.opening(text)
    choices = [
      Choice(call, generation, self._tokenizer, self._config.stop, i, opening)
      for i, generation in enumerate(made)
    ]
    for choice in choices if call.stop else ():
      choice.finder = StopFinder(call.stop, self._token_bytes)
    return Answer(call, choices, MODEL, text), changed

  @functools.cached_property
  def _token_bytes(self) -> list[bytes]:
    return bytes_of_ids(self._tokenizer)

  @functools.cached_property
  def _longest(self) -> int:
    return max(map(len, self._token_bytes))

  def _prompt(self, client: Client, call: Call) -> tuple[list[int], str]:
    """The ids of a prompt; and of messages, the template's text."""
    try:
      longest = self._longest
    except UserError as error:  # the tokenizer has no table of bytes
      if call.stop:
        raise ApiError(f"stop: {error}", param="stop") from error
      longest = _MAX_BODY
    size = sum(len(m["content"]) for m in call.messages) or len(call.prompt)
    if size > (context := client.engine.context) * longest:
      raise ApiError(
        f"the prompt has {size} characters: expected fewer, for at most "
        f"{context} tokens",
        code="context_length_exceeded",
      )
    if isinstance(call.prompt, str) and not call.messages:
      return self._tokenizer.encode(call.prompt), ""
    if not call.messages:
      return list(call.prompt), ""
    try:
      return client.transcript.prompt(call.messages, call.tools)
    except UserError as error:
      raise ApiError(str(error), param="messages") from error

  async def _changes(
    self, request, client: Client, answer: Answer, changed: asyncio.Event
  ) -> AsyncIterator[None]:
    """Yields after each change until the answer is whole, and records it."""
    choices = answer.choices
    try:
      while "" in (ends := {c.read() for c in choices}) and ABORT not in ends:
        yield
        with contextlib.suppress(TimeoutError):
          await asyncio.wait_for(changed.wait(), _LOOK)
        changed.clear()
        if await request.is_disconnected():
          raise ApiError("the client has left", status=499)
      if ABORT in ends:
        raise ApiError("the run takes no more requests", status=503)
      for choice in choices:
        made = choice.generation
        # Of a choice that was cut, the client does not have all tokens.
        if choice.call.messages and choice.cut is None:
          client.transcript.record(
            choice.call.messages,
            choice.call.tools,
            choice.message,
            [*made.prompt, *made.tokens],
            answer.prompt_text,
          )
        client.ended(choice)
    except BaseException:
      for choice in choices:
        choice.generation.cancelled = True
        client.gave_up(choice.generation)
      raise
    finally:
      client.open -= len(choices)


@contextlib.contextmanager
def _counted(client: Client, count: int):
  """Counts open requests of a client; ApiError if they become too many."""
  if client.open + count > _MOST_OPEN:
    raise ApiError(
      f"{client.open} requests are open: expected fewer than {_MOST_OPEN}",
      code="rate_limit_exceeded",
      status=429,
    )
  client.open += count
  try:
    yield
  finally:
    client.open -= count


async def _in_time(work: Awaitable[T]) -> T:
  try:
    return await asyncio.wait_for(work, _SECONDS)
  except TimeoutError as error:
    raise ApiError(
      f"the request: expected within {_SECONDS:g} s", status=408
    ) from error


async def _body(request: Request, limit: int) -> tuple[Any, int]:
  """The JSON of a request and its bytes; ApiError if none, or too long."""
  data = bytearray()
  async for part in request.stream():
    data += part
    if len(data) > limit:
      raise ApiError(
        f"the body has more than {limit} bytes: expected fewer", status=413
      )
  try:
    return json.loads(data), len(data)
  except (ValueError, RecursionError) as error:
    raise ApiError(f"the body: expected JSON: {error}") from error


async def _events(answer: Answer, changes: AsyncIterator) -> AsyncIterator[str]:
  event = lambda body: f"data: {json.dumps(body)}\n\n"
  try:
    async for _ in changes:
      for part in answer.new_parts():
        yield event(part)
    for part in answer.last_parts():
      yield event(part)
    yield "data: [DONE]\n\n"
  except ApiError as error:
    yield event(error.body)
  finally:
    await changes.aclose()


async def _refusal(
  request: Request, error: ApiError | WrongField | HTTPException
) -> Response:
  headers = None
  if isinstance(error, WrongField):
    error = ApiError(str(error), param=error.name)
  if isinstance(error, HTTPException):  # of the router: 404 or 405
    headers = error.headers
    path = f"{request.method} {request.url.path!r:.80}"
    expected = (
      "expected GET /v1/models, POST /v1/chat/completions or /v1/completions"
    )
    error = ApiError(f"{path}: {expected}", status=error.status_code)
  return JSONResponse(error.body, status_code=error.status, headers=headers)


def _require_model(name: Any) -> None:
  if name not in (None, MODEL):
    raise ApiError(
      f"model={name!r:.80}: expected {MODEL!r}",
      param="model",
      code="model_not_found",
      status=404,
    )


def _digest(key: str) -> bytes:
  return hashlib.sha256(key.encode()).digest()
