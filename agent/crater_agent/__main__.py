"""`python -m crater_agent`."""

from crater_agent.main import main

main()
