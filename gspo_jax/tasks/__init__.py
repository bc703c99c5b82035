"""The embedded tasks: problems, demonstrations, and what checks an answer.

A config names them, by the tables `BUILT_IN` of other wings or by a dotted
path; no module imports them. Worker processes do, so they need only the
standard library.

chain         arithmetic with labelled steps, the default; the reward
              `final_answer` checks it
instructions  short texts to rules, and the reward that checks the rules
games         calculator and guessing: problems and environments
"""
