"""A run, or several compared, as one HTML page: `python -m gspo_jax.report`.

`workdir` reads the files of a run, `charts` draws the metrics with plotly,
`tables` and `samples` write the rest, and `page` joins them.
"""

__all__ = ("page", "workdir")
