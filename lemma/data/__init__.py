"""Where problems and demonstrations come from: sources, row readers, mixing, filters, preparation."""
