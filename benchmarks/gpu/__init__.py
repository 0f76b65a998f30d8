"""What can only be measured on a machine with GPUs."""
