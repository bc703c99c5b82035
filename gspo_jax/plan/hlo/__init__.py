"""The text of compiled programs, read and costed."""
