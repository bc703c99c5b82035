r"""Expressions as trees, from the tokens of `text.tokens`.

A tree is a tuple: its name, then its parts. `("number", value, decimals)`,
`("name", letters)`, `("constant", "pi")`, `("add", tree, tree)` and so on.
"""

import re
from collections.abc import Iterator
from fractions import Fraction

# Letters side by side that are factors; more of them are a word.
MAX_LETTERS = 4

_FUNCTIONS = """
sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh ln exp cis
""".split()
_LOGARITHMS = ("log", "lg")
_APPLIED = (*_FUNCTIONS, *_LOGARITHMS)
RECIPROCALS = {"sec": "cos", "csc": "sin", "cot": "tan"}
_INVERTED = ("sin", "cos", "tan", "sinh", "cosh", "tanh")
_ONE = ("number", Fraction(1), 0)
_CONSTANTS = ("pi", "e", "i")
GREEK = """
alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma
tau phi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell hbar
""".split()
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_ENDS = frozenset(("", ")", "]", "}", "\\}", "|", "\\rfloor", "\\rceil"))
_PRODUCTS = dict.fromkeys(("\\times", "\\cdot", "*"), "times")
_PRODUCTS |= dict.fromkeys(("/", "\\div"), "divide")
_SUFFIXES = {"!": "factorial", "°": "degrees"}
_NUMBER = re.compile(r"([0-9]*)(?:\.([0-9]*)(?:<([0-9]+)>)?)?")


class Unreadable(ValueError):
  """The tokens are no expression that this module knows."""


def read(tokens: list[str]) -> tuple:
  """The tree of all the tokens; `Unreadable` if they are no expression."""
  reader = _Reader(tokens)
  try:
    tree = reader.sum()
  except RecursionError as e:
    raise Unreadable("an expression too deep") from e
  if reader.next:
    raise Unreadable(f"a token too many: {reader.next}")
  return tree


def nodes(tree: tuple) -> Iterator[tuple]:
  left = [tree]
  while left:
    node = left.pop()
    yield node
    left.extend(part for part in node[1:] if isinstance(part, tuple))


def number(token: str) -> tuple | None:
  match = _NUMBER.fullmatch(token)
  if not match or not token.strip("."):
    return None
  whole, digits, repeated = match.groups()
  digits = digits or ""
  value = Fraction(int((whole or "0") + digits), 10 ** len(digits))
  if repeated:
    nines = (10 ** len(repeated) - 1) * 10 ** len(digits)
    value += Fraction(int(repeated), nines)
  return ("number", value, 0 if repeated else len(digits))


