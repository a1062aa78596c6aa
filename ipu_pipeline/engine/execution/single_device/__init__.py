"""Everything on one device: one program, block by block."""
