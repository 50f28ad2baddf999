"""Speed and memory beside peers, in one run; the tables are committed."""
