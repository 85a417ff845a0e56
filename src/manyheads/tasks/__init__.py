"""Tasks: how a run is prepared, trained, validated and scored."""
