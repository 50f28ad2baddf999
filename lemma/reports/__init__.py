"""What users see of runs: the report, the live page, the table of runs. Reads run folders and never writes to them."""
