"""`python -m homespec`."""

from homespec.cli import main

main()
