"""Takes more and more memory."""

import os

from dagster_pipes import open_dagster_pipes

with open_dagster_pipes():
    held = []
    while True:
        held.append(bytearray(os.urandom(1024) * 4096))
