"""What Fedloom does on request: simulate, resume, unlearn, compose, fuse, transfer, list, remove. No terminal needed."""
