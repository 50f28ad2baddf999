"""More than one process or machine: options, other systems' configuration files, launching."""
