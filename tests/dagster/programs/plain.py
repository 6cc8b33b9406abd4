"""Knows nothing of Pipes."""

print("plain output")
