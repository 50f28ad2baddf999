"""Building blocks of algorithms: shared options, and functions on groups of samples."""
