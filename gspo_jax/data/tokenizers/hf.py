"""A tokenizer folder of transformers: its ids, chat template and stop ids.

In `apply_chat_template` a message that contains `<|im_end|>` ends its turn.
Here only the template makes control tokens. A message without such strings gets
exactly the ids of `apply_chat_template`.
"""

import ast
import collections
import contextlib
import ctypes
import functools
import itertools
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from etils import epath

from gspo_jax.data import tool_calls
from gspo_jax.data.tokenizers.base import (
  UNKNOWN,
  Message,
  RewrittenTurns,
  Tokenizer,
  Turn,
  as_messages,
  decode_runs,
  digest,
  import_transformers,
)
from gspo_jax.data.tokenizers.plain import SPACE, byte_letters
from gspo_jax.record import json_file
from gspo_jax.record.run_files import in_bucket, is_file
from gspo_jax.rewards import thinking
from gspo_jax.runtime.errors import UserError, content_of, nearest, with_reason

_LLAMA_STEPS = ("ByteFallback", "Fuse", "Strip")  # of a decoder
_PRIVATE = range(0xF0000, 0xFFFFE)  # private-use characters
# Responses with which a chat template is tried: some strip the thinking. A
# prompt that ends with one of its tags allows one of them.
_RESPONSES = "a response", "<think>\na thought\n</think>\n\na response"
_THINKING = "reasoning_content", "reasoning", "thinking"  # its names
# What transformers gives every chat template.
_OF_EVERY_TEMPLATE = {
  *("add_generation_prompt", "bos_token", "eos_token", "messages"),
  *("pad_token", "raise_exception", "strftime_now", "tools", "unk_token"),
}
# A chat template is somebody else's program: its limits, and the conversations
# with which it is tried.
_SECONDS, _MAX_CHARACTERS = 10.0, 1 << 24
_TRIED_ROLES = ("user",), ("system", "user"), ("user", "assistant", "user")
# Texts under these keys are not put between `edge` characters, because chat
# templates compare them or count their letters.
_COMPARED = {"id", "role", "tool_call_id", "tools", "type"}
_WITH_ALL_IN_THEM = {"arguments", "tools"}  # keys that hold for what is below
# Where stop tokens are, in the order in which transformers looks for them.
_STOP_FILES = ("generation_config.json", "config.json")
# Files that may decide the ids, and files that may also decide a prompt.
_VOCABULARIES = (
  *("merges.txt", "sentencepiece.bpe.model", "spiece.model", "tekken.json"),
  *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
)
_SETTINGS = (
  *("added_tokens.json", "chat_template.jinja", "chat_template.json"),
  *("generation_config.json", "special_tokens_map.json"),
  "tokenizer_config.json",
)


