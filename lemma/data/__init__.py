"""Where rows come from, how they are read, mixed, split, shortened and written."""
