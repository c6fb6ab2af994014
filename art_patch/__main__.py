"""`python -m art_patch` is `art-patch`."""

from art_patch.cli import main

if __name__ == "__main__":
    main()
