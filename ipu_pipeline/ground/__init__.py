"""What every room may use. It knows no pipelines, and imports nothing from the package."""
