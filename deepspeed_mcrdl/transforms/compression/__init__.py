"""Fewer bytes in a message: codecs, and the feedback of what they lose."""
