"""`python -m clipless.cli`: the command line of this interpreter, whatever is first on PATH."""

from clipless.cli import main

if __name__ == "__main__":
    main()
