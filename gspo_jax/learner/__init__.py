"""Scored responses become a better policy."""
