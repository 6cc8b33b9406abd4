"""Brings up a small cluster on this machine, runs the digits loop through Dagster on it, and takes everything down again."""
