"""Linear algebra, Fourier transforms, special functions and complex numbers."""
