"""Pictures of results: attention, confusion, piano rolls."""
