"""Three published methods as an outside package would bring them: both halves of each in one file."""
