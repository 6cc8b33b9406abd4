"""Notes that it runs, then goes on until a file appears beside its mark."""

import os
import sys
import time
from pathlib import Path

from dagster_pipes import open_dagster_pipes

mark = Path(sys.argv[1])
with open_dagster_pipes():
    with mark.open("a") as file:
        file.write(f"{os.getpid()}\n")
    while not mark.with_suffix(".end").exists():
        time.sleep(0.05)
