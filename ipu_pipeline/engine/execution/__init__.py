"""Running a step."""
