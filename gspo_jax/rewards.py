"""Verifiers: an answer's text and the reference in, a score out."""

import re

_FINAL = re.compile(r"#+[ \t]*(\S+)\s*\Z")


def final_answer(text: str, reference: str) -> float:
  """1.0 iff the text ends in `# answer` (or `#### answer`), as the reference.

  Only the very end counts: an answer that goes on after its result, or shows
  several, scores by what stands last. Thousands separators are ignored.

  Args:
    text: what the policy wrote, without its stop token.
    reference: the answer expected.
  """
  found = _FINAL.search(text)
  plain = lambda s: s.strip().replace(",", "")
  return float(bool(found) and plain(found[1]) == plain(reference))
