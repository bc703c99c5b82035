r"""Results in one spelling, and their tokens.

A token is a number (`12.5`, or `0.1<6>` for 0.1666...), a command (`\frac`), a
run of letters, a run of letters that LaTeX prints as text (`"cm`), or one other
character. `°` is the sign of degrees.
"""

import re

from gspo_jax.rewards import numbers

# Characters. Longer results are compared as they stand; the references of MATH
# have fewer than 200.
MAX_LENGTH = 500

# Characters of plain text, as LaTeX.
_SIGNS = r"""
− - – - ’ ' ∶ : × \times · \cdot ⋅ \cdot ÷ \div ± \pm √ \surd ∞ \infty ≤ \le
≥ \ge ≠ \ne ≈ \approx ∈ \in ∪ \cup ∩ \cap ∅ \emptyset π \pi θ \theta α \alpha
β \beta φ \phi λ \lambda µ \mu μ \mu Ω \Omega ℝ \R … \ldots ² ^2 ³ ^3 ½ \frac12
⅓ \frac13 ⅔ \frac23 ¼ \frac14 ¾ \frac34
""".split()
_CHARACTERS = str.maketrans(
  {
    sign: latex + " " * latex[-1].isalpha()
    for sign, latex in zip(_SIGNS[::2], _SIGNS[1::2], strict=True)
  }
)
# Commands with a shorter name or sign.
_SHORT = r"""
dfrac \frac tfrac \frac cfrac \frac dbinom \binom tbinom \binom leq \le
leqslant \le geq \ge geqslant \ge neq \ne lt < gt > land \wedge lor \vee
varnothing \emptyset varphi \phi varepsilon \epsilon ast * equiv = lbrace \{
rbrace \} lvert | rvert | vert | colon : to \rightarrow dots \ldots
cdots \ldots simeq \approx degree ° pounds £ mathdollar \$ textdollar \$
smallsetminus \setminus backslash \setminus Reals \R
""".split()
# Commands that change only the looks.
_LOOKS = """
left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle limits
hfill ensuremath checkmark rm bf it tiny small large Large LARGE huge Huge quad
qquad therefore boxed underline
""".split()
_COMMANDS = dict(zip(_SHORT[::2], _SHORT[1::2], strict=True)) | dict.fromkeys(
  _LOOKS, " "
)
_COMPARED = {"<=": "\\le ", ">=": "\\ge ", "!=": "\\ne "}
_COMMAND = re.compile(r"\\\\|\\([a-zA-Z]+)")
_SPACE = re.compile(r"\\(?:left|right)\s*\.|(?<!\\)\\[,!;:> ()\[\]]|~")
_TEXT = re.compile(
  r"\\(?:text(?:rm|normal|bf|it|sf|tt)?|mbox|hbox|math(?:rm|bf|sf|it)|emph"
  r"|boldsymbol|bm|operatorname\*?)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_WORD, _AS_TEXT = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]+"), r'"\g<0>'
