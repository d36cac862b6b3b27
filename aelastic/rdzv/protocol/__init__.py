"""What agents tell each other: messages, their bytes, ranks, addresses."""
