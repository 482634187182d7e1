"""C code that does in one pass what torch and numpy do in many: the sources, their wrappers, and one self-check.

It is built with the package where there is a C compiler (see hatch_build.py), and nothing needs it: whoever uses it has the
same in numpy or torch, and takes the compiled form only through `checked`.
"""

from clipless.native.library import LIBRARY, SOURCES, WORTH_A_THREAD, checked, threads, wave

__all__ = ["LIBRARY", "SOURCES", "WORTH_A_THREAD", "checked", "threads", "wave"]
