"""The tables of the lectures: published rows, and ours next to them."""
