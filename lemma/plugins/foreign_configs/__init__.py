"""What the configuration files of DeepSpeed, Accelerate and FSDP mean here."""