class HFTokenizer(Tokenizer):
  """A fast tokenizer of transformers, from a folder here or in a bucket.

  `template_args` is "NAME=VALUE,NAME=VALUE"; each value is a literal of Python
  or JSON, or a word.
  """

  def __init__(self, path: epath.Path, template_args: str = ""):
    self._path, self._name = path, str(path)
    if in_bucket(path):
      self._copy = tempfile.TemporaryDirectory()  # removed with this object
      self._path = epath.Path(self._copy.name)
      with with_reason(f"tokenizer {self._name!r}"):
        for file in _files(path):
          (self._path / file.name).write_bytes(file.read_bytes())
    self._library = _open(self._path, self._name)
    self.chat_template = str(self._library.chat_template or "")
    self.template_args = _parse_template_args(template_args)
    if self.template_args and self.chat_template:
      self._check_template_args(template_args)
    self._writes_tools = False  # until a prompt has them
    self._stop_file, stops = _stops_of_file(path)
    with content_of(f"tokenizer {self._name!r}"):
      self._set_up(stops)

  def _set_up(self, stops: list[int]) -> None:
    """Sets what follows from the files; any error is the fault of a file."""
    # Two copies: whether control strings are parsed is a mutable option, and
    # the threads of the pipeline share the tokenizer.
    self._parsing = self._library.backend_tokenizer
    self._plain = type(self._parsing).from_str(self._parsing.to_str())
    for fast, as_data in ((self._parsing, False), (self._plain, True)):
      fast.no_truncation()
      fast.no_padding()
      fast.encode_special_tokens = as_data
    added = self._parsing.get_added_tokens_decoder()
    self._control = {t.content: i for i, t in added.items() if t.special}
    longest_first = sorted(self._control, key=len, reverse=True)
    either = "|".join(map(re.escape, longest_first)) or "(?!)"
    self._any_control = re.compile(f"({either})")
    self._forbidden = {*self._control.values()} - {self._library.unk_token_id}
    eos, pad = self._library.eos_token_id, self._library.pad_token_id
    stops = stops if eos is None else [eos, *stops]
    if not stops:
      raise UserError(
        f"tokenizer {self._name!r}: no eos_token in it and no eos_token_id in "
        f"{' or '.join(_STOP_FILES)}: nothing ends a response"
      )
    self.stop_ids = tuple(dict.fromkeys(stops))
    self.pad_id = self.stop_ids[0] if pad is None else pad
    ids = self._parsing.get_vocab().values()
    self.vocab_size = 1 + max(*ids, *self.stop_ids, self.pad_id)
    parts = [
      part
      for file in _files(self._path)
      for part in (file.name.encode(), file.read_bytes())
    ]
    if self._stop_file == "config.json":  # its other keys do not change ids
      parts.append(str(self.stop_ids).encode())
    self.fingerprint = digest(parts)
    # If the class does not fit the files, rare letters raise an error.
    self.encode("1 \u9f98 \U0001fae0")
    if self.chat_template:
      self._require_an_end()

  def encode(self, text: str) -> list[int]:
    ids = self._plain.encode(text, add_special_tokens=False).ids
    if self._forbidden.isdisjoint(ids):
      return ids
    # If control tokens are pieces of the vocabulary, `encode` can still find
    # them in a text. It cannot find them letter by letter.
    return [
      i
      for letter in text
      for i in self._plain.encode(letter, add_special_tokens=False).ids
      if i not in self._forbidden
    ]

  def decode(self, ids: Iterable[int]) -> str:
    fast = self._parsing
    missing = lambda i: UNKNOWN if fast.id_to_token(i) is None else None
    decode = lambda run: fast.decode(run, skip_special_tokens=False)
    return decode_runs(ids, decode, missing, self.vocab_size)

  def token_bytes(self) -> list[bytes]:
    of_piece = self._bytes_of_pieces()
    pieces = map(self._parsing.id_to_token, range(self.vocab_size))
    return [UNKNOWN.encode() if p is None else of_piece(p) for p in pieces]

  def _bytes_of_pieces(self) -> Callable[[str], bytes]:
    decoder = self._parsing.decoder
    whole = json.loads(decoder.__getstate__()) if decoder else {"type": "none"}
    steps = whole.get("decoders", [whole])
    kinds = tuple(step["type"] for step in steps)
    if kinds == ("ByteLevel",):
      letters = {letter: i for i, letter in enumerate(byte_letters())}
      return lambda piece: (
        bytes(letters[letter] for letter in piece)
        if letters.keys() >= {*piece}
        else piece.encode()
      )
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    if kinds == ("Metaspace",) or (
      # Strip acts on the whole text, not on each piece.
      steps[0] == spaces
      and kinds[1:] in (("ByteFallback", "Fuse"), _LLAMA_STEPS)
    ):
      byte = re.compile("<0x([0-9A-F]{2})>").fullmatch
      return lambda piece: (
        bytes.fromhex(byte(piece)[1])
        if "ByteFallback" in kinds and byte(piece)
        else piece.replace(SPACE, " ").encode()
      )
    raise UserError(
      f"tokenizer {self._name!r} decodes by {', '.join(kinds)}: expected "
      "byte-level BPE or the pieces of SentencePiece, in which the text of a "
      "token does not depend on its neighbours"
    )

  def chat(
    self, messages: Sequence[Message], tools: Sequence[Mapping] = ()
  ) -> list[int]:
    if self.chat_template:
      try:
        if tools and not self._writes_tools:
          self.check_prompt(as_messages([("user", "x")]), tools)
          self._writes_tools = True
        messages = [_change_arguments(m, _as_mapping) for m in messages]
        return self._ids(messages, tools=tools)
      except RecursionError as error:
        raise UserError(
          "messages or tools: expected lists and mappings that are not as deep"
        ) from error
    # The ids that the tokenizer puts before every text.
    begin = self._parsing.encode("", add_special_tokens=True).ids[:1]
    if begin != [self._library.bos_token_id]:
      begin = []
    return begin + super().chat(messages, tools)

  def turn(self, messages: Sequence[Turn], *, stopped: bool) -> list[int]:
    if not self.chat_template:
      return super().turn(messages, stopped=stopped)
    sign = chr(_PRIVATE[-1])  # the response, found again in what is rendered
    clean = lambda turn: tuple(text.replace(sign, UNKNOWN) for text in turn)
    answers = as_messages([*map(clean, messages)])

    def behind(text):
      # The stop token stays in front, so that the text behind it has the same
      # ids as in the middle of a conversation.
      text = text.rpartition(sign)[2]
      return text[self._find_stop(text) :]

    question, response = *as_messages([("user", "x")]), _response(sign, answers)
    ids = self._ids([question, response, *answers], behind)
    return ids[1:] if stopped and ids[0] in self.stop_ids else ids

  def check_turns(
    self,
    roles: Sequence[str],
    tools: Sequence[Mapping] = (),
    tool_format: str = "",
  ) -> None:
    if not self.chat_template:
      super().check_turns(roles, tools)
      return
    messages = as_messages([("user", "message 0")])
    self.check_prompt(messages, tools)
    prompt = self._render(messages, tools).rstrip()
    responses: Sequence[str] = _RESPONSES
    if prompt.endswith((thinking.OPEN, thinking.CLOSE)):
      responses = [_RESPONSES[prompt.endswith(thinking.OPEN)]]
    for role, response in itertools.product(roles, responses):
      self._check_turn(role, response, tools, tool_format)

  def _check_turn(
    self, role: str, said: str, tools: Sequence[Mapping], tool_format: str
  ) -> None:
    """As `check_turns`, for messages behind `said`, or behind it and a call."""
    call, called = None, ()
    kind = f"messages of role {role!r}"
    if role == "tool" and tools:
      called = (tools[0]["function"]["name"],)
      call = tool_calls.ToolCall(*called, {"x": "a value"})
      kind = "results of tool calls"
    name = f"tokenizer {self._name!r}, {kind}"
    messages = as_messages([("user", "message 0")])
    before = self._render(messages, tools)
    opening = thinking.opening(before)
    written = "" if call else said.removeprefix(opening).lstrip()
    for message in ("message 1", "message 2"):
      answers = as_messages([(role, message, *called)])
      response = _response("a value", answers) | {"content": said}
      messages += [response, *answers]
      text = self._render(messages, tools)
      new = text.removeprefix(before).lstrip()
      if not (text.startswith(before) and new.startswith(written)):
        raise _rewritten(name, before + written, text)
      stop = self._find_stop(new) if call else len(written)
      behind = new[stop:]
      if not behind.startswith(tuple(self._stop_texts())):
        raise UserError(
          f"{name}: the chat template writes {behind[:20]!r} behind a "
          f"response; expected a stop token, {self._stop_texts()}"
        )
      if message not in behind:
        raise UserError(
          f"{name}: the chat template leaves them out; expected another role"
        )
      if call and tool_calls.parse(new[:stop], tool_format).calls != (call,):
        raise UserError(
          f"{name}: the chat template writes a call as {new[:stop]!r}, which "
          f"the format {tool_format!r} does not read; expected the format of "
          f"the template, one of {', '.join(tool_calls.FORMATS)}"
        )
      before = text

  def check_prompt(
    self, messages: Sequence[Message], tools: Sequence[Mapping] = ()
  ) -> None:
    if not self.chat_template:
      return
    parts: dict[str, str] = {}  # by the sign that is put behind its text

    def signed(text, part):
      parts[sign := chr(_PRIVATE[len(parts)])] = part
      return text.rstrip() + sign

    def named(called, part):
      function = called["function"]
      name = signed(function["name"], f"{part} {function['name']!r}")
      return {**called, "function": {**function, "name": name}}

    chat = [_change_arguments({**m}, _as_mapping) for m in messages]
    for i, message in enumerate(chat, 1):
      part = f"message {i}, of role {message['role']!r}"
      if calls := message.get("tool_calls"):
        calls = [named(call, f"{part}: its call of") for call in calls]
        message["tool_calls"] = calls
      elif message["content"].strip():
        message["content"] = signed(message["content"], part)
    text = self._render(chat, [named(tool, "the tool") for tool in tools])
    if out := [part for sign, part in parts.items() if sign not in text]:
      raise UserError(
        f"tokenizer {self._name!r}: the chat template leaves out "
        f"{'; '.join(out)}: expected a template that writes each message, call "
        "and tool into the prompt, or data without them"
      )

  def check_demonstrations(self) -> None:
    if not self.chat_template:
      return
    response, user = _RESPONSES[0], ("user", "x")
    before = self._render(as_messages([user]))
    try:
      turns = [user, ("assistant", response), user]
      text = self._render(as_messages(turns))
    except UserError:  # a template of single prompts
      return
    between = text.removeprefix(before).partition(response)[0]
    if text.startswith(before) and self._any_control.search(between):
      raise UserError(
        f"tokenizer {self._name!r}: the chat template puts {between!r} before "
        "a response, which demonstrations would lack, since they are plain "
        "text: expected no cold start"
      )

  def _stop_texts(self) -> list[str]:
    return [text for text, i in self._control.items() if i in self.stop_ids]

  def _find_stop(self, text: str) -> int:
    """The place of the first stop token in a text; 0 without one."""
    places = (text.find(stop) for stop in self._stop_texts())
    return min((place for place in places if place >= 0), default=0)

  def _ids(
    self,
    messages: Sequence[Message],
    part: Callable[[str], str] = lambda text: text,
    tools: Sequence[Mapping] = (),
  ) -> list[int]:
    chat = {"messages": messages, "tools": tools}
    guarded, restore = self._guard(chat)
    # Control strings are at odd places.
    pieces = self._any_control.split(part(self._render(**guarded)))
    rendered = part(self._render(**chat))
    ids = self._parsing.encode(rendered, add_special_tokens=False).ids
    of_template = [self._control[text] for text in pieces[1::2]]
    only_control = lambda ids: [i for i in ids if i in self._forbidden]
    if only_control(ids) == only_control(of_template):
      return ids
    ids = []
    for i, text in enumerate(pieces):
      if i % 2:
        ids.append(self._control[text])
      else:
        ids += self.encode(text.translate(restore))
    return ids

  def save(self, folder: str | Path) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file in _files(self._path):
      shutil.copyfile(file, Path(folder) / file.name)

  def _guard(self, chat: dict) -> tuple[dict, dict[int, str]]:
    """Replaces control strings by characters that occur nowhere else.

    Returns the chat, and the table for `str.translate` that restores its texts.
    Such a character is also at both ends of a text, so that it forms no control
    string with the template's text. White space stays outside: templates may
    trim it. UserError if too few such characters are left.
    """
    whole = json.dumps(chat, default=dict, ensure_ascii=False)
    used = {*whole, *self.chat_template}
    free = (chr(i) for i in _PRIVATE if chr(i) not in used)
    # By the string that each replaces; that of "" is at the edges.
    signs = collections.defaultdict(functools.partial(next, free))
    without = lambda text: self._any_control.sub(lambda m: signs[m[0]], text)

    def within(text):
      core, edge = text.strip(), signs[""]
      return text.replace(core, edge + core + edge, 1) if core else text

    def guarded(value, key=""):
      if isinstance(value, str):
        text = without(value)
        return text if key in _COMPARED else within(text)
      if isinstance(value, Mapping):
        below = lambda k: key if key in _WITH_ALL_IN_THEM else k
        return {without(k): guarded(x, below(k)) for k, x in value.items()}
      if isinstance(value, list | tuple):
        return [guarded(x, key) for x in value]
      return value

    try:
      made = guarded(chat)
    except StopIteration:
      raise UserError(
        f"a conversation with {len(used)} different characters: expected more "
        f"than {len(signs)} unused ones of U+{_PRIVATE[0]:X} to "
        f"U+{_PRIVATE[-1]:X}"
      ) from None
    return made, {ord(sign): text for text, sign in signs.items()}

  def _render(
    self, messages: Sequence[Message], tools: Sequence[Mapping] = ()
  ) -> str:
    template = f"tokenizer {self._name!r}: its chat template"
    messages = [self._with_thinking(message) for message in messages]
    if any(m.get("tool_calls") for m in messages) and self._takes_json:
      dumps = functools.partial(json.dumps, ensure_ascii=False)
      messages = [_change_arguments(m, dumps) for m in messages]
    with content_of(f"{template} raised"):
      text = self._library.apply_chat_template(
        [*messages],
        tools=[*tools] or None,
        tokenize=False,
        add_generation_prompt=messages[-1]["role"] != "assistant",
        **self.template_args,
      )
    if len(text) > _MAX_CHARACTERS:
      raise UserError(
        f"{template} writes {len(text):,} characters: expected at most "
        f"{_MAX_CHARACTERS:,}"
      )
    return text

  def _with_thinking(self, message: Message) -> Message:
    """A message; its `reasoning_content` is where the template reads it."""
    if not (thoughts := message.get("reasoning_content")):
      return message
    if self._writes_thinking:
      return {**message, **dict.fromkeys(_THINKING, thoughts)}
    tags = f"{thinking.OPEN}\n{thoughts}\n{thinking.CLOSE}\n\n"
    plain = {k: v for k, v in message.items() if k not in _THINKING}
    return plain | {"content": tags + (message["content"] or "")}

  @functools.cached_property
  def _writes_thinking(self) -> bool:
    """Whether the template writes the thinking of an answer or of a call."""
    (user,), sign = as_messages([("user", "x")]), chr(_PRIVATE[0])
    for follows in [], as_messages([("tool", "x", "f")]), [user]:
      told = _response("x", follows) | dict.fromkeys(_THINKING, sign)
      if self._takes_json:
        told = _change_arguments(told, json.dumps)
      with contextlib.suppress(Exception):  # of the template
        if sign in self._library.apply_chat_template(
          [user, told, *follows], tokenize=False, **self.template_args
        ):
          return True
    return False

  @functools.cached_property
  def _takes_json(self) -> bool:
    """Whether the template takes arguments as JSON, as that of DeepSeek does.

    Most take mappings.
    """
    result = as_messages([("tool", "x", "f")])
    messages = [*as_messages([("user", "x")]), _response("x", result), *result]
    try:
      self._library.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # raised again, when there is a call
      return isinstance(error, TypeError)  # a text and a mapping have no sum
    return False

  def _require_an_end(self) -> None:
    """UserError if the chat template goes on for `_SECONDS`."""

    def render(roles):
      with contextlib.suppress(Exception):
        self._render(as_messages([(role, "1") for role in roles]))

    for roles in _TRIED_ROLES:
      thread = threading.Thread(target=render, args=(roles,), daemon=True)
      thread.start()
      thread.join(_SECONDS)
      if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(  # which ends the thread
          ctypes.c_ulong(thread.ident), ctypes.py_object(TimeoutError)
        )
        raise UserError(
          f"tokenizer {self._name!r}: its chat template has not ended after "
          f"{_SECONDS:g} s, with messages of {', '.join(roles)}"
        )

  def _check_template_args(self, text: str) -> None:
    known = None  # with tags that jinja2 alone does not read
    with contextlib.suppress(jinja2.TemplateSyntaxError, RecursionError):
      syntax = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
      template = syntax.parse(self._library.get_chat_template())
      names = jinja2.meta.find_undeclared_variables(template)
      known = names - _OF_EVERY_TEMPLATE
    for name in self.template_args:
      unknown = known is not None and name not in known
      if unknown or name in _OF_EVERY_TEMPLATE:
        hint = nearest(name, known) if known else "it reads none"
        raise UserError(
          f"data.template_args={text!r}: the chat template takes no argument "
          f"{name!r}; {hint}"
        )


