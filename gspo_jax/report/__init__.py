"""`python -m gspo_jax.report WORKDIR`: a run as a page to read."""
