"""What `benchmarks/pose.py` runs: tasks, methods, training, scores and the page."""
