"""What `draw_figures.py` is made of: facts about the library, parts of figures, an SVG writer."""
