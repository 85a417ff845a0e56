"""`python -m manyheads`."""

from manyheads.cli import main

if __name__ == "__main__":
    main()
