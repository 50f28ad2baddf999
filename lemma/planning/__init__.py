"""What a recipe would do, what it needs and whether it fits: computed, with nothing loaded."""
