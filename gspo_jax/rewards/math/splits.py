"""Parts of a list of tokens: at separators, and inside brackets."""

_OPEN = ("(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil")
_CLOSE = (")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil")
_AND = ("and", "or", "\\vee", "\\wedge")


def _depths(tokens):
  """Each token, and the open brackets before and after it."""
  depth = 0
  for token in tokens:
    before = depth
    depth += token in _OPEN or token.startswith("\\begin")
    depth -= token in _CLOSE or token.startswith("\\end")
    yield token, before, depth


def at(tokens: list[str], separators: tuple[str, ...]) -> list[list[str]]:
  parts = [[]]
  for token, before, _ in _depths(tokens):
    if before == 0 and token.strip('"') in separators:
      parts.append([])
    else:
      parts[-1].append(token)
  return parts


def inside(tokens: list[str]) -> list[str] | None:
  """The tokens inside brackets around all of them; else None."""
  if len(tokens) < 2 or not (tokens[0] in _OPEN and tokens[-1] in _CLOSE):
    return None
  if any(depth <= 0 for *_, depth in list(_depths(tokens))[:-1]):
    return None
  return tokens[1:-1]


def bracketed(tokens: list[str]) -> tuple[str, list[list[str]]] | None:
  r"""The brackets around several items, and the items; else None.

  A vector in `\langle` has the brackets of a tuple.
  """
  content = inside(tokens)
  if content is None or tokens[0] == "{":
    return None
  parts = at(content, (",", ";"))
  brackets = (tokens[0] + tokens[-1]).replace("\\langle\\rangle", "()")
  return (brackets, parts) if len(parts) > 1 else None


def listed(tokens: list[str]) -> list[list[str]]:
  r"""The items of a list; `\pm` makes two of one."""
  items = []
  for part in at(tokens, (",", ";", *_AND)):
    if "\\pm" in part or "\\mp" in part:
      items += [_signed(part, "+", "-"), _signed(part, "-", "+")]
    elif part:
      items.append(part)
  return items


def _signed(tokens, plus, minus):
  return [{"\\pm": plus, "\\mp": minus}.get(token, token) for token in tokens]


def rows(tokens: list[str]) -> list[list[list[str]]]:
  r"""The cells of a table: rows end in `\\`, cells are separated by `&`."""
  lines = at(tokens, ("\\\\",))
  return [at(line, ("&",)) for line in lines if line]
