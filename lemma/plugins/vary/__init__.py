"""The same problems with other numbers, from solutions with calculator marks."""
