"""Verifiers: an answer's text and the reference in, a score out."""


def final_answer(text: str, reference: str) -> float:
  """1.0 iff the text ends in `# answer` (or `#### answer`), as the reference.

  Only the very end counts: an answer that goes on after its result, or shows
  several, scores by what stands last. Thousands separators are ignored.

  Args:
    text: what the policy wrote, without its stop token.
    reference: the answer expected.
  """
  # Not a regular expression: on "####..." they take cubic time.
  _, mark, last = text.rpartition("#")
  plain = lambda s: s.strip().replace(",", "")
  return float(bool(mark) and plain(last) == plain(reference) != "")
