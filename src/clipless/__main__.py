"""`python -m clipless`, and `torchrun -m clipless` for several processes: the command line."""

from clipless.app.cli import main

if __name__ == "__main__":
    main()
