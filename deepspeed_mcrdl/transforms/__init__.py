"""A call rewritten before it is sent."""
