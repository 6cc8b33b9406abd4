"""`python -m crater_core.cli`: the same as `crater`."""

from crater_core.cli import main

main()
