"""`python -m manyheads`."""

from manyheads.cli import main

main()
