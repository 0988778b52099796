"""What users are told: known failures, refused settings, and which exception was the cause."""
