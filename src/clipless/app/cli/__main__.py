"""`python -m clipless.app.cli`: the command line of this interpreter, whichever `clipless` is first on PATH."""

from clipless.app.cli import main

if __name__ == "__main__":
    main()
