"""`python -m ipu_pipeline`, which is the program `ipu-pipeline`."""

from ipu_pipeline.command_line.main import main

if __name__ == "__main__":
    raise SystemExit(main())
