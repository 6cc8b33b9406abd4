"""Frozen values: what the words of the glossary look like. Pure; imports nothing but the standard library."""
