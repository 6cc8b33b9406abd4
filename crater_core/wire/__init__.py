"""The messages of the HTTP API, version 1: strict on the way in, stable on the way out, in the units people write."""
