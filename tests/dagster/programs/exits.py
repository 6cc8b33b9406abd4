"""Ends with an error after it has opened Pipes."""

import sys

from dagster_pipes import open_dagster_pipes

with open_dagster_pipes():
    sys.exit(3)
