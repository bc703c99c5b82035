"""A run, or several compared, as one HTML page: `python -m gspo_jax.report`.

Other wings take nothing from here. Inside, `workdir` reads the files of a run,
`subjects` lists the charts, `charts` draws them with plotly, and `page` puts
everything together.
"""

__all__ = ("page", "subjects", "workdir")
