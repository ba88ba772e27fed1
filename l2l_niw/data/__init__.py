"""Task families and their sources."""

from l2l_niw.data.sine_line import SineLine

__all__ = ["SineLine"]
