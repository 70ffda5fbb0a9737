"""The backends: base.py says what one is; each other file is one, found through the entry points."""
