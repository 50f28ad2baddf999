"""Models as GGUF files, read and written."""
