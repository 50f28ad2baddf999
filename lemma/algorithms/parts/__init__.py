"""What algorithms are put together from: options that several of them share, and functions on groups of samples."""
