"""`python -m alphaprof` is the `alphaprof` command."""

from alphaprof.cli import main

if __name__ == "__main__":
    main()