def _rewritten(name: str, before: str, text: str) -> RewrittenTurns:
  """The error for a template that begins `text` otherwise than `before`."""
  pairs = enumerate(zip(text, before, strict=False))
  at = next((i for i, (a, b) in pairs if a != b), len(text))
  near = slice(max(at - 20, 0), at + 30)
  return RewrittenTurns(
    f"{name}: behind another turn the chat template writes the turns before it "
    f"differently: {before[near]!r} becomes {text[near]!r}, so that the policy "
    "would learn from other text than it read; expected messages of another "
    "role, or a template that keeps turns"
  )


def _response(text: str, answers: Sequence[Message]) -> Message:
  """The assistant's message before these: `text`, or a call with it.

  Chat templates look at the call when they write its result.
  """
  for answer in answers:
    if "name" in answer:
      function = {"name": answer["name"], "arguments": {"x": text}}
      call = {"type": "function", "function": function}
      calls = [call | {"id": answer["tool_call_id"]}]
      return {"role": "assistant", "content": "", "tool_calls": calls}
  return {"role": "assistant", "content": text}


def _change_arguments(message: Message, change: Callable) -> Message:
  """A message; the arguments of its calls are changed."""

  def changed(call):
    function = call["function"]
    arguments = change(function.get("arguments", {}))
    return {**call, "function": {**function, "arguments": arguments}}

  calls = message.get("tool_calls")
  return {**message, "tool_calls": [*map(changed, calls)]} if calls else message


