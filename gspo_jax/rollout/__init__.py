"""Prompts become scored responses."""
