"""Numbers as results: exact, anchored to a mark, and ASCII only."""

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


def final_answer(prompt: str, answer: str, reference: str) -> float:
  """1.0 iff the answer ends in `# result` (or `#### result`), the reference.

  Only the very end counts: an answer that goes on after its result, or shows
  several, scores by what stands last. Thousands separators are ignored.

  Args:
    prompt: not used.
    answer: what the policy wrote, without its stop token.
    reference: the result expected.
  """
  # Not a regular expression: on "####..." they take cubic time.
  _, mark, last = answer.rpartition("#")
  plain = lambda s: s.strip().replace(",", "")
  return float(bool(mark) and plain(last) == plain(reference) != "")


def gsm8k(prompt: str, answer: str, reference: str) -> float:
  r"""1.0 iff the answer's last result equals the reference, as exact decimals.

  The result is what stands on the line after the last `####`, or in the last
  `\boxed{}`, whichever comes later; it must be one number and nothing else.
  `18.00`, `$18`, `18%` and `18.` are 18, `1,234` is 1234. Words are refused,
  units too ("18 million" is not 18), and so are exponents, NaN, and digits
  other than 0 to 9.

  Args:
    prompt: not used.
    answer: what the policy wrote.
    reference: a number, or a solution that ends in one behind `####`.

  Raises:
    ValueError: the reference is not a number.
  """
  expected = number(reference.rpartition("####")[2])
  if expected is None:
    raise ValueError(f"expected a number as reference, got {reference[:80]!r}")
  return float(number(result(answer) or "") == expected)


def numbered(prompt: str, answer: str, reference: str) -> float:
  """1.0 iff the answer has a result, right or wrong, that `gsm8k` can read."""
  return float(number(result(answer) or "") is not None)


def number(text: str) -> decimal.Decimal | None:
  """The exact value of a text that is one number, else None."""
  text = (
    text.strip().strip("$").replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
  )
  found = _NUMBER.fullmatch(text)
  if not found or (found[1] and found[2]):
    return None
  return decimal.Decimal(found[1] + found[2] + found[3].replace(",", ""))


def result(answer: str) -> str | None:
  r"""What stands behind the last `####` or in the last `\boxed{}`, if any."""
  mark, box = answer.rfind("####"), answer.rfind("\\boxed{")
  if mark > box:
    return answer[mark + 4 :].partition("\n")[0].strip()
  return _braced(answer[box + 7 :]) if box >= 0 else None


def _braced(text: str) -> str | None:
  """Up to the brace that closes one already open; None where none does."""
  depth = 1
  for brace in _BRACE.finditer(text):
    depth += 1 if brace[0] == "{" else -1
    if not depth:
      return text[: brace.start()].strip()
  return None