class _Reader:
  def __init__(self, tokens):
    self._tokens = list(tokens)
    self._at = 0
    self._bars = 0  # open absolute values

  @property
  def next(self) -> str:
    return self._tokens[self._at] if self._at < len(self._tokens) else ""

  def take(self, *expected: str) -> str:
    token = self.next
    if not token or (expected and token not in expected):
      raise Unreadable(f"expected {expected}, got {token!r}")
    self._at += 1
    return token

  def sum(self) -> tuple:
    tree = self.product()
    while self.next in ("+", "-"):
      sign, term = self.take(), self.product()
      tree = ("add", tree, term if sign == "+" else ("negative", term))
    return tree

  def product(self) -> tuple:
    if self.next in ("+", "-"):
      return self.signed(self.product)
    tree = self.power()
    while True:
      before, token = self._tokens[self._at - 1], self.next
      if token in _PRODUCTS:
        tree = (_PRODUCTS[self.take()], tree, self.signed(self.power))
      elif number(token):
        tree = self.mixed(tree)
      elif self.begins_atom():
        factor = self.power()
        proper = factor[0] == "divide" and all(map(_is_whole, factor[1:]))
        if token == "\\frac" and _is_whole(tree) and proper:
          tree = ("mixed", tree, factor)
        elif token == "(" and (before == ")" or factor[0] == "number"):
          tree = ("times", tree, factor)
        else:
          tree = ("product", tree, factor)
      else:
        return tree

  def mixed(self, whole) -> tuple:
    """The rest of `2 1/2`; other adjacent numbers are unreadable."""
    above = number(self.take())
    self.take("/")
    below = number(self.take())
    if not (below and all(map(_is_whole, (whole, above, below)))):
      raise Unreadable("two numbers side by side")
    return ("mixed", whole, ("divide", above, below))

  def signed(self, rule) -> tuple:
    sign = self.take() if self.next in ("+", "-") else ""
    if sign and self.next in ("+", "-"):
      raise Unreadable("two signs")
    tree = rule()
    return ("negative", tree) if sign == "-" else tree

  def power(self) -> tuple:
    tree = self.atom()
    while self.next in ("^", *_SUFFIXES):
      sign = self.take()
      if sign == "^":
        tree = ("power", tree, self.signed(self.atom))
      else:
        tree = (_SUFFIXES[sign], tree)
    return tree

  def begins_atom(self) -> bool:
    token = self.next
    if token == "|":
      return not self._bars
    return token not in _ENDS and token not in ("+", "-", "!", "^", "°", "_")

  def atom(self) -> tuple:
    token = self.take()
    if token in ("(", "[", "{"):
      bars, self._bars = self._bars, 0
      tree = self.sum()
      self.take(_CLOSING[token])
      self._bars = bars
      return tree
    if token == "|":
      self._bars += 1
      tree = self.sum()
      self.take("|")
      self._bars -= 1
      return ("absolute", tree)
    if number(token):
      if self.next == "_":
        raise Unreadable("a number in another base")
      return number(token)
    return self.named(token)

  def named(self, token) -> tuple:
    name = token.lstrip("\\").strip('"')
    if name in _CONSTANTS:
      return ("constant", name)
    if token == "\\frac":
      return ("divide", self.atom(), self.atom())
    if token == "\\binom":
      return ("binomial", self.atom(), self.atom())
    if name in ("sqrt", "surd"):
      two = ("number", Fraction(2), 0)
      index = self.atom() if self.next == "[" else two
      return ("power", self.atom(), ("divide", _ONE, index))
    if token in ("\\lfloor", "\\lceil"):
      tree = self.sum()
      self.take(token.replace("\\l", "\\r"))
      return (token[2:], tree)
    if name in _LOGARITHMS:
      return self.applied("logarithm", self.base())
    if name in _FUNCTIONS:
      return self.applied(name)
    if name in GREEK or (len(name) == 1 and name.isalpha()):
      return ("name", name + self.subscript())
    if token.isascii() and token.isalpha():  # xy is x times y
      return self.letters(token)
    raise Unreadable(f"not known: {token}")

  def base(self) -> tuple:
    if self.next != "_":
      return ("number", Fraction(10), 0)
    self.take()
    if self.next.isdigit():  # only one digit without braces
      digits = filter(None, (self.next[0], self.next[1:]))
      self._tokens[self._at : self._at + 1] = digits
    return self.atom()

  def subscript(self) -> str:
    text = ""
    while self.next in ("_", "'"):
      text += self.take()
      if text[-1] == "_":
        text += self.take()
        while text.count("{") > text.count("}"):
          text += self.take()
    return text.translate(str.maketrans("", "", '{}"'))

  def applied(self, name, *parameters) -> tuple:
    """A function of what follows, up to a sign or another function."""
    exponent = None
    if self.next == "^":
      self.take()
      exponent = self.signed(self.atom)
    if self.next in ("(", "{"):
      tree = self.atom()
    else:
      tree = self.signed(self.power)
      while (
        self.begins_atom()
        and self.next.lstrip("\\").strip('"') not in _APPLIED
        and (self.next not in (*_PRODUCTS, "(") and not number(self.next))
      ):
        tree = ("product", tree, self.power())
    if exponent == ("negative", _ONE) and not parameters:
      if name in RECIPROCALS:
        return ("arc" + RECIPROCALS[name], ("divide", _ONE, tree))
      if name not in _INVERTED:
        raise Unreadable(f"no inverse of {name}")
      return ("arc" + name, tree)
    tree = (name, *parameters, tree)
    return ("power", tree, exponent) if exponent else tree

  def letters(self, token) -> tuple:
    """The first of some letters; the others follow as factors."""
    if len(token) > MAX_LETTERS:
      raise Unreadable(f"a word: {token}")
    self._at -= 1
    self._tokens[self._at : self._at + 1] = token
    return self.atom()


def _is_whole(tree) -> bool:
  return tree[0] == "number" and tree[1].denominator == 1 and not tree[2]
