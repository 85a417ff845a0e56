import math

from benchmarks.time_to_quality import Clock, NanoGpt


def test_the_small_model_of_nanogpt_has_its_published_size() -> None:
    """10.65M parameters without the table of positions, with 65 characters."""
    model = NanoGpt(vocabulary=65, length=256, dim=384, layers=6, heads=6)
    parameters = sum(p.numel() for p in model.parameters())
    assert round((parameters - model.positions.weight.numel()) / 1e6, 2) == 10.65


def test_the_first_validation_that_reaches_the_goal_counts() -> None:
    for rising, goal, expected in ((True, 40.0, 20), (False, 1.0, 30), (True, 99.0, 20)):
        clock = Clock(goal, rising=rising)
        hits = [
            clock.add(step, value, clock.start) for step, value in ((10, 7), (20, 41), (30, 0.5))
        ]
        row = clock.row()
        assert row["reached"] == any(hits) == (goal != 99)
        assert row["step"] == expected


def test_without_a_goal_the_best_validation_counts() -> None:
    clock = Clock(-math.inf, rising=False)
    for step, value in ((10, 2.0), (20, 1.5), (30, 1.7)):
        assert not clock.add(step, value, clock.start)
    assert clock.row()["step"] == 20
