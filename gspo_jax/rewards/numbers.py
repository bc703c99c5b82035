"""Numbers as results: exact decimals after a marker or in a box, ASCII only."""

import decimal
import re

from gspo_jax.rewards import thinking

# A sign, a currency, digits plain or in groups of three, decimals, a percent
# sign, a period: each at most once. No exponent, infinity or NaN is a number.
_NUMBER = re.compile(
  r"([+-]?)(?:\\?\$|€|£)?([+-]?)"
  r"((?:[0-9]{1,3}(?:(?:,|\\,)[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
  r"\s*(?:\\?%)?\.?"
)
# Escaped braces are no groups.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\f?box(?:ed)?[ \t]*\{")
# With the rest of its line, up to the next one.
_MARKER = re.compile(r"(?<!#)####(?!#)((?:(?!####)[^\n])*)")
# A word of two letters in front, or of three anywhere. A command is no word.
_WORD = re.compile(r"\A[^\W\d_]{2}|(?<![\\\w])[^\W\d_]{3}")
_ANSWER = re.compile(
  r"\W*(?:the )?(?:final )?answer(?: is|\W*:)", re.IGNORECASE
)
_GROUPED = re.compile(r"[^0-9,]{0,3}[0-9]{1,3}(?:,[0-9]{3})+(?:[^0-9,][^,]*)?")


def final_answer(prompt: str, response: str, reference: str) -> float:
  """1.0 iff the response ends in `# result` or `#### result`, the reference.

  Text after the result makes it wrong; of several results the last one counts.
  A result may have thousands separators.
  """
  # Not a regular expression: on "####..." they take cubic time.
  _, marker, last = thinking.behind(prompt, response).rpartition("#")
  plain = lambda s: without_separators(s.strip())
  return float(bool(marker) and plain(last) == plain(reference) != "")


def gsm8k(prompt: str, response: str, reference: str) -> float:
  r"""1.0 iff the last result of the response equals the reference exactly.

  The result is the rest of the line after the last `####`, or the content of
  the last `\boxed{}`, whichever comes later. It must be one number and nothing
  else, and is compared as an exact decimal. `18.00`, `$18`, `18%` and `18.` are
  18, `1,234` is 1234. Words and units ("18 million" is not 18), exponents, NaN,
  and digits other than 0 to 9 are refused.

  The reference is a number, or a solution that ends in one after `####`.
  """
  expected = number(marked(reference) or reference)
  if expected is None:
    raise ValueError(f"expected a number as reference, got {reference[:80]!r}")
  return float(number(result(response, prompt) or "") == expected)


def numbered(prompt: str, response: str, reference: str) -> float:
  """1.0 iff `gsm8k` can read a result in the response, correct or not."""
  return float(number(result(response, prompt) or "") is not None)


def number(text: str) -> decimal.Decimal | None:
  text = (
    text.strip().strip("$").replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
  )
  match = _NUMBER.fullmatch(text)
  if not match or (match[1] and match[2]):
    return None
  digits = match[3].replace("\\", "").replace(",", "")
  return decimal.Decimal(match[1] + match[2] + digits)


def without_separators(text: str) -> str:
  """Without commas, if the text begins with a number in groups of three."""
  return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def result(response: str, prompt: str = "") -> str | None:
  r"""The text after the last `####`, or in a `\boxed{}` after it.

  Thinking has none; `prompt` may begin it.
  """
  response = thinking.behind(prompt, response)
  *_, box = [None, *_BOX.finditer(response)]
  marker = _marker(response)
  if marker and not (box and box.start() > marker.start()):
    return marker[1].strip().strip("*")
  return _braced(response[box.end() :]) if box else None


def marked(text: str) -> str | None:
  """The line after the last marker of GSM8K, `####`; else None.

  A heading of Markdown (another number of `#`, or a text followed by other
  lines) is no marker. In a text with a box, only a line that is a number or has
  a box counts. An empty line counts if there is no other.
  """
  marker = _marker(text)
  return marker[1].strip() if marker else None


def _marker(text):
  boxed = bool(_BOX.search(text))
  empty = None
  end = len(text.rstrip("# \t\r\n"))
  for marker in reversed(list(_MARKER.finditer(text))):
    line = marker[1].strip()
    answer = _ANSWER.match(line)
    result = line[answer.end() :] if answer else line
    if number(result.strip("* ")) is not None or _BOX.search(line):
      return marker
    if boxed:
      continue
    if not line:
      empty = empty or marker
      continue
    is_last = text.find("\n", marker.end(), end) < 0
    if is_last or answer or not _WORD.search(line):
      return marker
  return empty  # a solution without its result


def _braced(text: str) -> str | None:
  """The text up to the brace that closes an open one; else None."""
  depth = 1
  for brace in _BRACE.finditer(text):
    depth += {"{": 1, "}": -1}.get(brace[0], 0)
    if not depth:
      return text[: brace.start()].strip()
  return None
