"""Training: the loss, optimizer and schedule, checkpoints, and one loop for every task.

Calling this module, `manyheads.train("phrasebook", ["train.steps=400"], out="runs/first")`, trains
a recipe: see `manyheads.recipes.train`.
"""
