"""Figures of the lectures that need no run, or read one: `manyheads figure NAME`."""