def _as_mapping(arguments: Mapping | str) -> Mapping:
  """The arguments of a call, which OpenAI's API has as JSON."""
  try:
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    if isinstance(read, Mapping):
      return read
    reason = f"a {type(read).__name__}"
  except ValueError as error:
    reason = str(error)
  raise UserError(
    "arguments of a tool call: expected a mapping, or one as JSON, got "
    f"{str(arguments)[:40]!r}: {reason}"
  )


def _parse_template_args(text: str) -> dict[str, Any]:
  words = {"true": True, "false": False, "null": None}

  def value_of(node):
    if isinstance(node, ast.Name):
      return words.get(node.id, node.id)
    return ast.literal_eval(node)

  try:
    call = ast.parse(f"f({text})", mode="eval").body
    is_call = isinstance(call.func, ast.Name) and not call.args
    if not is_call or not all(argument.arg for argument in call.keywords):
      raise ValueError
    return {a.arg: value_of(a.value) for a in call.keywords}
  except (SyntaxError, ValueError, TypeError, AttributeError) as error:
    raise UserError(
      f"data.template_args={text!r}: expected NAME=VALUE,NAME=VALUE, such as "
      "enable_thinking=False; a text with other signs than a word in quotes"
    ) from error


def _stops_of_file(folder: epath.Path) -> tuple[str, list[int]]:
  """The first of `_STOP_FILES` that has stop tokens, and its tokens.

  A model of images and texts has them in its `text_config`.
  """
  for name in _STOP_FILES:
    path = folder / name
    raw = json_file.read(path) if is_file(path) else {}
    parts = raw, raw.get("text_config") or {}
    found = (part.get("eos_token_id") for part in parts)
    eos = next((x for x in found if x is not None), None)
    if eos is None:
      continue
    stops = eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and i >= 0 for i in stops):
      raise UserError(f"{str(path)!r}: eos_token_id is {eos!r:.40}")
    return name, stops
  return "", []


def _files(path: epath.Path) -> list[epath.Path]:
  names = sorted((*_VOCABULARIES, *_SETTINGS))
  return [path / name for name in names if is_file(path / name)]


def _open(path: epath.Path, name: str):
  if not any(is_file(path / name) for name in _VOCABULARIES):
    raise UserError(
      f"tokenizer {name!r}: no tokenizer in this folder; expected "
      "tokenizer.json or tokenizer.model, or another folder in data.tokenizer"
    )
  try:
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(
      str(path), local_files_only=True, trust_remote_code=False
    )
  except Exception as error:  # the type depends on the files
    reason = " ".join(str(error).split())[:200]
    raise UserError(f"tokenizer {name!r}: {reason}") from error
  if not tokenizer.is_fast:
    raise UserError(
      f"tokenizer {name!r}: {type(tokenizer).__name__} is a slow "
      "tokenizer; expected a fast one (tokenizer.json)"
    )
  return tokenizer
