"""`python -m alphaprof` is the `alphaprof` command."""

from alphaprof.cli.app import main

if __name__ == "__main__":
    main()
