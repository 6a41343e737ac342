"""A module of the user's that programs import while they run."""

SCALE = 2.0