_NUMBERS = re.compile(r"\\mathbb\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))")
_UNSEEN = re.compile(
  r"\\(?:color|textcolor|hspace\*?|vspace|[hv]?phantom)\s*\{[^{}]*\}"
)
_ORDINAL = re.compile(
  r'(?<=[0-9])\s*(?:\^\s*\{\s*"?(?:st|nd|rd|th)\s*\}|\^?\s*"?(?:st|nd|rd|th)\b)'
)
_ARRAY = re.compile(r"(\\begin\{array\})\s*\{[^{}]*\}")
_DEGREES = re.compile(
  r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z])|°)"
  r"|(?<=[0-9])\s*\^\s*(?:\{\s*o\s*\}|o(?![a-zA-Z]))"
)
_INFIX = re.compile(r"\{([^{}]*)\\(over|choose)(?![a-zA-Z])([^{}]*)\}")
_INFIXES = {"over": "frac", "choose": "binom"}
_FRACTION = re.compile(r"\\(frac|binom)\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
_EMPTY = re.compile(r"[\^_]\s*\{\s*\}")
_COMPARISON = re.compile(r"<=|>=|!=(?!.*=)")
_NOT_EQUAL = re.compile(r"\\not\s*=")
_SCRIPT = re.compile(r"([\^_])\s*\{\s*([0-9a-zA-Z])\s*\}(?![0-9])")
_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_DOLLAR = re.compile(r"(?<!\\)\$")
_US = re.compile(r"US\s*(?=\\\$)")
# As in 6e13, which has no Euler's number.
_EXPONENT = re.compile(
  r"(?<![\w\\.])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([+-]?[0-9]{1,3})"
  r"(?!\w|\.[0-9])"
)
_CROSS = re.compile(r"(?<=[0-9])\s*x\s*(?=10\s*\^)")
_REPEATED = re.compile(
  r"([0-9]*\.[0-9]*)\\(?:overline|bar|dot)\s*(?:\{([0-9]+)\}|([0-9]))"
)
_GOES_ON = re.compile(
  r"(?<![0-9])([0-9]*\.[0-9]*?)([0-9])\2\2+(?:\\ldots|\.{3})"
)
# Separators of thousands: unambiguous ones, and commas, which are not.
_THIN = re.compile(
  r"(?<![0-9.])[0-9]{1,3}(?:(?:\{,\}|\\!,|,\\! ?|\\[, ]|~| )[0-9]{3})+(?![0-9])"
)
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
# A word after a number and a space may be a unit. A single letter is a factor,
# except for metres, grams and litres after a number alone.
_SPACED = re.compile(
  r"(?<=[0-9})])\s+(?=[a-zA-Z]{3,})"
  r"|\A-?[0-9.]+\s+(?=[mgL](?:\^[1-9])?[\s.]*\Z)"
)
_BRACKET = re.compile(r"(\\\{|[(\[]|\\langle)|(\\\}|[)\]]|\\rangle)")
_TOKEN = re.compile(
  r"[0-9]*\.[0-9]*<[0-9]+>|[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
  r"|\\(?:begin|end)\{[a-zA-Z]+\*?\}|\\(?:[a-zA-Z]+|.)"
  r'|"?[a-zA-Z]+|\S',
  re.DOTALL,
)


def normalised(text: str) -> str:
  """The text in a normal form; unchanged if longer than `MAX_LENGTH`."""
  if len(text) > MAX_LENGTH:
    return text.strip()
  joined = ""
  for token in tokens(text):
    token = token.strip('"')
    joined += " " * (joined[-1:].isalnum() and token[:1].isalnum()) + token
  value = numbers.number(joined.replace("°", ""))
  if value is None:
    return joined
  digits = f"{value or abs(value):f}"
  return digits.rstrip("0").rstrip(".") if "." in digits else digits


def tokens(text: str) -> list[str]:
  text = _THIN.sub(lambda m: re.sub("[^0-9]", "", m[0]), text.strip("* \n"))
  text = _GROUPED.sub(_without_commas, _spelled(text))
  text = _ROOT.sub(r"\\sqrt{\1}", _FRACTION.sub(r"\\\1{\2}{\3}", text))
  text = _SCRIPT.sub(r"\1\2 ", text)
  text = _EXPONENT.sub(r"\1\\times10^{\2}", _CROSS.sub(r"\\times ", text))
  text = _SPACED.sub(lambda m: m[0] + '"', text)
  text = _REPEATED.sub(lambda m: f"{m[1]}<{m[2] or m[3]}>", text)
  text = _GOES_ON.sub(r"\1<\2>", text)
  return _TOKEN.findall(text.rstrip("\\ .,;"))


def _spelled(text: str) -> str:
  """One command for each meaning, and no commands of looks."""
  text = _UNSEEN.sub(" ", _EMPTY.sub("", text.translate(_CHARACTERS)))
  text = _COMPARISON.sub(lambda m: _COMPARED[m[0]], text)
  text = _NOT_EQUAL.sub(r"\\ne ", text)
  text = _NUMBERS.sub(r"\\\1\2 ", text)
  text = _COMMAND.sub(
    lambda m: _COMMANDS.get(m[1], m[0]), _SPACE.sub(" ", text)
  )
  for _ in range(3):  # text in text
    text = _TEXT.sub(lambda m: f" {_WORD.sub(_AS_TEXT, m[1])} ", text)
  text = _DEGREES.sub("°", _ARRAY.sub(r"\1", text)).replace("**", "^")
  text = text.replace("{:}", ":")
  text = _ORDINAL.sub("", _US.sub("", text))
  text = _INFIX.sub(lambda m: f"\\{_INFIXES[m[2]]}{{{m[1]}}}{{{m[3]}}}", text)
  return _DOLLAR.sub(r"\\$" if text.count("$") == 1 else "", text)


def _without_commas(number: re.Match) -> str:
  brackets = _BRACKET.findall(number.string[: number.start()])
  is_inside = sum(1 if opened else -1 for opened, _ in brackets) > 0
  if is_inside and ", " not in number.string:
    return number[0]
  return number[0].replace(",", "")
