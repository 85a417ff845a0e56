"""From files to batches: what a model is trained and tested on."""
