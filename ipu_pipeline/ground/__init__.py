"""What every room may use: it knows no pipelines, and imports nothing of the package."""
