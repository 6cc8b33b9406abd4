"""The scheduling core of Crater: values, decisions, state, the scheduler process, its client and its command."""

__version__ = "0.1.0"
