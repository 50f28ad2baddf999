"""Speed and memory compared with other systems in the same run; the tables are committed."""
