"""The page: a small server on loopback, and what a browser shows of it (page/)."""
