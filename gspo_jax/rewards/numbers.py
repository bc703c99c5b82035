"""Numbers as results: exact decimals after a marker or in a box, ASCII only."""

import decimal
import re

# A sign, a currency, digits plain or in groups of three, decimals, a percent
# sign, a period: each at most once. No exponent, infinity or NaN is a number.
_NUMBER = re.compile(
  r"([+-]?)(?:\\?\$|€|£)?([+-]?)"
  r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
  r"\s*(?:\\?%)?\.?"
)
_BRACE = re.compile(r"[{}]")


def final_answer(prompt: str, response: str, reference: str) -> float:
  """1.0 iff the response ends in `# result` or `#### result`, the reference.

  Only the very end counts: text after the result makes it wrong, and of several
  results the last one counts. Thousands separators are ignored.

  Args:
    prompt: not used.
    response: what the policy wrote, without its stop token.
    reference: the expected result.
  """
  # Not a regular expression: on "####..." they take cubic time.
  _, marker, last = response.rpartition("#")
  plain = lambda s: s.strip().replace(",", "")
  return float(bool(marker) and plain(last) == plain(reference) != "")


def gsm8k(prompt: str, response: str, reference: str) -> float:
  r"""1.0 iff the last result of the response equals the reference exactly.

  The result is the rest of the line after the last `####`, or the content of
  the last `\boxed{}`, whichever comes later. It must be one number and nothing
  else, and is compared as an exact decimal. `18.00`, `$18`, `18%` and `18.` are
  18, `1,234` is 1234. Refused are words and units ("18 million" is not 18),
  exponents, NaN, and digits other than 0 to 9.

  Args:
    prompt: not used.
    response: what the policy wrote.
    reference: a number, or a solution that ends in one after `####`.

  Raises:
    ValueError: the reference is not a number.
  """
  expected = number(reference.rpartition("####")[2])
  if expected is None:
    raise ValueError(f"expected a number as reference, got {reference[:80]!r}")
  return float(number(result(response) or "") == expected)


def numbered(prompt: str, response: str, reference: str) -> float:
  """1.0 iff `gsm8k` can read a result in the response, correct or not.

  Args:
    prompt: not used.
    response: what the policy wrote.
    reference: not used.
  """
  return float(number(result(response) or "") is not None)


def number(text: str) -> decimal.Decimal | None:
  """The exact value of a text that is one number, else None."""
  text = (
    text.strip().strip("$").replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
  )
  match = _NUMBER.fullmatch(text)
  if not match or (match[1] and match[2]):
    return None
  return decimal.Decimal(match[1] + match[2] + match[3].replace(",", ""))


def result(response: str) -> str | None:
  r"""The text after the last `####` or in the last `\boxed{}`; None if none."""
  marker, box = response.rfind("####"), response.rfind("\\boxed{")
  if marker > box:
    return response[marker + 4 :].partition("\n")[0].strip()
  return _braced(response[box + 7 :]) if box >= 0 else None


def _braced(text: str) -> str | None:
  """The text up to the brace that closes one already open; None without it."""
  depth = 1
  for brace in _BRACE.finditer(text):
    depth += 1 if brace[0] == "{" else -1
    if not depth:
      return text[: brace.start()].strip()
  return None
