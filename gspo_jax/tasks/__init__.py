"""The embedded tasks: problems, demonstrations, and what checks an answer.

No module imports them: a config names them, through the tables `BUILT_IN` of
the wings below or by a dotted path.
  chain         arithmetic with labelled steps, the default; `final_answer`
                of `rewards` checks it
  instructions  short texts to rules, and the reward that checks the rules
  games         calculator and guessing: problems, and their environments
They need the standard library alone: worker processes import them.
"""

__all__ = ("chain", "games", "instructions")
